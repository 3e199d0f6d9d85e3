"""A radix tree over token ids whose nodes own KV pages, so that later requests need not compute a prefix again.

Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs" (NeurIPS 2024), section 3. The tree
works on pages: keys are cut into pages of `page_size` tokens, and only whole pages are shared.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import cast

from shared.kvcache.windows import WindowPages
from shared.protocol.block_hash import next_hash, root_hash


class CacheChanges:
    """Collects changes between two reports. A page that entered and left in between counts as removed."""

    def __init__(self) -> None:
        self._is_stored: dict[int, bool] = {}

    def stored(self, hashes: Iterable[int]) -> None:
        """Note pages that can be matched from now on."""
        self._is_stored.update(dict.fromkeys(hashes, True))

    def removed(self, hashes: Iterable[int]) -> None:
        """Note pages that can no longer be matched."""
        self._is_stored.update(dict.fromkeys(hashes, False))

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (stored hashes, removed hashes) since the last call."""
        taken, self._is_stored = self._is_stored, {}
        return (
            tuple(block for block, is_stored in taken.items() if is_stored),
            tuple(block for block, is_stored in taken.items() if not is_stored),
        )


Page = tuple[int | str, ...]
"""The token ids of one page. The first page of a prefix begins with its extra_key, if it has one."""


@dataclass(eq=False, slots=True)
class TreeNode:
    """A run of pages. `lock_ref` counts the requests that read this node. A locked node is never evicted."""

    parent: TreeNode | None
    keys: list[Page]
    pages: list[int]
    children: dict[Page, TreeNode] = field(default_factory=dict)
    lock_ref: int = 0
    last_access: int = 0
    """By a logical clock. Below 0: evicted before all other prefixes."""
    queued: bool = False
    """True only while the node has an entry in the eviction heap."""
    hashes: list[int] = field(default_factory=list)
    """The block hash of each page. Empty when `RadixCache.changes` is None."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: its `pages` in order, and the node at its end."""

    pages: list[int]
    node: TreeNode


@dataclass(frozen=True, slots=True)
class Peek:
    """Where a match would end: after `num_pages` pages, in `node`, perhaps in the middle of it."""

    num_pages: int
    node: TreeNode


@dataclass(frozen=True, slots=True)
class Inserted:
    """The result of an insert: the node at the end of the prefix, and the tree's pages for what was inserted.

    `duplicates` are pages of the caller for which the tree already had one. They still belong to the caller.
    """

    node: TreeNode
    pages: list[int]
    duplicates: list[int]


class PrefixLock:
    """Protects a prefix from eviction until `release`. `move_to` protects another prefix instead."""

    def __init__(self, cache: RadixCache, node: TreeNode) -> None:
        self._cache = cache
        self._node: TreeNode | None = node
        cache._lock(node)

    def move_to(self, node: TreeNode) -> None:
        """Protect the prefix of `node` instead. The new prefix is locked before the old one is unlocked."""
        before = self.node
        self._cache._lock(node)
        self._cache._unlock(before)
        self._node = node

    @property
    def node(self) -> TreeNode:
        """The end of the protected prefix."""
        assert self._node is not None, "the lock is released"
        return self._node

    def nodes(self) -> Iterator[TreeNode]:
        """Every node that this lock protects, from the end of its prefix to the root."""
        return self._cache._path(self._node)

    def release(self, evict_first_from: int | None = None) -> None:
        """Unlock the prefix. A second call is a bug.

        With `evict_first_from`, its pages from that one on are evicted before all other prefixes, until they are used
        again, and in the order of such releases. Those that other requests read or have continued keep their place.
        """
        assert self._node is not None, "released twice"
        if evict_first_from is not None:
            self._cache._put_first(self._node, evict_first_from)
        self._cache._unlock(self._node)
        self._node = None


