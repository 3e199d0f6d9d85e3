"""The compile pool: what is shared, what is remembered and forgotten, and what a hanging compiler holds up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from shared.errors import RequestError
from shared.grammar import step_budget
from shared.grammar.backend import GrammarBackend
from shared.grammar.compile_pool import SLOW_S, CompilePool
from shared.protocol.sampling_params import Grammar
from tests.token_grammar import CostlyCompiled, CpuTime, TokenCompiled


class CountingBackend:
    """`hang...` waits for the gate; `bad` and `broken` raise; a number is that many bytes."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.gate = threading.Event()
        self.began = threading.Event()

    def compile(self, grammar: Grammar) -> TokenCompiled:
        self.compiled.append(grammar.text)
        self.began.set()
        if grammar.text.startswith("hang"):
            assert self.gate.wait(10)
        if grammar.text == "bad":
            raise RequestError("bad grammar", param="ebnf")
        if grammar.text == "broken":
            raise MemoryError("too much")
        return TokenCompiled(1, 1, nbytes=int(grammar.text) if grammar.text.isdigit() else 1)


@pytest.fixture
def backend() -> Iterator[CountingBackend]:
    backend = CountingBackend()
    yield backend
    backend.gate.set()


@pytest.fixture
def pool(backend: CountingBackend) -> Iterator[CompilePool]:
    pool = CompilePool(lambda: backend, max_cached=3, max_cached_nbytes=100)
    yield pool
    pool.close()


def ebnf(text: str) -> Grammar:
    return Grammar("ebnf", text)


def test_equal_grammars_are_compiled_once(pool: CompilePool, backend: CountingBackend) -> None:
    futures = [pool.compile(ebnf("a")) for _ in range(5)]
    assert len({id(future.result(10)) for future in futures}) == 1
    pool.compile(Grammar("regex", "a")).result(10)
    assert backend.compiled == ["a", "a"]


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


def test_the_least_used_is_forgotten(pool: CompilePool, backend: CountingBackend) -> None:
    for text in ("a", "b", "c", "a", "d"):
        pool.compile(ebnf(text)).result(10)
    backend.compiled.clear()
    for text in ("a", "c", "d", "b"):
        pool.compile(ebnf(text)).result(10)
    assert backend.compiled == ["b"]


def test_memory_is_bounded_too(pool: CompilePool, backend: CountingBackend) -> None:
    pool.compile(ebnf("60")).result(10)
    pool.compile(ebnf("50")).result(10)
    pool.compile(ebnf("1")).result(10)  # the sizes of those before it are known now
    backend.compiled.clear()
    pool.compile(ebnf("50")).result(10)
    pool.compile(ebnf("60")).result(10)
    assert backend.compiled == ["60"]


def test_what_is_being_compiled_is_not_forgotten(pool: CompilePool, backend: CountingBackend) -> None:
    first = pool.compile(ebnf("hang"))
    for text in "abcdef":
        pool.compile(ebnf(text)).result(10)
    assert pool.compile(ebnf("hang")) is first
    backend.gate.set()
    first.result(10)


def test_a_bad_grammar_is_remembered(pool: CompilePool, backend: CountingBackend) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="bad grammar"):
            pool.compile(ebnf("bad")).result(10)
    assert backend.compiled == ["bad"]


def test_a_broken_compiler_is_our_fault_and_tried_again(pool: CompilePool, backend: CountingBackend) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="MemoryError: too much") as caught:
            pool.compile(ebnf("broken")).result(10)
        assert caught.value.status == 500
    assert backend.compiled == ["broken", "broken"]
    pool.compile(ebnf("a")).result(10)  # its thread lives on


def test_a_hanging_compiler_holds_up_neither_others_nor_the_end(
    pool: CompilePool, backend: CountingBackend
) -> None:
    hanging = pool.compile(ebnf("hang"))
    pool.compile(ebnf("a")).result(10)
    pool.close()
    assert not hanging.done()
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("grammar-"))


def only_one_thread(backend: CountingBackend, **limits: int) -> CompilePool:
    pool = CompilePool(lambda: backend, num_threads=1, max_slow_threads=0, **limits)
    pool.compile(ebnf("hang"))
    assert backend.began.wait(10)
    return pool


