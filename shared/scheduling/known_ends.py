"""Whether requests that run to a known length fit into the KV pool, all the way to their ends.

The idea of SGLang's `add_one_req_ignore_eos`: a request that ignores EOS ends after `max_new_tokens` and not
before, so nothing needs to be guessed. What those that end sooner give back is there for those that end later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from shared.kvcache.radix_cache import TreeNode


@dataclass(frozen=True, slots=True)
class KnownEnd:
    """A request that holds KV of `kv_len` tokens and will compute `num_steps` more, one each decode step.

    When it ends it gives back `own_pages`, what it has grown by, and each node of `nodes` that nobody else reads.
    """

    kv_len: int
    num_steps: int
    own_pages: int
    nodes: Sequence[TreeNode]


def fits_to_the_end(
    ends: Iterable[KnownEnd], num_free_pages: int, page_size: int, released: Iterable[TreeNode] = ()
) -> bool:
    """Whether every step of all requests finds its pages. Exact but for one step: pages come back one step late.

    `num_free_pages` are the pages that none of them holds yet; `released` names the readers of nodes that are
    about to go, once for each. O(requests * (page_size + depth of the tree)).
    """
    by_end = sorted(ends, key=lambda end: end.num_steps)
    if sum(_grown(end, end.num_steps, page_size) for end in by_end) <= num_free_pages:
        return True  # even if nobody gave anything back
    readers_gone = Counter(released)
    # How many of those that still run have so many tokens in their last page, less one.
    fill = [0] * page_size
    for end in by_end:
        fill[(end.kv_len - 1) % page_size] += 1
    num_running = len(by_end)
    for num_steps, group in groupby(by_end, key=lambda end: end.num_steps):
        ending = list(group)
        num_running -= len(ending)
        for end in ending:
            fill[(end.kv_len - 1) % page_size] -= 1
        # The result of their last step is still awaited while the others take the next one.
        pages, tokens = divmod(num_steps + 1, page_size)
        needed = sum(_grown(end, num_steps, page_size) for end in ending)
        needed += num_running * pages + sum(fill[page_size - tokens :] if tokens else ())
        if needed > num_free_pages:
            return False
        for end in ending:
            num_free_pages += end.own_pages
            for node in end.nodes:
                readers_gone[node] += 1
                if readers_gone[node] == node.lock_ref:
                    num_free_pages += len(node.pages)
    return True


def _grown(end: KnownEnd, num_steps: int, page_size: int) -> int:
    return -(-(end.kv_len + num_steps) // page_size) - -(-end.kv_len // page_size)
