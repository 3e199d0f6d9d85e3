"""The grammar queue: who may go on when, and what a deadline says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest

from shared.grammar.compile_pool import CompilePool
from shared.protocol.messages import ReqKey, Work
from shared.protocol.sampling_params import Grammar, SamplingParams
from shared.scheduling.grammar_queue import GrammarQueue
from shared.scheduling.req import Req
from shared.timeline import Clock, Role, Timeline
from tests.patience import PATIENCE_S
from tests.token_engine import EOS
from tests.token_grammar import TokenCompiled, TokenGrammarBackend, token_grammar

TIMEOUT_S = 5.0


class GatedBackend(TokenGrammarBackend):
    def __init__(self) -> None:
        self.gate = threading.Event()
        self.began = threading.Event()
        self.compiled: list[str] = []

    def compile(self, grammar: Grammar) -> TokenCompiled:
        self.compiled.append(grammar.text)
        self.began.set()
        assert self.gate.wait(PATIENCE_S)
        return super().compile(grammar)


class QueueRig:
    def __init__(self) -> None:
        self.backend = GatedBackend()
        self.pool = CompilePool(lambda: self.backend, num_threads=1)
        self.now = 0.0
        self.woken = threading.Event()
        self.cpu: Clock = lambda: 0.0
        self.queue = GrammarQueue(
            self.pool, TIMEOUT_S, lambda: self.now, self.woken.set, cpu_clock=lambda: self.cpu()
        )
        self.gone_on: list[str] = []

    def add(self, rid: str, grammar: Grammar, output_ids: tuple[int, ...] = ()) -> Req:
        work = Work((1, 2), SamplingParams(grammar=grammar), output_ids)
        req = Req(ReqKey("router", rid), work, Timeline(Role.DECODE), 50)
        self.queue.add(req, lambda: self.gone_on.append(rid))
        return req

    def compile_all(self) -> None:
        self.backend.gate.set()
        self.pool.compile(token_grammar(1, 0)).result(PATIENCE_S)


@pytest.fixture
def world() -> Iterator[QueueRig]:
    world = QueueRig()
    yield world
    world.backend.gate.set()
    world.pool.close()


def test_a_request_waits_until_its_grammar_is_compiled(world: QueueRig) -> None:
    req = world.add("a", token_grammar(3, 9))
    assert world.queue.take() == []
    assert len(world.queue) == 1 and req.key in world.queue.waiting
    world.compile_all()
    assert world.woken.is_set()
    (over,) = world.queue.take()
    assert (over.req, over.error) == (req, None)
    assert world.gone_on == []
    over.go_on()
    assert world.gone_on == ["a"]
    assert req.grammar is not None and len(world.queue) == 0


def test_known_outputs_are_replayed(world: QueueRig) -> None:
    req = world.add("a", token_grammar(3, 9), output_ids=(3, 6))
    world.compile_all()
    (over,) = world.queue.take()
    assert over.error is None
    assert req.grammar is not None
    assert req.grammar.follow(req.ids, req.num_input_ids)
    assert not req.grammar.accept(7)
    assert req.grammar.accept(9)


@pytest.mark.parametrize("output_ids", [(3, 7), (3, 6, EOS), (EOS,)])
def test_outputs_that_nothing_can_follow_are_refused(world: QueueRig, output_ids: tuple[int, ...]) -> None:
    world.add("a", token_grammar(3, 2), output_ids)
    world.compile_all()
    (over,) = world.queue.take()
    assert over.error is not None
    assert (over.error.status, over.error.param) == (400, "regex")


def test_a_bad_grammar_says_so(world: QueueRig) -> None:
    world.add("a", Grammar("ebnf", "nonsense"))
    world.add("b", token_grammar(3, 9))
    world.compile_all()
    a, b = world.queue.take()
    assert a.error is not None and (a.error.status, a.error.message) == (400, "ebnf: not three numbers")
    assert b.error is None


def test_the_deadline_of_a_slow_grammar_and_of_one_behind_it(world: QueueRig) -> None:
    """One thread: the first is being compiled, the second has not begun, which is not its fault."""
    slow, behind = world.add("slow", token_grammar(3, 9)), world.add("behind", token_grammar(5, 9))
    assert world.backend.began.wait(PATIENCE_S)
    world.now = TIMEOUT_S - 0.01
    late = world.add("late", token_grammar(3, 9))
    assert world.queue.take() == []
    world.now = TIMEOUT_S
    by_req = {over.req: over.error for over in world.queue.take()}
    assert {req: error and error.status for req, error in by_req.items()} == {slow: 400, behind: 503}
    assert "--grammar-compile-timeout-s" in str(by_req[slow])
    assert late.key in world.queue.waiting  # asked for the same grammar, but has not waited as long yet
    world.compile_all()
    assert [over.req for over in world.queue.take()] == [late]


def test_a_slow_grammar_that_was_compiled_before_fails_over(world: QueueRig) -> None:
    """Another node has made outputs with it, so the node is too busy, and the request is not wrong."""
    world.add("resumed", token_grammar(3, 9), output_ids=(3, 6))
    assert world.backend.began.wait(PATIENCE_S)
    world.now = TIMEOUT_S
    (over,) = world.queue.take()
    assert over.error is not None and (over.error.status, over.error.param) == (503, None)


def test_a_request_that_ended_does_not_come_back(world: QueueRig) -> None:
    req = world.add("a", token_grammar(3, 9))
    world.queue.remove(req)
    world.queue.remove(req)
    world.compile_all()
    assert world.queue.take() == []


def test_abandoned_grammars_keep_nobody_waiting(world: QueueRig) -> None:
    world.add("running", token_grammar(2, 9))
    assert world.backend.began.wait(PATIENCE_S)
    for i in range(40):
        world.queue.remove(world.add(f"gone{i}", token_grammar(3, i)))
    req = world.add("a", token_grammar(5, 9))
    world.compile_all()
    assert req in [over.req for over in world.queue.take() if over.error is None]
    assert world.backend.compiled == [
        token_grammar(2, 9).text,
        token_grammar(5, 9).text,
        token_grammar(1, 0).text,
    ]


def test_past_the_deadline_a_grammar_is_not_begun(world: QueueRig) -> None:
    world.add("running", token_grammar(2, 9))
    assert world.backend.began.wait(PATIENCE_S)
    world.add("late", token_grammar(3, 9))
    world.now = TIMEOUT_S
    assert len(world.queue.take()) == 2
    world.compile_all()
    assert token_grammar(3, 9).text not in world.backend.compiled


def test_outputs_that_are_slow_to_replay_are_refused(world: QueueRig) -> None:
    world.compile_all()
    world.pool.compile(token_grammar(3, 9)).result(PATIENCE_S)
    seconds = count(0.0, 1.0)
    world.cpu = lambda: next(seconds)
    world.add("a", token_grammar(3, 9), output_ids=(3, 6))
    assert world.woken.wait(PATIENCE_S)
    (over,) = world.queue.take()
    assert over.error is not None and "takes too long" in over.error.message
    assert (over.error.status, over.error.param) == (400, "regex")
