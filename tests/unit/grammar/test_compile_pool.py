"""The compile pool: what it compiles, refuses and drops, and what a hanging compiler holds up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest

from shared.errors import RequestError
from shared.grammar.backend import GrammarBackend
from shared.grammar.compile_pool import CompilePool
from shared.protocol.sampling_params import Grammar
from tests.patience import PATIENCE_S
from tests.token_grammar import CostlyCompiled, CpuTime, TokenCompiled, TokenMatcher


class CountingBackend:
    """`hang` waits for the gate; `bad` and `broken` raise."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.gate = threading.Event()
        self.began = threading.Event()

    def compile(self, grammar: Grammar) -> TokenCompiled:
        self.compiled.append(grammar.text)
        self.began.set()
        if grammar.text == "hang":
            assert self.gate.wait(PATIENCE_S)
        if grammar.text == "bad":
            raise RequestError("bad grammar", param="ebnf")
        if grammar.text == "broken":
            raise MemoryError("too much")
        return TokenCompiled(1, 1)


@pytest.fixture
def backend() -> Iterator[CountingBackend]:
    backend = CountingBackend()
    yield backend
    backend.gate.set()


@pytest.fixture
def pool(backend: CountingBackend) -> Iterator[CompilePool]:
    pool = CompilePool(lambda: backend)
    yield pool
    pool.close()


def ebnf(text: str) -> Grammar:
    return Grammar("ebnf", text)


def test_the_backend_is_made_once_and_late(backend: CountingBackend) -> None:
    made: list[str] = []

    def load() -> GrammarBackend:
        made.append("backend")
        return backend

    pool = CompilePool(load)
    assert made == []
    wait([pool.compile(ebnf(text)) for text in "abc"])
    assert made == ["backend"]
    pool.close()


def test_warming_up_makes_the_backend(backend: CountingBackend) -> None:
    pool = CompilePool(lambda: backend)
    pool.warm_up()
    assert backend.began.wait(PATIENCE_S)
    pool.close()


def test_a_grammar_is_probed_once() -> None:
    matchers = 0

    class Counted(TokenCompiled):
        def new_matcher(self) -> TokenMatcher:
            nonlocal matchers
            matchers += 1
            return super().new_matcher()

    class Backend:
        def compile(self, grammar: Grammar) -> TokenCompiled:
            return Counted(1, 1000)

    pool = CompilePool(Backend)
    for _ in range(3):
        pool.compile(ebnf("a")).result(PATIENCE_S)
    assert matchers == 1
    pool.close()


def test_a_bad_grammar_says_so_each_time(pool: CompilePool) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="bad grammar"):
            pool.compile(ebnf("bad")).result(PATIENCE_S)


def test_a_broken_compiler_is_our_fault_and_tried_again(pool: CompilePool, backend: CountingBackend) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="MemoryError: too much") as caught:
            pool.compile(ebnf("broken")).result(PATIENCE_S)
        assert caught.value.status == 500
    assert backend.compiled == ["broken", "broken"]
    pool.compile(ebnf("a")).result(PATIENCE_S)  # its thread lives on


def test_a_hanging_compiler_holds_up_neither_others_nor_the_end(
    pool: CompilePool, backend: CountingBackend
) -> None:
    hanging = pool.compile(ebnf("hang"))
    pool.compile(ebnf("a")).result(PATIENCE_S)
    pool.close()
    assert not hanging.done()
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("grammar-"))


def test_a_compilation_under_way_ends_before_the_process_does(backend: CountingBackend) -> None:
    pool = only_one_thread(backend)
    closing = threading.Thread(target=pool.close)
    closing.start()
    backend.gate.set()
    closing.join()
    assert not any(thread.is_alive() for thread in pool._threads)


class TakenMeanwhile(queue.PriorityQueue[Any]):
    """A thread takes the last job just after this queue has said that there is one."""

    def empty(self) -> bool:
        if was_empty := super().empty():
            return was_empty
        self.get_nowait()
        return False

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        assert not block or not super().empty(), "it would wait for ever"
        return super().get(block, timeout)


