"""Grammars through whole schedulers: replayed after transfer, retraction and retry; failures at both ends."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from dataclasses import replace

import pytest

from shared.config import NodeConfig
from shared.engine.build import Engine
from shared.grammar.backend import CompiledGrammar
from shared.grammar.compile_pool import CompilePool
from shared.protocol.messages import ReqKey
from shared.protocol.sampling_params import Grammar, SamplingParams
from tests.cluster import Cluster
from tests.patience import PATIENCE_S
from tests.sim.test_races import config, prompt
from tests.token_engine import EOS, token_engine
from tests.token_grammar import TokenGrammarBackend, constrained_tokens, token_grammar


class InlinePool(CompilePool):
    """Compiles when asked: these tests are on a virtual clock."""

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        future = super().compile(grammar)
        future.exception(PATIENCE_S)
        return future


def grammar_engine(node_config: NodeConfig) -> Engine:
    return replace(token_engine(node_config), grammars=InlinePool(TokenGrammarBackend))


def params(n: int, modulus: int, length: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, temperature=0.0, grammar=token_grammar(modulus, length))


def start(topology: str, **options: object) -> Cluster:
    return Cluster(int(topology[0]), int(topology[2]), grammar_engine, config(**options))  # type: ignore[arg-type]


def submit(cluster: Cluster, rid: str, ids: list[int], wanted: SamplingParams, **more: object) -> ReqKey:
    prefill = "p0" if "p0" in cluster.nodes else None
    return cluster.router.submit(rid, ids, wanted, prefill, "d0", **more)  # type: ignore[arg-type]


topologies = pytest.mark.parametrize("topology", ["1P1D", "0P1D"])


@topologies
@pytest.mark.parametrize("seen", [1, 4, 8])
def test_a_retry_goes_on_where_the_first_attempt_stopped(topology: str, seen: int) -> None:
    ids, expected = prompt(9), constrained_tokens(prompt(9), 14, 3, 9)
    with start(topology) as cluster:
        key = submit(cluster, "r", ids, params(14, 3, 9), output_ids=expected[:seen], attempt=1)
        cluster.run_all(check=True)
        assert cluster.tokens(key) == expected
        cluster.assert_idle()


@topologies
@pytest.mark.parametrize("output_ids", [(4,), (3, 3, EOS)])
def test_a_retry_with_tokens_of_another_grammar_is_refused(
    topology: str, output_ids: tuple[int, ...]
) -> None:
    with start(topology) as cluster:
        key = submit(cluster, "r", prompt(9), params(14, 3, 2), output_ids=output_ids)
        good = submit(cluster, "good", prompt(7), params(14, 3, 2))
        cluster.run_all(check=True)
        assert cluster.router.answers[key].failures[0].status == 400
        assert cluster.tokens(good) == constrained_tokens(prompt(7), 14, 3, 2)
        cluster.assert_idle()


@topologies
def test_a_bad_grammar_is_told_once_and_leaves_nothing(topology: str) -> None:
    bad = SamplingParams(grammar=Grammar("ebnf", "nonsense"))
    with start(topology) as cluster:
        keys = [submit(cluster, f"r{i}", prompt(9, seed=i), bad) for i in range(5)]
        cluster.run_all(check=True)
        for key in keys:
            first = cluster.router.answers[key].failures[0]
            assert (first.status, first.param) == (400, "ebnf")
            assert first.message == "ebnf: not three numbers"
        cluster.assert_idle()


class Late(CompilePool):
    """Compiles nothing before `go`."""

    def __init__(self) -> None:
        super().__init__(self._load)
        self._gate = threading.Event()
        self._futures: list[Future[CompiledGrammar]] = []

    def _load(self) -> TokenGrammarBackend:
        assert self._gate.wait(PATIENCE_S)
        return TokenGrammarBackend()

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        self._futures.append(super().compile(grammar))
        return self._futures[-1]

    def go(self) -> None:
        self._gate.set()
        assert not wait(self._futures, PATIENCE_S).not_done


def late_cluster() -> tuple[Cluster, list[Late]]:
    pools: list[Late] = []

    def engine(node_config: NodeConfig) -> Engine:
        pools.append(Late())
        return replace(token_engine(node_config), grammars=pools[-1])

    return Cluster(1, 1, engine, config()), pools


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["decode first", "prefill first"])
def test_a_grammar_that_takes_long_holds_up_nobody_else(order: tuple[int, int]) -> None:
    cluster, pools = late_cluster()
    with cluster:
        slow = submit(cluster, "slow", prompt(9), params(14, 3, 9))
        quick = submit(cluster, "quick", prompt(7), SamplingParams(max_new_tokens=9, temperature=0.0))
        cluster.run(lambda: cluster.router.answers[quick].ended, check=True)
        for which in order:
            assert not cluster.router.answers[slow].token_ids
            pools[which].go()
            for _ in range(30):
                cluster.step()
        cluster.run_all(check=True)
        assert cluster.tokens(slow) == constrained_tokens(prompt(9), 14, 3, 9)
        cluster.assert_idle()


@pytest.mark.parametrize("compiled", [(), (0,), (1,)], ids=["neither", "decode", "prefill"])
def test_a_request_is_cancelled_while_it_is_compiled(compiled: tuple[int, ...]) -> None:
    cluster, pools = late_cluster()
    with cluster:
        key = submit(cluster, "r", prompt(9), params(14, 3, 9))
        cluster.step()
        for which in compiled:
            pools[which].go()
        for _ in range(20):
            cluster.step()
        cluster.router.cancel(key)
        cluster.run(lambda: not any(node.scheduler.reqs for node in cluster.live), check=True)
        for pool in pools:
            pool.go()
        cluster.assert_idle()
