"""The order of `dfs-weight`: the parts of the radix tree that most waiting requests want, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.kvcache.radix_cache import Peek, TreeNode
from shared.scheduling.req import Req


def dfs_positions(waiting: Sequence[Req], match_of: Callable[[Req], Peek]) -> dict[Req, int]:
    """The place of each request in a depth-first walk that enters heavier subtrees first.

    The weight of a node is the number of waiting requests whose match ends in it or below. Children come before
    the requests of their parent, and longer matches within a node before shorter ones. Of two subtrees of the same
    weight the one with the earliest arrival goes first. Looks only at nodes above a match: O(requests * depth).
    """
    ending: dict[TreeNode, list[Req]] = {}
    children: dict[TreeNode, list[TreeNode]] = {}
    weight: dict[TreeNode, int] = {}
    root: TreeNode | None = None
    for req in waiting:
        node: TreeNode | None = match_of(req).node
        assert node is not None
        ending.setdefault(node, []).append(req)
        while node is not None:
            if node.parent is None:
                root = node
            elif node not in weight:
                children.setdefault(node.parent, []).append(node)
            weight[node] = weight.get(node, 0) + 1
            node = node.parent
    # Parents, then children from the lightest to the heaviest, read backwards: an order without recursion, since
    # the tree may be deep.
    found: list[Req] = []
    stack = [root] if root is not None else []
    while stack:
        node = stack.pop()
        found += sorted(ending.get(node, ()), key=lambda req: -match_of(req).num_pages)[::-1]
        stack += sorted(children.get(node, ()), key=lambda child: -weight[child])
    return {req: place for place, req in enumerate(reversed(found))}
