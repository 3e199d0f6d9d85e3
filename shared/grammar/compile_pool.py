"""Compiles grammars on threads of their own, beside the scheduler's loop. The backend keeps the results."""

from __future__ import annotations

import contextlib
import itertools
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from shared import log
from shared.errors import RequestError
from shared.grammar.backend import CompiledGrammar, GrammarBackend
from shared.grammar.state import GrammarState, too_slow_error
from shared.protocol.sampling_params import Grammar
from shared.timeline import Clock

NUM_THREADS = 2
"""With two threads, one slow request does not delay the others. Two slow ones do, also of one grammar, until
XGrammar is done."""
MAX_WAITING = 256
"""Different grammars."""
MAX_PROBED = 4096
NUM_PROBE_STEPS = 64
"""Steps of a probe. A cost that doubles every few tokens exceeds the step budget within them."""
STACK_NBYTES = 64 << 20
"""Virtual memory of a thread's stack. XGrammar recurses once for each level of nesting. The longest text that Baton
accepts needs 10 MiB, and threads usually have 8 MiB. A stack overflow ends the process."""

Job = tuple[Grammar, Future[CompiledGrammar]]

CLOSE_S = 1.0
"""How long a compilation may hold up the end of a node."""


class CompilePool:
    """Compiles grammars on daemon threads. A compilation cannot be interrupted, and must not keep a node from ending.

    One of the threads makes the backend, since importing its libraries takes a second. The scheduler thread calls
    `compile`, `warm_up` and `close`. A future may be cancelled, and any thread may wait for it.
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
        self._backend: GrammarBackend | None = None
        self._backend_lock = threading.Lock()
        self._probed: set[int] = set()
        """Hashes of the grammars that passed `probe`."""
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._jobs: queue.PriorityQueue[tuple[bool, int, Job | None]] = queue.PriorityQueue()
        """Those whose grammar is new come last, since they may take seconds, as others do if the backend has dropped
        theirs. Then they are in order of arrival."""
        self._numbers = itertools.count()
        self._max_waiting = max_waiting
        self._waiting: Counter[Grammar] = Counter()
        self._waiting_lock = threading.Lock()
        self._closed = False

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Start to compile a grammar. The only exception of the future is a RequestError."""
        future: Future[CompiledGrammar] = Future()
        if self._closed:
            future.set_exception(_ending())
        elif not self._enter(grammar):
            message = f"{self._max_waiting} grammars wait to be compiled on this node, and more may not"
            future.set_exception(RequestError(message, status=503))
        else:
            future.add_done_callback(lambda _: self._leave(grammar))
            self._start_threads()
            self._jobs.put((hash(grammar) not in self._probed, next(self._numbers), (grammar, future)))
        return future

    def warm_up(self) -> None:
        """Load the backend and compile one grammar, before the first request with a grammar."""
        self.compile(Grammar("json_schema", '{"type": "object"}'))

    def close(self) -> None:
        """Cancel what waits, and wait for a thread that loads the backend, and CLOSE_S for those that compile.

        A process that ends while one of its threads is in native code may abort, when that thread returns to Python.
        """
        self._closed = True
        with contextlib.suppress(queue.Empty):  # a thread may take the last one just before
            while True:
                *_, job = self._jobs.get_nowait()
                if job is not None:
                    job[1].cancel()
        for _ in self._threads:
            self._jobs.put((True, next(self._numbers), None))
        with self._backend_lock:
            give_up_at = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))

    def _enter(self, grammar: Grammar) -> bool:
        with self._waiting_lock:
            if grammar not in self._waiting and len(self._waiting) >= self._max_waiting:
                return False
            self._waiting[grammar] += 1
            return True

    def _leave(self, grammar: Grammar) -> None:
        with self._waiting_lock:
            self._waiting[grammar] -= 1
            if not self._waiting[grammar]:
                del self._waiting[grammar]

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
        while (job := self._jobs.get()[-1]) is not None:
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
                if self._backend is None:
                    if self._closed:
                        raise _ending()
                    self._backend = self._load_backend()
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


def _ending() -> RequestError:
    return RequestError("this node is ending", status=503)


def probe(compiled: CompiledGrammar, kind: str, cpu_clock: Clock) -> None:
    """Follow random texts, always the same, for NUM_PROBE_STEPS tokens. Raises RequestError where that is too slow.

    A grammar that is slow only behind a longer text passes. Then the step budget of a request ends it.
    """
    choices = random.Random(0)
    mask_1W = np.zeros((1, -(-compiled.vocab_size // 32)), dtype=np.int32)
    state = GrammarState(compiled, cpu_clock=cpu_clock)
    for _ in range(NUM_PROBE_STEPS):
        if state.is_terminated:
            state = GrammarState(compiled, cpu_clock=cpu_clock)
        mask_1W.fill(0)
        state.fill_mask(mask_1W, 0)
        if state.is_too_slow:
            raise too_slow_error(kind)
        bits = np.unpackbits(mask_1W.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: compiled.vocab_size])
        if not allowed.size or not state.accept(int(allowed[choices.randrange(allowed.size)])):
            return  # no token of this model may come next; a request that comes so far gets an error
        if state.is_too_slow:
            raise too_slow_error(kind)
