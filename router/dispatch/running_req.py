"""The record of one sequence between its dispatch and its end.

It has what was asked, which nodes work on it, what has arrived, and what it goes through when nodes fail under it. A
sequence that loses its nodes is sent to others, at once the first time, and after a growing pause each time that it
fails again without a new token. One that was on two nodes when they crashed is a suspect: its content may be what
crashes them. Suspects are tried on at most half of the decode nodes at a time, each alone on one node. Only a crash
of that node, after it has said that it holds no other request, convicts the suspect.

What nodes tell of it is checked, since a broken node may say anything, and put in order. A node goes on where it
left off. Position 0 comes from the prefill and from the decode node, so each node is checked by itself. Tokens of two
nodes may still overtake each other.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from router.dispatch.node import Node, Numerics
from shared.errors import RequestError
from shared.protocol.logprobs import LogprobParams, Logprobs, TokenLogprobs
from shared.protocol.messages import Finish, ReqKey, ReqReport, Role, Stamp, TokenEntry, Work
from shared.timeline import FAILED_OVER

if TYPE_CHECKING:
    from router.dispatch.stages import Start


MAX_FAILURES = 6
"""A sequence that fails so often in a row, without a new token between, ends with the last error."""
_FIRST_PAUSE_S = 0.1
_CRASHES_OF_A_SUSPECT = 2
TRIAL_TOKENS = 8
"""A sequence that has gone on for so many tokens beyond the place of the last crash has not caused it. The node of a
suspect runs nothing else until then."""


class Cause(StrEnum):
    """Why a sequence is sent to other nodes."""

    PREFILL_NODE_LOST = "prefill_node_lost"
    DECODE_NODE_LOST = "decode_node_lost"
    NODE_DRAINED = "node_drained"
    NODE_FAILED = "node_failed"
    TRANSFER_FAILED = "transfer_failed"
    MOVE_FAILED = "move_failed"


@dataclass(eq=False)
class Failover:
    """The failures of one sequence.

    `avoid` has the incarnations of nodes that failed it, `crashed` of those that crashed under it. `since` is the
    time at which it lost its nodes, while it has none, `error` says why, and `cause` is counted once it has others.
    `blamed` has the nodes with which a transfer has failed since its last token, and until when it may become known
    that they crashed.
    """

    num_failures: int = 0
    since: float | None = None
    error: RequestError | None = None
    cause: Cause | None = None
    split: bool = False
    avoid: set[str] = field(default_factory=set)
    crashed: set[str] = field(default_factory=set)
    blamed: dict[str, float] = field(default_factory=dict)
    stamps: list[Stamp] = field(default_factory=list)
    _failed_at: int = -1
    """The number of output tokens at the last failure."""
    _crashed_at: int = 0
    """The same at the last crash."""

    @property
    def is_suspect(self) -> bool:
        """True when the sequence may be what crashed its nodes."""
        return len(self.crashed) >= _CRASHES_OF_A_SUSPECT

    def crash(self, incarnation: str, num_tokens: int) -> None:
        """Note that a node has crashed under the sequence, behind `num_tokens` output tokens."""
        self.crashed.add(incarnation)
        self._crashed_at = num_tokens

    def may_have_crashed(self, incarnation: str, num_tokens: int) -> bool:
        """Whether the sequence was taken from this node, and has had no token since.

        Its peer may notice first that a node has crashed, and tell that a transfer has failed.
        """
        return incarnation in self.avoid and num_tokens == self._failed_at

    def may_be_suspect(self, now: float) -> bool:
        """Whether crashes that are not known yet would make it a suspect."""
        num_unknown = sum(now < until for until in self.blamed.values())
        return 0 < _CRASHES_OF_A_SUSPECT - len(self.crashed) <= num_unknown

    def failed(self, num_tokens: int, now: float, error: RequestError, cause: Cause) -> None:
        """Note that the sequence has lost its nodes behind `num_tokens` output tokens."""
        if cause is not Cause.NODE_DRAINED:
            if num_tokens != self._failed_at:
                self.num_failures = 0
                self.blamed.clear()
            self.num_failures += 1
            self._failed_at = num_tokens
        self.since, self.error, self.cause = now, error, cause
        self.stamps.append(Stamp("router", FAILED_OVER, time.time()))

    @property
    def pause_s(self) -> float:
        """How long the next attempt waits."""
        return _FIRST_PAUSE_S * 2 ** (self.num_failures - 2) if self.num_failures > 1 else 0.0

    def is_past_crashes(self, num_tokens: int) -> bool:
        """Whether `num_tokens` prove that the sequence has passed the place of the last crash, if there was one."""
        return not self.crashed or num_tokens >= self._crashed_at + TRIAL_TOKENS


@dataclass(frozen=True)
class Aborted:
    """The end of a request that was aborted by the operator or its client."""

    message: str


@dataclass(eq=False)
class Attempt:
    """One sending of a sequence to `nodes`, which may send tokens for its `key`.

    `holders` are those of them that may hold pages or a slot: the attempt fails when one is lost, and each gets a
    message when it ends, but for `finished_by`, which has announced the end. The first of the nodes computes the
    prompt, of which it is expected to hold all but `num_queued_tokens`; each needs `num_pages` for what is known.
    Its tokens begin at the output position `first`; `num_told` is the position behind those that a node has told.
    """

    key: ReqKey
    nodes: tuple[Node, ...] = ()
    first: int = 0
    is_move: bool = False
    num_queued_tokens: int = 0
    num_pages: int = 0
    is_computing: bool = False
    holders: list[Node] = field(default_factory=list)
    finished_by: Node | None = None
    sent_at: float = 0.0
    reports: dict[Role, ReqReport] = field(default_factory=dict)
    num_told: dict[Role, int] = field(default_factory=dict)


class RunningReq:
    """The dispatcher's record of one sequence.

    `attempts` are its sendings; the latest is the one that counts, and has no nodes while the sequence waits for
    some. `output_ids` are the tokens that have arrived in order; the next attempt begins behind them. `failover` is
    what it has been through. `moving` is the next attempt while a move is under way, and `left` the one that ended
    with the last move, of which tokens before the position `left_until` may still come. `wake` is called when there
    are new tokens, or the end. `rid` is the client's name of the request, for the log; `numerics` is what its output
    so far was computed with. It had waited for nodes for `waited_s` before. `start` is known once the nodes have
    reported every stage up to the second token.
    """

    def __init__(
        self,
        key: ReqKey,
        work: Work,
        *,
        wake: Callable[[], None],
        now: float,
        rid: str = "",
        waited_s: float = 0.0,
    ) -> None:
        self.rid = rid or key.rid
        self.numerics: Numerics | None = None
        self.attempts = [Attempt(key)]
        self.work = work
        self.failover = Failover()
        self.moving: Attempt | None = None
        self.movable_at = now
        self.failed_moves: Counter[str] = Counter()
        self.left: Attempt | None = None
        self.left_until = 0
        self._num_attempts = 1
        self.output_ids: list[int] = []
        self.order = TokenOrder(0)
        self.finish: Finish | Aborted | None = None
        self.error: RequestError | None = None
        self.started_at = now
        self.waited_s = waited_s
        self.start: Start | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.ended_at: float | None = None
        self._announced: Finish | None = None
        self._num_taken = 0
        self._logprobs: dict[int, TokenLogprobs] = {}
        self.input_logprobs: Logprobs | None = None
        self._wake = wake

    @property
    def fields(self) -> dict[str, Any]:
        """The client's name of the request and the key of the latest attempt, for log events."""
        return {"rid": self.rid, **self.key.fields}

    @property
    def attempt(self) -> Attempt:
        """The latest attempt."""
        return self.attempts[-1]

    @property
    def key(self) -> ReqKey:
        """The key of the latest attempt."""
        return self.attempts[-1].key

    def attempt_of(self, key: ReqKey) -> Attempt | None:
        """The attempt `key`, if tokens of it may still come."""
        if self.attempts[-1].key == key:
            return self.attempts[-1]
        return next((one for one in (self.moving, self.left) if one is not None and one.key == key), None)

    def needs(self, node: Node) -> bool:
        """True when the sequence cannot go on as it is without `node`."""
        if node in self.attempts[-1].holders:
            return True
        return self.left is not None and self.awaits_left and node in self.left.nodes

    @property
    def awaits_left(self) -> bool:
        """True while tokens of the attempt that ended with the last move are on their way."""
        return self.left is not None and self.order.next < self.left_until

    def next_key(self) -> ReqKey:
        """A key for a further attempt."""
        self._num_attempts += 1
        return msgspec.structs.replace(self.key, attempt=self._num_attempts - 1)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the latest attempt; none while the sequence waits for some."""
        return self.attempts[-1].nodes

    @property
    def ended(self) -> bool:
        """True once no further token will come."""
        return self.ended_at is not None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.work.input_ids)

    @property
    def remaining_work(self) -> Work:
        """The work of a further attempt, which begins behind the tokens that have arrived."""
        return msgspec.structs.replace(self.work, output_ids=tuple(self.output_ids))

    @property
    def stamps(self) -> list[Stamp]:
        """The stamps of all attempts, in order of time. A stamp that came with the handoff too counts once."""
        reports = (report for attempt in self.attempts for report in attempt.reports.values())
        reported = dict.fromkeys(stamp for report in reports for stamp in report.stamps)
        return sorted((*reported, *self.failover.stamps), key=lambda stamp: stamp.time)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the node which prefilled the first reported attempt found in its RadixCache."""
        for attempt in self.attempts:
            report = attempt.reports.get(Role.PREFILL) or attempt.reports.get(Role.DECODE)
            if report is not None:
                return report.cached_tokens
        return 0

    @property
    def kv_pages_transferred(self) -> int:
        """KV pages that were moved in all attempts, each as counted by the node that has seen more of them."""
        return self._moved(lambda report: report.kv_pages_transferred)

    @property
    def kv_bytes_transferred(self) -> int:
        """Bytes of the same pages."""
        return self._moved(lambda report: report.kv_bytes_transferred)

    def _moved(self, count: Callable[[ReqReport], int]) -> int:
        return sum(max(map(count, attempt.reports.values()), default=0) for attempt in self.attempts)

    def begin(self, nodes: tuple[Node, ...], now: float, num_queued_tokens: int, num_pages: int) -> None:
        """Note that the latest attempt was sent to `nodes`."""
        attempt = self.attempt
        attempt.nodes, attempt.num_queued_tokens, attempt.num_pages = nodes, num_queued_tokens, num_pages
        attempt.sent_at = now
        attempt.holders = list(nodes)

    def next_attempt(self) -> None:
        """Begin anew behind `output_ids`. Tokens behind a gap, and an announced finish, will be sent again."""
        self.attempts.append(Attempt(self.next_key(), first=len(self.output_ids)))
        self.left = None
        self.order = TokenOrder(len(self.output_ids))
        self._announced = None
        self._logprobs = {at: known for at, known in self._logprobs.items() if at < self.order.next}

    def arrive_logprobs(self, entry: TokenEntry) -> None:
        """Take the logprobs of tokens, before `arrive` takes the tokens. The first to come for a position count."""
        if entry.input_logprobs is not None and self.input_logprobs is None:
            self.input_logprobs = entry.input_logprobs
        if entry.logprobs is not None:
            for position, known in enumerate(entry.logprobs.unpack(), entry.position):
                if position >= self.order.next:
                    self._logprobs.setdefault(position, known)

    def arrive(self, position: int, token_ids: Sequence[int], finish: Finish | None, now: float) -> int:
        """Take tokens of a node; returns how many were new and in order."""
        if finish is not None and self._announced is None:
            self._announced = finish
            self.order.finish_at(position + len(token_ids))
        ready = self.order.add(position, token_ids)
        if ready:
            self.output_ids += ready
            self.last_token_at = now
            if self.first_token_at is None:
                self.first_token_at = now
        if self.order.finished:
            self.end(now, finish=self._announced)
        elif ready:
            self._wake()
        return len(ready)

    def end(
        self, now: float, *, finish: Finish | Aborted | None = None, error: RequestError | None = None
    ) -> None:
        """End the sequence with `finish` or `error`. The first end counts."""
        if not self.ended:
            self.ended_at, self.finish, self.error = now, finish, error
            self._wake()

    def take(self) -> list[int]:
        """The tokens that arrived since the last call, in order."""
        taken = self.output_ids[self._num_taken :]
        self._num_taken = len(self.output_ids)
        return taken

    def take_logprobs(self, first: int, end: int) -> list[TokenLogprobs]:
        """The logprobs of the output tokens at positions [first, end), once; empty if none were asked for."""
        known = (self._logprobs.pop(position, None) for position in range(first, end))
        return [logprobs for logprobs in known if logprobs is not None]