def test_the_end_waits_for_no_job_that_a_thread_has_taken(backend: CountingBackend) -> None:
    pool = CompilePool(lambda: backend)
    pool._jobs = TakenMeanwhile()
    pool._jobs.put((True, 0, (ebnf("a"), Future())))
    pool.close()


def only_one_thread(backend: CountingBackend, **limits: int) -> CompilePool:
    pool = CompilePool(lambda: backend, num_threads=1, **limits)
    pool.compile(ebnf("hang"))
    assert backend.began.wait(PATIENCE_S)
    return pool


def test_what_was_cancelled_is_not_begun(backend: CountingBackend) -> None:
    pool = only_one_thread(backend)
    cancelled = [pool.compile(ebnf(f"a{i}")) for i in range(40)]
    assert all(future.cancel() for future in cancelled)
    last = pool.compile(ebnf("last"))
    backend.gate.set()
    last.result(PATIENCE_S)
    assert backend.compiled == ["hang", "last"]
    pool.close()


def test_a_full_queue_is_told_at_once(backend: CountingBackend) -> None:
    pool = only_one_thread(backend, max_waiting=3)  # one of them is being compiled
    queued = [pool.compile(ebnf(text)) for text in "ab"]
    with pytest.raises(RequestError, match="3 grammars") as caught:
        pool.compile(ebnf("c")).result(0)
    assert caught.value.status == 503
    again = pool.compile(ebnf("a"))  # a grammar that waits already takes no place
    queued[1].cancel()
    third = pool.compile(ebnf("c"))
    backend.gate.set()
    assert again.result(PATIENCE_S) and third.result(PATIENCE_S)
    wait([pool.compile(ebnf(text)) for text in "def"], PATIENCE_S)
    assert pool.compile(ebnf("g")).result(PATIENCE_S), "places come back"
    pool.close()


def test_a_grammar_that_was_compiled_goes_before_new_ones(backend: CountingBackend) -> None:
    pool = CompilePool(lambda: backend, num_threads=1)
    pool.compile(ebnf("known")).result(PATIENCE_S)
    backend.began.clear()
    pool.compile(ebnf("hang"))
    assert backend.began.wait(PATIENCE_S)
    last = [pool.compile(ebnf(text)) for text in ("new", "newer", "known")]
    backend.gate.set()
    wait(last, PATIENCE_S)
    assert backend.compiled == ["known", "hang", "known", "new", "newer"]
    pool.close()


def test_a_closed_pool_compiles_nothing_and_its_threads_end(backend: CountingBackend) -> None:
    pool = only_one_thread(backend)
    queued = pool.compile(ebnf("a"))
    pool.close()
    assert queued.cancelled()
    with pytest.raises(RequestError) as caught:
        pool.compile(ebnf("b")).result(0)
    assert caught.value.status == 503
    backend.gate.set()
    for thread in pool._threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_the_end_waits_for_a_backend_that_is_being_loaded(backend: CountingBackend) -> None:
    began, loaded = threading.Event(), threading.Event()

    def load() -> GrammarBackend:
        began.set()
        assert backend.gate.wait(PATIENCE_S)
        loaded.set()
        return backend

    pool = CompilePool(load)
    pool.warm_up()
    assert began.wait(PATIENCE_S)
    threading.Timer(0.1, backend.gate.set).start()
    pool.close()
    assert loaded.is_set()


def test_a_grammar_that_is_slow_to_follow_is_refused() -> None:
    cpu = CpuTime()

    class Costly:
        def compile(self, grammar: Grammar) -> TokenCompiled:
            return CostlyCompiled(cpu, mask_s=lambda _: 1.0)

    pool = CompilePool(Costly, cpu_clock=cpu)
    with pytest.raises(RequestError, match=r"^regex: .*too long"):
        pool.compile(Grammar("regex", "a")).result(PATIENCE_S)
    pool.close()