def test_what_nobody_waits_for_is_not_begun(backend: CountingBackend) -> None:
    pool = only_one_thread(backend)
    abandoned = [pool.compile(ebnf(f"a{i}")) for i in range(40)]
    shared = [pool.compile(ebnf("shared")) for _ in range(2)]
    for i, future in enumerate(abandoned):
        pool.release(ebnf(f"a{i}"), future)
    pool.release(ebnf("shared"), shared[0])
    assert all(future.cancelled() for future in abandoned)
    again = pool.compile(ebnf("a7"))
    backend.gate.set()
    shared[1].result(10), again.result(10)
    assert backend.compiled == ["hang", "shared", "a7"]
    pool.close()


def test_what_has_begun_or_is_done_is_remembered(backend: CountingBackend) -> None:
    pool = only_one_thread(backend)
    hanging = pool.compile(ebnf("hang"))
    for _ in range(2):
        pool.release(ebnf("hang"), hanging)
    assert not hanging.cancelled()
    assert pool.compile(ebnf("hang")) is hanging
    backend.gate.set()
    hanging.result(10)
    pool.release(ebnf("hang"), hanging)
    assert pool.compile(ebnf("hang")) is hanging
    pool.close()


def test_an_earlier_try_is_not_a_later_one(backend: CountingBackend) -> None:
    """Who waited for a try that failed lets go of that one only."""
    pool = CompilePool(lambda: backend, num_threads=1, max_slow_threads=0)
    first = pool.compile(ebnf("broken"))
    assert first.exception(10) is not None
    pool.compile(ebnf("hang"))
    second = pool.compile(ebnf("broken"))
    assert second is not first
    pool.release(ebnf("broken"), first)
    assert not second.cancelled()
    backend.gate.set()
    assert second.exception(10) is not None
    pool.close()


def test_a_full_queue_is_told_at_once_and_not_remembered(backend: CountingBackend) -> None:
    pool = only_one_thread(backend, max_queued=2)
    queued = [pool.compile(ebnf(text)) for text in "ab"]
    with pytest.raises(RequestError, match="2 grammars wait to be compiled") as caught:
        pool.compile(ebnf("c")).result(0)
    assert caught.value.status == 503
    assert pool.compile(ebnf("a")) is queued[0]  # needs no place
    pool.release(ebnf("b"), queued[1])
    third = pool.compile(ebnf("c"))
    backend.gate.set()
    third.result(10)
    pool.close()


def test_slow_grammars_hold_up_others_only_for_a_moment(backend: CountingBackend) -> None:
    now = 0.0
    pool = CompilePool(lambda: backend, num_threads=1, max_slow_threads=2, clock=lambda: now)
    slow = []
    for i in range(3):
        slow.append(pool.compile(ebnf(f"hang{i}")))
        assert backend.began.wait(10)
        backend.began.clear()
        waiting = pool.compile(ebnf(f"{i}"))
        pool.tend()
        assert not slow[-1].done() and not waiting.running()  # its time is not over
        now += SLOW_S
        pool.tend()
        if i < 2:
            waiting.result(10)
            backend.began.clear()
    assert not waiting.done()  # no more threads than that
    backend.gate.set()
    waiting.result(10)
    assert all(future.result(10) for future in slow)
    after = [pool.compile(ebnf(text)) for text in "xyz"]
    wait(after, 10)
    assert pool.num_threads == 1  # those that came in addition have ended
    pool.close()


def test_a_closed_pool_compiles_nothing(backend: CountingBackend) -> None:
    pool = only_one_thread(backend)
    queued = pool.compile(ebnf("a"))
    pool.close()
    assert queued.cancelled()
    with pytest.raises(RequestError) as caught:
        pool.compile(ebnf("b")).result(0)
    assert caught.value.status == 503


def test_a_grammar_that_is_slow_to_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = CpuTime()
    monkeypatch.setattr(step_budget, "cpu_clock", cpu)

    class Costly:
        def compile(self, grammar: Grammar) -> TokenCompiled:
            return CostlyCompiled(cpu, mask_s=lambda _: 1.0)

    pool = CompilePool(Costly)
    with pytest.raises(RequestError, match="regex: following this grammar takes too long"):
        pool.compile(Grammar("regex", "a")).result(10)
    pool.close()
