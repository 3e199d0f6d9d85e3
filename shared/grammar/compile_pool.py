"""Compiles grammars beside the scheduler's loop, and remembers them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from shared import log
from shared.errors import RequestError
from shared.grammar.backend import CompiledGrammar, GrammarBackend
from shared.grammar.probe import probe
from shared.protocol.sampling_params import Grammar

NUM_THREADS = 2
"""Two, so that a grammar that takes a while does not hold up all others."""
SLOW_S = 1.0
"""A thread that is busy with one grammar for longer does not count any more; another one takes its place."""
MAX_SLOW_THREADS = 6
"""Threads beyond `num_threads`; with all of them on slow grammars, others wait, up to their deadline."""
MAX_QUEUED = 256
MAX_CACHED = 1024
MAX_CACHED_NBYTES = 256 << 20
STACK_NBYTES = 64 << 20
"""Virtual memory of a thread's stack. XGrammar recurses once for each level of some texts: the longest text that is
let in needs 10 MiB, more than the 8 MiB that a thread usually has; overflowing a stack ends the process."""

_stack_size_lock = threading.Lock()


@dataclass(slots=True, eq=False)
class _Job:
    """A grammar that was asked for: queued, being compiled since `began_at`, or done."""

    grammar: Grammar
    future: Future[CompiledGrammar] = field(default_factory=Future)
    num_waiters: int = 0
    began_at: float = 0.0


class CompilePool:
    """Daemon threads: a compiler cannot be interrupted, and must not keep a node from ending.

    The backend is made by the first grammar, since its libraries take a second to import. All methods are the
    scheduler's; the futures may be waited for by anyone.
    """

    def __init__(
        self,
        load_backend: Callable[[], GrammarBackend],
        *,
        num_threads: int = NUM_THREADS,
        max_slow_threads: int = MAX_SLOW_THREADS,
        max_queued: int = MAX_QUEUED,
        max_cached: int = MAX_CACHED,
        max_cached_nbytes: int = MAX_CACHED_NBYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load_backend = load_backend
        self._num_threads = num_threads
        self._max_slow_threads = max_slow_threads
        self._max_queued = max_queued
        self._max_cached = max_cached
        self._max_cached_nbytes = max_cached_nbytes
        self._clock = clock
        self._backend: GrammarBackend | None = None
        self._backend_lock = threading.Lock()
        self._cache: OrderedDict[Grammar, _Job] = OrderedDict()
        self._changed = threading.Condition()
        """Guards what follows; notified when there is a job to take, and when the pool is closed."""
        self._queued: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._num_alive = 0
        self._num_started = 0
        self._closed = False

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The compiled grammar, now or later; its only exception is a RequestError. Equal grammars share a future.

        Who does not want it any more calls `release`.
        """
        job = self._cache.get(grammar)
        if job is None or _failed_here(job.future):
            job = _Job(grammar)
            error = self._enqueue(job)
            if error is not None:
                job.future.set_exception(error)
                return job.future
            self._cache[grammar] = job
        job.num_waiters += 1
        self._cache.move_to_end(grammar)
        self._evict()
        return job.future

    def release(self, grammar: Grammar, future: Future[CompiledGrammar]) -> None:
        """One caller of `compile` does not wait for `future` any more. What nobody waits for is not begun."""
        job = self._cache.get(grammar)
        if job is None or job.future is not future or future.done():
            return
        job.num_waiters -= 1
        if job.num_waiters:
            return
        with self._changed:
            if job not in self._queued:
                return  # it has begun, and will be remembered
            self._queued.remove(job)
        del self._cache[grammar]
        future.cancel()

    def tend(self) -> None:
        """Start another thread where slow grammars keep those there are. To be called while anyone waits."""
        with self._changed:
            self._add_threads()

    @property
    def num_threads(self) -> int:
        """Those that are alive, at work or waiting for it."""
        with self._changed:
            return self._num_alive

    def close(self) -> None:
        """Compile nothing any more. A thread in the middle of it is left behind."""
        with self._changed:
            self._closed = True
            dropped = list(self._queued)
            self._queued.clear()
            self._changed.notify_all()
        for job in dropped:
            job.future.cancel()

    def _enqueue(self, job: _Job) -> RequestError | None:
        with self._changed:
            if self._closed:
                return RequestError("this node is ending", status=503)
            if len(self._queued) >= self._max_queued:
                message = f"{self._max_queued} grammars wait to be compiled on this node, and more may not"
                return RequestError(message, status=503)
            self._queued.append(job)
            self._add_threads()
            self._changed.notify()
        return None

    def _evict(self) -> None:
        """Forget what was not asked for the longest. What is still being compiled has no size yet, and stays."""
        done = [(grammar, _nbytes(job.future)) for grammar, job in self._cache.items() if job.future.done()]
        too_many = len(self._cache) - self._max_cached
        too_large = sum(nbytes for _, nbytes in done) - self._max_cached_nbytes
        for grammar, nbytes in done:
            if too_many <= 0 and too_large <= 0:
                break
            del self._cache[grammar]
            too_many, too_large = too_many - 1, too_large - nbytes

    def _num_wanted(self) -> int:
        began_before = self._clock() - SLOW_S
        num_slow = sum(job.began_at <= began_before for job in self._running)
        return self._num_threads + min(num_slow, self._max_slow_threads)

    def _add_threads(self) -> None:
        while self._queued and self._num_alive < self._num_wanted():
            name = f"grammar-{self._num_started}"
            self._num_started += 1
            self._num_alive += 1
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            with _stack_size_lock:
                usual = threading.stack_size(STACK_NBYTES)
                try:
                    thread.start()
                finally:
                    threading.stack_size(usual)

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                compiled, error = self._compile(job.grammar), None
            except RequestError as refused:
                compiled, error = None, refused
            with self._changed:
                self._running.remove(job)
            if compiled is not None:
                job.future.set_result(compiled)
            else:
                job.future.set_exception(error)

    def _take(self) -> _Job | None:
        """The next job; None for a thread that is to end: a slow one whose place was taken, or all."""
        with self._changed:
            while not self._closed and self._num_alive <= self._num_wanted():
                if not self._queued:
                    self._changed.wait()
                    continue
                job = self._queued.popleft()
                if job.future.set_running_or_notify_cancel():
                    job.began_at = self._clock()
                    self._running.append(job)
                    return job
            self._num_alive -= 1
            return None

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            compiled = self._loaded_backend().compile(grammar)
            probe(compiled, grammar.kind)
        except RequestError:
            raise
        except Exception as error:
            log.crash("grammar_backend_failed", kind=grammar.kind)
            message = f"the grammar backend failed: {type(error).__name__}: {error}"
            raise RequestError(message, status=500, param=grammar.kind) from error
        return compiled

    def _loaded_backend(self) -> GrammarBackend:
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._load_backend()
            return self._backend


def _failed_here(future: Future[CompiledGrammar]) -> bool:
    """True when it failed by no fault of the grammar: the next request may try again."""
    error = future.exception() if future.done() else None
    return isinstance(error, RequestError) and error.status != 400


def _nbytes(future: Future[CompiledGrammar]) -> int:
    return 0 if future.exception() is not None else future.result().nbytes
