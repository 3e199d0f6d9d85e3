"""The sequences that wait for their first token: for their turn among API keys, on their way to a node, or there.

Turns are taken when clients of several API keys share the fleet, by the virtual token counter of Sheng et al. 2024
("Fairness in Serving Large Language Models"): each key has a counter of what was served to it, a prompt token
counting 1 and an output token OUTPUT_WEIGHT. The waiting sequence that goes next is of the key with the lowest
counter. A key that comes back is lifted to the others, so it saves nothing up while it is idle. Nodes take requests
first come first served. So only as many prompt tokens are sent to them as keep them busy, and the other sequences
wait here.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from router.dispatch.node import Node
from router.dispatch.running_req import RunningReq
from shared.timeline import Clock

WINDOW_S = 30.0
"""The rate is measured over so many seconds: longer than a step, and shorter than a change of load."""
_BUCKET_S = 1.0

MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60
"""OpenAI's clients ignore a longer time, and retry sooner."""

OUTPUT_WEIGHT = 2
SEQUENCE_TOKENS = 64
"""The cost of a sequence beside the tokens of its prompt."""
AHEAD_S = 0.5
MIN_AHEAD_TOKENS = 1024
"""A node has prompts for so many seconds at its own rate, and at least so many tokens: two forwards by default."""


@dataclass(slots=True)
class _Turn:
    """A sequence of an API key, which counts `cost` tokens. It waits for its turn, or was `taken`."""

    req: RunningReq
    cost: int
    taken: bool = False


class WaitingQueue:
    """A sequence joins, is taken when it is its turn if it has an `api_key`, and leaves with its first token or end.

    A second join or leave has no effect. The queue also measures the rate at which sequences are served.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._key_of: dict[str, int | None] = {}
        """By rid: all sequences that wait."""
        self._num_of: Counter[int | None] = Counter()
        self._busy_since = 0.0
        self._served: deque[list[float]] = deque()
        """The start of each second in which sequences were served, and their number."""
        self._turns: dict[str, _Turn] = {}
        """By rid: those with an API key."""
        self._waiting: dict[int, dict[str, _Turn]] = {}
        """By key and rid: those whose turn has not come. No key is without a sequence."""
        self._served_tokens: dict[int, float] = {}
        self._latest = 0.0
        """The counter of the key whose sequence was taken last."""
        self._num_taken_tokens = self._num_taken = 0

    def __len__(self) -> int:
        return len(self._key_of)

    def num_of(self, api_key: int | None) -> int:
        """The waiting sequences of one API key."""
        return self._num_of[api_key]

    @property
    def num_without_turn(self) -> int:
        """The sequences whose turn has not come."""
        return sum(map(len, self._waiting.values()))

    def join(self, rid: str, api_key: int | None = None) -> None:
        """A sequence was dispatched. The rate is measured anew whenever the queue has been empty."""
        if not self._key_of:
            self._busy_since = self._clock()
            self._served.clear()
        if rid not in self._key_of:
            self._key_of[rid] = api_key
            self._num_of[api_key] += 1

    def join_turns(self, req: RunningReq, num_tokens: int) -> None:
        """Have a sequence of an API key wait for its turn, of whose prompt `num_tokens` are to be computed."""
        assert req.api_key is not None
        if req.api_key not in self._waiting:
            floor = min((self._served_tokens[other] for other in self._waiting), default=self._latest)
            self._served_tokens[req.api_key] = max(self._served_tokens.get(req.api_key, 0.0), floor)
            self._waiting[req.api_key] = {}
        turn = _Turn(req, num_tokens + SEQUENCE_TOKENS)
        self._turns[req.key.rid] = self._waiting[req.api_key][req.key.rid] = turn

    def take(self, num_ahead_tokens: int) -> Iterator[RunningReq]:
        """The sequences whose turn it is, while fewer than `num_ahead_tokens` are taken, and one if none is."""
        while self._waiting and (not self._num_taken or self._num_taken_tokens < num_ahead_tokens):
            api_key = min(self._waiting, key=lambda key: (self._served_tokens[key], key))
            rid, turn = next(iter(self._waiting[api_key].items()))
            self._stop_waiting(api_key, rid)
            turn.taken = True
            self._latest = self._served_tokens[api_key]
            self._served_tokens[api_key] += turn.cost
            self._num_taken += 1
            self._num_taken_tokens += turn.cost
            yield turn.req

    def leave(self, rid: str, *, served: bool) -> None:
        """A sequence has its first token or finished without one (`served`), or it was aborted or has failed."""
        if rid not in self._key_of:
            return
        self._num_of[self._key_of.pop(rid)] -= 1
        if served:
            self._count(self._clock())
        turn = self._turns.pop(rid, None)
        if turn is not None and turn.taken:
            self._num_taken -= 1
            self._num_taken_tokens -= turn.cost
        elif turn is not None and turn.req.api_key is not None:
            self._stop_waiting(turn.req.api_key, rid)

    def drop_turns(self) -> None:
        """Let no sequence have its turn any more, since all of them end."""
        self._turns.clear()
        self._waiting.clear()

    def count_output(self, api_key: int, num_tokens: int) -> None:
        """Count output tokens of a sequence of this key."""
        self._served_tokens[api_key] += OUTPUT_WEIGHT * num_tokens

    def num_tokens_ahead(self, api_key: int) -> int:
        """What is served before a new sequence of this key: its own that wait, and as much of each other key."""
        waiting = {key: sum(turn.cost for turn in turns.values()) for key, turns in self._waiting.items()}
        own = waiting.get(api_key, 0)
        return sum(min(tokens, own) for tokens in waiting.values())

    def wait_s(self, num_queued: int) -> float:
        """How many seconds a sequence behind `num_queued` others will wait: num_queued / rate.

        The rate is measured over the last WINDOW_S seconds, or since the queue was last empty, whichever is shorter.
        Before the first sequence is served, the rate counts it as served now.
        """
        if not self._key_of:
            return 0.0
        now = self._clock()
        since = max(self._busy_since, now - WINDOW_S)
        num_served = sum(num for began, num in self._served if began >= since - _BUCKET_S)
        return num_queued * (now - since) / max(1, num_served)

    def _stop_waiting(self, api_key: int, rid: str) -> None:
        del self._waiting[api_key][rid]
        if not self._waiting[api_key]:
            del self._waiting[api_key]

    def _count(self, now: float) -> None:
        if not self._served or now - self._served[-1][0] >= _BUCKET_S:
            self._served.append([now, 0])
        self._served[-1][1] += 1
        while now - self._served[0][0] > WINDOW_S + _BUCKET_S:
            self._served.popleft()


def num_ahead_tokens(nodes: Sequence[Node]) -> int:
    """The prompt tokens that keep `nodes` busy, which compute prompts."""
    return sum(max(MIN_AHEAD_TOKENS, int(AHEAD_S * node.load.prefill_tokens_per_s)) for node in nodes)


def retry_after_s(wait_s: float) -> int:
    """Whole seconds, within bounds, after which a request that was refused for a wait of `wait_s` may come again."""
    return max(math.ceil(min(wait_s, MAX_RETRY_AFTER_S)), MIN_RETRY_AFTER_S)
