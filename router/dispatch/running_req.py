"""One sequence between its dispatch and its end: who works on it, and what has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.dispatch.prefix_index import PrefixIndex
from router.dispatch.token_order import TokenOrder
from shared.errors import RequestError
from shared.protocol.logprobs import Logprobs, TokenLogprobs
from shared.protocol.messages import (
    Finish,
    Load,
    NodeLimits,
    NodeRef,
    ReqKey,
    ReqReport,
    Role,
    RouterToNode,
    Stamp,
    TokenEntry,
)


class Node(Protocol):
    """A live node, as the dispatcher sees it. Real: `node_link.LiveNode`."""

    @property
    def ref(self) -> NodeRef:
        """Who it is."""
        ...

    @property
    def role(self) -> Role:
        """What it was started as."""
        ...

    @property
    def limits(self) -> NodeLimits:
        """What fits."""
        ...

    @property
    def load(self) -> Load:
        """Its latest Pong."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens in a page, and so in a block of its cache events."""
        ...

    @property
    def prefixes(self) -> PrefixIndex:
        """What its RadixCache holds."""
        ...

    def send(self, message: RouterToNode) -> None:
        """Queue a message. Never blocks or raises: a node that cannot be sent to is lost, and reported as such."""
        ...


@dataclass(frozen=True)
class Aborted:
    """The end of a request that the operator or its client called off."""

    message: str


class RunningReq:
    """What the dispatcher knows of one sequence.

    `nodes` may send tokens for it. `holders` are those of them that may still hold pages or a slot, whose loss
    is its failure, and who are told when it ends; `finished_by` needs no telling. `wake` is called whenever
    there is something to take. Tokens wait here for a slow client, at most `max_new_tokens` of them.
    """

    def __init__(
        self,
        key: ReqKey,
        *,
        prompt_len: int,
        max_new_tokens: int,
        nodes: tuple[Node, ...],
        wake: Callable[[], None],
        now: float,
    ) -> None:
        self.key = key
        self.prompt_len = prompt_len
        self.max_new_tokens = max_new_tokens
        self.nodes = nodes
        self.holders = list(nodes)
        self.finished_by: Node | None = None
        self.order = TokenOrder(0, max_new_tokens)
        self.finish: Finish | Aborted | None = None
        self.error: RequestError | None = None
        self.reports: dict[Role, ReqReport] = {}
        self.started_at = now
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.ended_at: float | None = None
        self._announced: Finish | None = None
        self._untaken: list[int] = []
        self._logprobs: dict[int, TokenLogprobs] = {}
        self.input_logprobs: Logprobs | None = None
        self._wake = wake

    @property
    def ended(self) -> bool:
        """No further token will come."""
        return self.ended_at is not None

    @property
    def stamps(self) -> list[Stamp]:
        """What nodes have stamped, in order of time; a stamp that travelled with the handoff counts once."""
        reported = dict.fromkeys(stamp for report in self.reports.values() for stamp in report.stamps)
        return sorted(reported, key=lambda stamp: stamp.time)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that whoever prefilled found in its RadixCache."""
        report = self.reports.get(Role.PREFILL) or self.reports.get(Role.DECODE)
        return report.cached_tokens if report else 0

    @property
    def kv_pages_transferred(self) -> int:
        """As the node that knows more of it has counted: the decode node, once it has reported."""
        return max((report.kv_pages_transferred for report in self.reports.values()), default=0)

    @property
    def kv_bytes_transferred(self) -> int:
        """See kv_pages_transferred."""
        return max((report.kv_bytes_transferred for report in self.reports.values()), default=0)

    def try_again(self, nodes: tuple[Node, ...], max_new_tokens: int) -> None:
        """Another attempt, on other nodes, of a sequence that has no token yet; the key says which attempt it is."""
        assert self.first_token_at is None
        self.key = ReqKey(self.key.router, self.key.rid, self.key.attempt + 1)
        self.max_new_tokens = max_new_tokens
        self.order = TokenOrder(0, max_new_tokens)
        self.nodes = nodes
        self.holders = list(nodes)

    def arrive_logprobs(self, entry: TokenEntry) -> None:
        """Take what a node says of the tokens that `arrive` is about to take; the first word on a position counts."""
        if entry.input_logprobs is not None and self.input_logprobs is None:
            self.input_logprobs = entry.input_logprobs
        if entry.logprobs is not None:
            end = min(entry.position + len(entry.token_ids), self.max_new_tokens)
            for position, known in zip(range(entry.position, end), entry.logprobs.unpack(), strict=False):
                if position >= self.order.next:
                    self._logprobs.setdefault(position, known)

    def arrive(self, position: int, token_ids: Sequence[int], finish: Finish | None, now: float) -> int:
        """Take tokens of a node; returns how many were new and in order."""
        if finish is not None and self._announced is None:
            self._announced = finish
            self.order.finish_at(position + len(token_ids))
        ready = self.order.add(position, token_ids)
        if ready:
            self._untaken += ready
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
        """Nothing more will come, because of `finish` or `error`; the first end counts."""
        if not self.ended:
            self.ended_at, self.finish, self.error = now, finish, error
            self._wake()

    def take(self) -> list[int]:
        """The tokens that arrived since the last call, in order."""
        taken, self._untaken = self._untaken, []
        return taken

    def take_logprobs(self, first: int, end: int) -> list[TokenLogprobs]:
        """What is known of the output tokens at positions [first, end), which were taken; empty if nobody asked."""
        known = (self._logprobs.pop(position, None) for position in range(first, end))
        return [logprobs for logprobs in known if logprobs is not None]