# ----------------------------------------------------------------------------------- what nodes tell of it
class TokenOrder:
    """Forwards each output position once, and after those before it. `why_wrong` has bounded the positions.

    The first token to arrive for a position is kept.
    """

    def __init__(self, first: int) -> None:
        self.next = first
        self.end: int | None = None
        self._ahead: dict[int, int] = {}

    @property
    def finished(self) -> bool:
        """True when every token up to the announced end has been forwarded."""
        return self.end is not None and self.next >= self.end

    def finish_at(self, position: int) -> None:
        """No token at or after `position` belongs to the sequence. The first announcement counts."""
        if self.end is None:
            self.end = max(position, self.next)

    def add(self, position: int, token_ids: Sequence[int]) -> Sequence[int]:
        """Take tokens whose first is at `position`; returns those that can be forwarded now."""
        if position == self.next and not self._ahead:
            in_order = token_ids if self.end is None else token_ids[: max(0, self.end - position)]
            self.next += len(in_order)
            return in_order
        limit = position + len(token_ids) if self.end is None else self.end
        for at, token_id in enumerate(token_ids, start=position):
            if self.next <= at < limit:
                self._ahead.setdefault(at, token_id)
        ready = []
        while self.next in self._ahead and self.next != self.end:
            ready.append(self._ahead.pop(self.next))
            self.next += 1
        return ready


