"""The compile pool: what is shared, what is remembered and forgotten, and what a hanging compiler holds up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from shared.errors import RequestError
from shared.grammar.backend import GrammarBackend
from shared.grammar.compile_pool import CompilePool
from shared.protocol.sampling_params import Grammar
from tests.token_grammar import TokenCompiled


class CountingBackend:
    """`hang` waits for the gate; `bad` and `broken` raise; a number is that many bytes."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.gate = threading.Event()

    def compile(self, grammar: Grammar) -> TokenCompiled:
        self.compiled.append(grammar.text)
        if grammar.text == "hang":
            assert self.gate.wait(10)
        if grammar.text == "bad":
            raise RequestError("bad grammar", param="ebnf")
        if grammar.text == "broken":
            raise MemoryError("too much")
        return TokenCompiled(1, 1, int(grammar.text) if grammar.text.isdigit() else 1)


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
