"""Requests that wait until their grammars are compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from shared.errors import RequestError
from shared.grammar.backend import CompiledGrammar
from shared.grammar.compile_pool import CompilePool
from shared.grammar.state import GrammarState, too_slow_error
from shared.protocol.messages import ReqKey
from shared.scheduling.req import Req
from shared.timeline import Clock


@dataclass(frozen=True, slots=True)
class _Waiting:
    req: Req
    go_on: Callable[[], None]
    future: Future[CompiledGrammar]
    deadline: float


@dataclass(frozen=True, slots=True)
class WaitOver:
    """A request that left the queue. Without an `error` its grammar is set, and the caller calls `go_on`."""

    req: Req
    go_on: Callable[[], None]
    error: RequestError | None


class GrammarQueue:
    """In order of arrival; a request here holds no page and no row."""

    def __init__(
        self,
        pool: CompilePool,
        timeout_s: float,
        clock: Clock,
        on_compiled: Callable[[], None],
        *,
        jump_forward: bool = False,
        cpu_clock: Clock = time.thread_time,
    ) -> None:
        self._pool = pool
        self._jump_forward = jump_forward
        self._cpu_clock = cpu_clock
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_compiled = on_compiled
        self.waiting: dict[ReqKey, _Waiting] = {}

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, req: Req, go_on: Callable[[], None]) -> None:
        """Have the grammar of `req` compiled; `take` gives both back. `on_compiled` is called by any thread."""
        assert req.params.grammar is not None
        future = self._pool.compile(req.params.grammar)
        self.waiting[req.key] = _Waiting(req, go_on, future, self._clock() + self._timeout_s)
        future.add_done_callback(lambda _: self._on_compiled())

    def remove(self, req: Req) -> None:
        """Forget a request that ended."""
        waiting = self.waiting.pop(req.key, None)
        if waiting is not None:
            waiting.future.cancel()

    def take(self) -> list[WaitOver]:
        """Requests that leave: their grammar is compiled and follows their known outputs, or there is an error."""
        over: list[WaitOver] = []
        now = self._clock()
        for waiting in self.waiting.values():
            if waiting.future.done():
                error = self._start(waiting.req, waiting.future)
            elif now >= waiting.deadline:
                error = self._too_late(waiting)
            else:
                continue
            over.append(WaitOver(waiting.req, waiting.go_on, error))
        for done in over:
            self.waiting.pop(done.req.key).future.cancel()
        return over

    def _too_late(self, waiting: _Waiting) -> RequestError:
        assert waiting.req.params.grammar is not None
        kind, limit = waiting.req.params.grammar.kind, f"{self._timeout_s:g} s (--grammar-compile-timeout-s)"
        if (
            waiting.future.running() and not waiting.req.output_len
        ):  # with outputs it was compiled before, elsewhere
            return RequestError(f"{kind}: not compiled within {limit}; make it simpler", param=kind)
        return RequestError(f"the compiler was too busy for this {kind} for {limit}", status=503)

    def _start(self, req: Req, future: Future[CompiledGrammar]) -> RequestError | None:
        error = future.exception()
        if error is not None:
            assert isinstance(error, RequestError)
            return error
        req.grammar = GrammarState(
            future.result(), jump_forward=self._jump_forward, cpu_clock=self._cpu_clock
        )
        followed = req.grammar.follow(req.ids, req.num_input_ids)
        if not followed or req.grammar.is_too_slow or req.grammar.is_terminated:
            return grammar_error(req)
        return None


def grammar_error(req: Req) -> RequestError:
    """The error of a request whose grammar is too slow, or allows no token any more."""
    assert req.params.grammar is not None
    kind = req.params.grammar.kind
    if req.grammar is not None and req.grammar.is_too_slow:
        return too_slow_error(kind)
    message = f"{kind}: no token of this model goes on after {req.output_len} output tokens"
    return RequestError(message, param=kind)
