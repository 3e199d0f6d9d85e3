"""Compiles grammars beside the scheduler's loop. The grammar library remembers what it has compiled."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property

from shared import log
from shared.errors import RequestError
from shared.grammar.backend import CompiledGrammar, GrammarBackend
from shared.grammar.probe import probe
from shared.protocol.sampling_params import Grammar
from shared.timeline import Clock

NUM_THREADS = 2
"""Two, so that one grammar that takes a while does not hold up all others; a second one does, up to its deadline."""
MAX_WAITING = 256
MAX_PROBED = 4096
STACK_NBYTES = 64 << 20
"""Virtual memory of a thread's stack. XGrammar recurses once for each level of some texts: the longest text that is
let in needs 10 MiB, more than the 8 MiB that a thread usually has; overflowing a stack ends the process."""

Job = tuple[Grammar, Future[CompiledGrammar]]


class CompilePool:
    """Daemon threads: a compiler cannot be interrupted, and must not keep a node from ending.

    A thread makes the backend, since its libraries take a second to import. `compile`, `warm_up` and `close` are the
    scheduler's; a future may be waited for on any thread, and is cancelled by a request that wants it no longer.
    """

    def __init__(
        self,
        load_backend: Callable[[], GrammarBackend],
        *,
        num_threads: int = NUM_THREADS,
        max_waiting: int = MAX_WAITING,
        cpu_clock: Clock = time.thread_time,
    ) -> None:
        self._load_backend = load_backend
        self._cpu_clock = cpu_clock
        self._backend_lock = threading.Lock()
        self._probed: set[int] = set()
        """Hashes of the grammars that `probe` has let in."""
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._max_waiting = max_waiting
        self._places = threading.Semaphore(max_waiting)
        self._closed = False

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The compiled grammar, now or later. The only exception of the future is a RequestError."""
        future: Future[CompiledGrammar] = Future()
        if self._closed:
            future.set_exception(RequestError("this node is ending", status=503))
        elif not self._places.acquire(blocking=False):
            message = f"{self._max_waiting} grammars wait to be compiled on this node, and more may not"
            future.set_exception(RequestError(message, status=503))
        else:
            future.add_done_callback(lambda _: self._places.release())
            self._start_threads()
            self._jobs.put((grammar, future))
        return future

    def warm_up(self) -> None:
        """Have the backend loaded, and one grammar compiled, before the first request that has one."""
        self.compile(Grammar("json_schema", '{"type": "object"}'))

    def close(self) -> None:
        """Compile nothing any more. A thread in the middle of a grammar is left behind."""
        self._closed = True
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job[1].cancel()
        for _ in self._threads:
            self._jobs.put(None)

    def _start_threads(self) -> None:
        if self._threads:
            return
        usual = threading.stack_size(STACK_NBYTES)
        try:
            for at in range(self._num_threads):
                thread = threading.Thread(target=self._work, name=f"grammar-{at}", daemon=True)
                thread.start()
                self._threads.append(thread)
        finally:
            threading.stack_size(usual)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            grammar, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._compile(grammar))
            except RequestError as refused:
                future.set_exception(refused)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            with self._backend_lock:
                backend = self._backend
            compiled = backend.compile(grammar)
            if hash(grammar) not in self._probed:
                probe(compiled, grammar.kind, self._cpu_clock)
                if len(self._probed) >= MAX_PROBED:
                    self._probed.clear()
                self._probed.add(hash(grammar))
        except RequestError:
            raise
        except Exception as error:
            log.crash("grammar_backend_failed", kind=grammar.kind)
            message = f"the grammar backend failed: {type(error).__name__}: {error}"
            raise RequestError(message, status=500, param=grammar.kind) from error
        return compiled

    @cached_property
    def _backend(self) -> GrammarBackend:
        return self._load_backend()
