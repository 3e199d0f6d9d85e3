"""Compiles grammars beside the scheduler's loop, and remembers them."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from shared import log
from shared.errors import RequestError
from shared.grammar.backend import CompiledGrammar, GrammarBackend
from shared.protocol.sampling_params import Grammar

NUM_THREADS = 2
"""Two, so that one grammar that takes its whole deadline does not hold up all others."""
MAX_CACHED = 1024
MAX_CACHED_NBYTES = 256 << 20


class CompilePool:
    """Daemon threads: a compiler cannot be interrupted, and must not keep a node from ending.

    The backend is made by the first grammar, since its libraries take a second to import. `compile` and `close`
    are the scheduler's; the futures may be waited for by anyone.
    """

    def __init__(
        self,
        load_backend: Callable[[], GrammarBackend],
        *,
        num_threads: int = NUM_THREADS,
        max_cached: int = MAX_CACHED,
        max_cached_nbytes: int = MAX_CACHED_NBYTES,
    ) -> None:
        self._load_backend = load_backend
        self._num_threads = num_threads
        self._max_cached = max_cached
        self._max_cached_nbytes = max_cached_nbytes
        self._backend: GrammarBackend | None = None
        self._backend_lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Grammar, Future[CompiledGrammar]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._cache: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The compiled grammar, now or later; its only exception is a RequestError. Equal grammars share a future."""
        future = self._cache.get(grammar)
        if future is None or _failed_here(future):
            future = self._cache[grammar] = Future()
            self._start_threads()
            self._jobs.put((grammar, future))
        self._cache.move_to_end(grammar)
        self._evict()
        return future

    def close(self) -> None:
        """Compile nothing any more. A thread in the middle of it is left behind."""
        for _ in self._threads:
            self._jobs.put(None)
        self._threads.clear()

    def _evict(self) -> None:
        """Forget what was not asked for the longest. What is still being compiled has no size yet, and stays."""
        done = [(grammar, _nbytes(future)) for grammar, future in self._cache.items() if future.done()]
        too_many = len(self._cache) - self._max_cached
        too_large = sum(nbytes for _, nbytes in done) - self._max_cached_nbytes
        for grammar, nbytes in done:
            if too_many <= 0 and too_large <= 0:
                break
            del self._cache[grammar]
            too_many, too_large = too_many - 1, too_large - nbytes

    def _start_threads(self) -> None:
        while len(self._threads) < self._num_threads:
            name = f"grammar-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            grammar, future = job
            future.set_running_or_notify_cancel()
            try:
                future.set_result(self._loaded_backend().compile(grammar))
            except RequestError as error:
                future.set_exception(error)
            except Exception as error:
                log.crash("grammar_backend_failed", kind=grammar.kind)
                message = f"the grammar backend failed: {type(error).__name__}: {error}"
                future.set_exception(RequestError(message, status=500, param=grammar.kind))

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