def why_wrong(entry: TokenEntry, attempt: Attempt, work: Work, role: Role, vocab_size: int) -> str:
    """Why the node of `role` in `attempt` cannot have computed `entry` of `work`; empty if it can have.

    The first message of a move's target may lack logprobs: it repeats tokens of the source.
    """
    num_told = attempt.num_told.get(role)
    begins_right = entry.position == num_told if num_told is not None else entry.position <= attempt.first
    if entry.position < 0 or not begins_right:
        return f"tokens at position {entry.position}, where {num_told or attempt.first} was due"
    num_tokens, limit = len(entry.token_ids), work.params.max_new_tokens
    end, finish, report = entry.position + num_tokens, entry.finish, entry.report
    if wrong := _outside(entry.token_ids, vocab_size):
        return wrong
    if (finish is None and end >= limit > 0) or end > limit:
        return f"{end} tokens of {limit} without a finish"
    if finish is not None:
        if not num_tokens and limit:
            return f"a finish at position {end} without a token"
        if finish.matched is not None and (wrong := _outside((finish.matched,), vocab_size)):
            return wrong
    if report is not None and report.cached_tokens > len(work.input_ids) + attempt.first:
        return f"{report.cached_tokens} cached tokens of {len(work.input_ids) + attempt.first}"
    asked, is_first = work.params.logprobs, num_told is None
    if asked is None:
        return "logprobs that were not asked for" if entry.logprobs or entry.input_logprobs else ""
    num_inputs = asked.num_input_logprobs(len(work.input_ids)) // asked.numbers_per_token
    may_lack = not num_tokens or (attempt.is_move and is_first)
    may_lack_inputs = not (num_inputs and is_first) or attempt.first > 0
    return _wrong_logprobs(
        entry.logprobs, asked, num_tokens, vocab_size, may_lack=may_lack
    ) or _wrong_logprobs(entry.input_logprobs, asked, num_inputs, vocab_size, may_lack=may_lack_inputs)


def _wrong_logprobs(
    told: Logprobs | None, asked: LogprobParams, num_tokens: int, vocab_size: int, *, may_lack: bool
) -> str:
    if told is None:
        return "" if may_lack else f"no logprobs of {num_tokens} tokens"
    nbytes = (len(told.chosen), len(told.top_ids), len(told.of_token_ids))
    if nbytes != tuple(4 * num_tokens * each for each in (1, asked.top_num, len(asked.token_ids))):
        return f"logprobs with parts of {nbytes} bytes for {num_tokens} tokens"
    return _outside(array("i", told.top_ids), vocab_size)


def _outside(token_ids: Iterable[int], vocab_size: int) -> str:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            return f"the token id {token_id} of a vocabulary of {vocab_size}"
    return ""
