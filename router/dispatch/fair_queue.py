"""The sequences that wait for their turn among API keys, when clients of several keys share the fleet.

The virtual token counter of Sheng et al. 2024 ("Fairness in Serving Large Language Models"): each key has a counter
of what was served to it, a prompt token counting 1 and an output token OUTPUT_WEIGHT. The waiting sequence that goes
next is of the key with the lowest counter. A key that comes back is lifted to the others, so it saves nothing up
while it is idle. Nodes take requests first come first served. So only as many prompt tokens are sent to them as keep
them busy, and the other sequences wait here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from router.dispatch.running_req import Node, RunningReq

OUTPUT_WEIGHT = 2
SEQUENCE_TOKENS = 64
"""The cost of a sequence beside the tokens of its prompt."""
AHEAD_S = 0.5
MIN_AHEAD_TOKENS = 1024
"""A node has prompts for so many seconds at its own rate, and at least so many tokens: two forwards by default."""


class FairQueue:
    """A sequence joins, is taken when it is its turn, and leaves with its first token or its end.

    Keys are named by number: `RunningReq.api_key`.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, dict[str, tuple[RunningReq, int]]] = {}
        """By key and rid, each sequence with its cost. No key is without a sequence."""
        self._num_waiting_tokens: Counter[int] = Counter()
        """The costs of each key's sequences."""
        self._served: dict[int, float] = {}
        self._latest = 0.0
        """The counter of the key whose sequence was taken last."""
        self._taken: dict[str, int] = {}
        """The cost of each sequence that was taken and has not left, by rid."""
        self._num_taken_tokens = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def join(self, req: RunningReq, api_key: int, num_tokens: int) -> None:
        """Have a sequence wait, of whose prompt `num_tokens` are to be computed."""
        if api_key not in self._waiting:
            floor = min((self._served[other] for other in self._waiting), default=self._latest)
            self._served[api_key] = max(self._served.get(api_key, 0.0), floor)
            self._waiting[api_key] = {}
        cost = num_tokens + SEQUENCE_TOKENS
        self._waiting[api_key][req.key.rid] = req, cost
        self._num_waiting_tokens[api_key] += cost

    def take(self, num_ahead_tokens: int) -> Iterator[RunningReq]:
        """The sequences whose turn it is, while fewer than `num_ahead_tokens` are taken, and one if none is."""
        while self._waiting and (not self._taken or self._num_taken_tokens < num_ahead_tokens):
            api_key = min(self._waiting, key=lambda key: (self._served[key], key))
            rid, (req, cost) = next(iter(self._waiting[api_key].items()))
            self._stop_waiting(api_key, rid)
            self._latest = self._served[api_key]
            self._served[api_key] += cost
            self._taken[rid] = cost
            self._num_taken_tokens += cost
            yield req

    def leave(self, rid: str, api_key: int) -> None:
        """A sequence of this key has its first token, or has ended. No-op from the second time on."""
        self._num_taken_tokens -= self._taken.pop(rid, 0)
        if rid in self._waiting.get(api_key, ()):
            self._stop_waiting(api_key, rid)

    def count_output(self, api_key: int, num_tokens: int) -> None:
        """Count output tokens of a sequence of this key."""
        self._served[api_key] += OUTPUT_WEIGHT * num_tokens

    def num_tokens_ahead(self, api_key: int) -> int:
        """What is served before a new sequence of this key: its own that wait, and as much of each other key."""
        own = self._num_waiting_tokens[api_key]
        return sum(min(tokens, own) for tokens in self._num_waiting_tokens.values())

    def _stop_waiting(self, api_key: int, rid: str) -> None:
        queue = self._waiting[api_key]
        _, cost = queue.pop(rid)
        self._num_waiting_tokens[api_key] -= cost
        if not queue:
            del self._waiting[api_key]


def num_ahead_tokens(nodes: Sequence[Node]) -> int:
    """The prompt tokens that keep `nodes` busy, which compute prompts."""
    return sum(max(MIN_AHEAD_TOKENS, int(AHEAD_S * node.load.prefill_tokens_per_s)) for node in nodes)