class RadixCache:
    """The prefixes whose KV is computed. A prefix is inserted when its forward is committed.

    Requests with different `extra_key` never share pages. The leaf that was matched or inserted least recently, by a
    logical clock, is evicted first, behind what locks have released to be evicted before. The cache is not
    thread-safe. It belongs to the scheduler thread.
    """

    def __init__(
        self, page_size: int, changes: CacheChanges | None = None, windows: WindowPages | None = None
    ) -> None:
        """With `windows`, a prefix is found only up to a page behind which a forward can go on."""
        self.page_size = page_size
        self.changes = changes
        self._windows = windows
        self.num_changes = 0
        """Increases whenever a `peek` may have another result than before."""
        self.num_evictable_pages = 0
        self.num_protected_pages = 0
        self._root = TreeNode(parent=None, keys=[], pages=[])
        self._clock = 0
        self._clock_of_first = -(1 << 62)
        self._num_queued = 0
        self._heap: list[tuple[int, int, TreeNode]] = []
        """Evictable leaves by last access. An entry may be out of date, so it is checked when it is popped."""
        if windows is not None:
            windows.on_change = self._count_change

    def match_prefix(self, ids: Sequence[int], extra_key: str = "") -> Match:
        """Find the longest prefix of `ids`, in whole pages. A node that matches in part is split."""
        node, _ = self._descend(self._cut(ids, extra_key), self._root)
        pages = self._path_pages(node, self._root)
        if self._windows is not None and (num_pages := self._windows.hit(pages)) < len(pages):
            node, pages = self.cut_at(self.shortened(Peek(len(pages), node), num_pages)), pages[:num_pages]
        return Match(pages, node)

    def peek(self, ids: Sequence[int], num_tokens: int, extra_key: str = "") -> Peek:
        """Find what `match_prefix(ids[:num_tokens])` would find. No node counts as used, and none is split.

        The cost is that of the length that matches, not of `ids`.
        """
        size, num_pages = self.page_size, num_tokens // self.page_size
        node, at = self._root, 0
        lead: tuple[int | str, ...] = (extra_key,) if extra_key else ()
        while at < num_pages:
            child = node.children.get((*lead, *ids[at * size : (at + 1) * size]))
            if child is None:
                break
            node, at, lead = child, at + 1, ()
            for key in child.keys[1 : 1 + num_pages - at]:
                if key != tuple(ids[at * size : (at + 1) * size]):
                    return self._usable(Peek(at, node))
                at += 1
        return self._usable(Peek(at, node))

    def cut_at(self, peek: Peek) -> TreeNode:
        """Split the node in whose middle `peek` ends, if it does, so that a lock holds no more than the prefix.

        Returns the node with which the prefix ends then.
        """
        num_behind = sum(len(node.pages) for node in self._path(peek.node)) - peek.num_pages
        return self._split(peek.node, len(peek.node.pages) - num_behind) if num_behind else peek.node

    def pages_of(self, peek: Peek, first_page: int = 0) -> list[int]:
        """The pages of the peeked prefix, from `first_page` on."""
        return self._path_pages(peek.node, self._root)[first_page : peek.num_pages]

    def shortened(self, peek: Peek, num_pages: int) -> Peek:
        """The first `num_pages` pages of the peeked prefix."""
        node, end = peek.node, sum(len(node.pages) for node in self._path(peek.node))
        while node.parent is not None and end - len(node.pages) >= num_pages:
            end -= len(node.pages)
            node = node.parent
        return Peek(num_pages, node)

    def num_pages_unlocked_by(self, locks: Iterable[PrefixLock]) -> int:
        """Count the pages that would become evictable if all of `locks` were released."""
        released = Counter(node for lock in locks for node in lock.nodes())
        return sum(len(node.pages) for node, count in released.items() if node.lock_ref == count)

    def num_pages_held_only_by(self, locks: Iterable[PrefixLock], peek: Peek) -> int:
        """Count the pages of the peeked prefix that no lock but `locks` protects."""
        released = Counter(node for lock in locks for node in lock.nodes())
        held = sum(len(node.pages) for node in self._path(peek.node) if node.lock_ref > released[node])
        return max(peek.num_pages - held, 0)

    def insert(
        self, ids: Sequence[int], page_ids: Sequence[int], extra_key: str = "", lock: PrefixLock | None = None
    ) -> Inserted:
        """Insert the pages of a computed prefix. `ids` and `page_ids` cover the same whole pages.

        They continue the prefix of `lock`, if that is given, so that a prompt of many chunks costs its length, and
        `lock` protects them, too. The tree takes the pages that it lacks. The others are returned as duplicates.
        """
        top = lock.node if lock is not None else self._root
        keys = self._cut(ids, extra_key if top is self._root else "")
        assert len(keys) == len(page_ids) and len(ids) == len(keys) * self.page_size
        node, rest = self._descend(keys, top)
        if rest:
            leaf = TreeNode(parent=node, keys=rest, pages=list(page_ids[len(keys) - len(rest) :]))
            if self.changes is not None:
                leaf.hashes = self._hashes(node, rest)
                self.changes.stored(leaf.hashes)
            node.children[rest[0]] = leaf
            self.num_changes += 1
            self._touch(leaf)
            self.num_evictable_pages += len(rest)
            node = leaf
        if lock is not None:
            lock.move_to(node)
        self._queue_for_eviction(node)
        pages = self._path_pages(node, top)
        return Inserted(
            node, pages, [ours for ours, tree in zip(page_ids, pages, strict=True) if ours != tree]
        )

    def lock(self, node: TreeNode) -> PrefixLock:
        """Protect the prefix that ends in `node` from eviction until the lock is released."""
        return PrefixLock(self, node)

    def evict(self, num_pages: int) -> list[int]:
        """Remove up to `num_pages` unlocked pages, least recently used first. They belong to the caller then."""
        evicted: list[int] = []
        while self._heap and len(evicted) < num_pages:
            last_access, _, leaf = heapq.heappop(self._heap)
            leaf.queued = False
            if leaf.last_access != last_access:
                self._queue_for_eviction(leaf)
                continue
            if leaf.children or leaf.lock_ref or leaf.parent is None:
                continue
            keep = max(len(leaf.pages) - (num_pages - len(evicted)), 0)
            evicted += leaf.pages[keep:]
            if self.changes is not None:
                self.changes.removed(leaf.hashes[keep:])
            if keep:
                del leaf.pages[keep:], leaf.keys[keep:], leaf.hashes[keep:]
                self._queue_for_eviction(leaf)
                continue
            self._cut_off(leaf)
        self.num_evictable_pages -= len(evicted)
        self.num_changes += 1
        return evicted

    def evict_behind(self, ids: Sequence[int], num_pages: int, extra_key: str = "") -> list[int]:
        """Remove page `num_pages` of the prefix `ids` and all that continues it, but what is locked.

        The removed pages belong to the caller then.
        """
        keys = self._cut(ids, extra_key)
        top, unmatched = self._descend(keys[:num_pages], self._root)
        if unmatched or num_pages >= len(keys) or keys[num_pages] not in top.children:
            return []
        evicted: list[int] = []
        for node in reversed(list(self._nodes(top.children[keys[num_pages]]))):
            if not node.lock_ref:
                evicted += node.pages
                if self.changes is not None:
                    self.changes.removed(node.hashes)
                self._cut_off(node)
        self.num_evictable_pages -= len(evicted)
        self.num_changes += 1
        return evicted

    def pages(self) -> list[int]:
        """Every page that the tree owns, for the audit."""
        return [page for node in self._nodes() for page in node.pages]

    def hashes(self) -> list[int]:
        """The block hash of every page of the tree. `changes` must be set."""
        return [block for node in self._nodes() for block in node.hashes]

    def count_locked_pages(self) -> int:
        """Count the pages of locked nodes by walking the tree, for the audit."""
        return sum(len(node.pages) for node in self._nodes() if node.lock_ref)

    # ------------------------------------------------------------------------------------------ inside
    def _count_change(self) -> None:
        self.num_changes += 1

    def _usable(self, peek: Peek) -> Peek:
        """What can be continued of the peeked prefix."""
        if self._windows is None:
            return peek
        return self.shortened(peek, self._windows.hit(self.pages_of(peek)))

    def _cut_off(self, leaf: TreeNode) -> None:
        """Remove a leaf, whose pages have another owner from now on."""
        assert leaf.parent is not None
        del leaf.parent.children[leaf.keys[0]]
        self._queue_for_eviction(leaf.parent)
        leaf.parent = None

    def _queue_for_eviction(self, node: TreeNode) -> None:
        """Put an unlocked leaf into the eviction heap."""
        if node.children or node.lock_ref or node.parent is None or node.queued:
            return
        self._num_queued += 1
        node.queued = True
        heapq.heappush(self._heap, (node.last_access, self._num_queued, node))

    def _hashes(self, parent: TreeNode, keys: Sequence[Page]) -> list[int]:
        hashes: list[int] = []
        last = parent.hashes[-1] if parent.hashes else root_hash("")
        for key in keys:
            if isinstance(key[0], str):
                last, key = root_hash(key[0]), key[1:]
            last = next_hash(last, cast("tuple[int, ...]", key))
            hashes.append(last)
        return hashes

    def _cut(self, ids: Sequence[int], extra_key: str) -> list[Page]:
        # One iterator, taken page_size times for each tuple; a page that is not whole is left out.
        keys: list[Page] = list(zip(*[iter(ids)] * self.page_size, strict=False))
        if extra_key and keys:
            keys[0] = (extra_key, *keys[0])
        return keys

    def _descend(self, keys: list[Page], node: TreeNode) -> tuple[TreeNode, list[Page]]:
        """Follow `keys` down from `node`, splitting one that matches in part. Returns the last node and the rest.

        Every node of the path counts as used, from the root on.
        """
        at = 0
        for ancestor in reversed(list(self._path(node))):
            self._touch(ancestor)
        while at < len(keys):
            child = node.children.get(keys[at])
            if child is None:
                break
            shared = 0
            while (
                shared < len(child.keys)
                and at + shared < len(keys)
                and child.keys[shared] == keys[at + shared]
            ):
                shared += 1
            node = child if shared == len(child.keys) else self._split(child, shared)
            self._touch(node)
            at += shared
        return node, keys[at:]

    def _split(self, node: TreeNode, at: int) -> TreeNode:
        """Split `node` before page `at`. Returns the new upper half, which has the lock_ref of the whole."""
        assert node.parent is not None
        self.num_changes += 1
        upper = TreeNode(
            parent=node.parent,
            keys=node.keys[:at],
            pages=node.pages[:at],
            children={node.keys[at]: node},
            lock_ref=node.lock_ref,
            last_access=node.last_access,
            hashes=node.hashes[:at],
        )
        node.parent.children[upper.keys[0]] = upper
        node.parent, node.keys, node.pages = upper, node.keys[at:], node.pages[at:]
        node.hashes = node.hashes[at:]
        return upper

    def _touch(self, node: TreeNode) -> None:
        self._clock += 1
        node.last_access = self._clock

    def _lock(self, node: TreeNode) -> None:
        for ancestor in self._path(node):
            if ancestor.lock_ref == 0:
                self.num_evictable_pages -= len(ancestor.pages)
                self.num_protected_pages += len(ancestor.pages)
            ancestor.lock_ref += 1

    def _unlock(self, node: TreeNode) -> None:
        for ancestor in self._path(node):
            assert ancestor.lock_ref > 0
            ancestor.lock_ref -= 1
            if ancestor.lock_ref == 0:
                self.num_evictable_pages += len(ancestor.pages)
                self.num_protected_pages -= len(ancestor.pages)
                self._queue_for_eviction(ancestor)

    def _put_first(self, end: TreeNode, num_pages: int) -> None:
        """Have what one request alone uses, behind the first `num_pages` pages of its prefix, evicted first."""
        self._clock_of_first += 1
        path = list(self._path(end))
        num_behind = sum(len(node.pages) for node in path) - num_pages
        for node in path:
            num_behind -= len(node.pages)
            if num_behind < 0 or node.parent is None or node.lock_ref > 1:
                return
            if any(child.last_access >= 0 for child in node.children.values()):
                return
            node.last_access = self._clock_of_first
            node.queued = False  # an older entry would come too late, so the unlock adds another one

    def _path(self, node: TreeNode | None) -> Iterator[TreeNode]:
        while node is not None:
            yield node
            node = node.parent

    def _path_pages(self, node: TreeNode, top: TreeNode) -> list[int]:
        """The pages of the nodes below `top`, down to `node`."""
        path = list(takewhile(lambda ancestor: ancestor is not top, self._path(node)))
        return [page for ancestor in reversed(path) for page in ancestor.pages]

    def _nodes(self, top: TreeNode | None = None) -> Iterator[TreeNode]:
        """The nodes below `top` and itself, each before its children. None: all nodes."""
        stack = [top or self._root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
