"""Jump-forward through whole schedulers: outputs and entries are the same for every schedule and every topology."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config import NodeConfig
from shared.protocol.messages import Finish, NodeToRouter, ReqKey, TokenEntry, Tokens
from shared.protocol.sampling_params import SamplingParams
from tests.cluster import Cluster, small_config
from tests.sim.test_grammars import grammar_engine, submit
from tests.sim.test_races import prompt
from tests.token_engine import EOS, reference_tokens
from tests.token_grammar import constrained_entries, constrained_tokens, token_grammar

NUM_NEW = 40
SHAPES = [(3, 36, 7), (5, 60, 9), (2, 20, 4), (1, 30, 20)]
"""Of grammars: modulus, length, length of what is forced."""


def config(**options: Any) -> NodeConfig:
    return small_config(**{"tokens": 600, "context_length": 200, "enable_jump_forward": True, **options})


class RecordingCluster(Cluster):
    """Records every entry that the nodes send."""

    def __init__(
        self, topology: str, node_config: NodeConfig, decode_config: NodeConfig | None = None
    ) -> None:
        self.entries: list[tuple[str, TokenEntry]] = []
        super().__init__(
            int(topology[0]), int(topology[2]), grammar_engine, node_config, decode_config=decode_config
        )
        on_message = self.router._on_message

        def listen(node: str, message: NodeToRouter) -> None:
            if isinstance(message, Tokens):
                self.entries += [(node, entry) for entry in message.entries]
            on_message(node, message)

        self.network._parties["router"].on_message = listen

    def entries_of(self, key: ReqKey, node: str) -> dict[int, list[int]]:
        """The tokens of each entry of one node by its position."""
        sent = [(e.position, list(e.token_ids)) for name, e in self.entries if (name, e.key) == (node, key)]
        assert len(dict(sent)) == len(sent)
        return dict(sent)


def wanted_params(
    shape: tuple[int, int, int], *, max_new_tokens: int = NUM_NEW, **more: object
) -> SamplingParams:
    grammar = token_grammar(*shape)
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, grammar=grammar, **more)  # type: ignore[arg-type]


def crowd(cluster: Cluster, *, jumps: bool = True) -> dict[ReqKey, list[int]]:
    """Requests with grammars, and every fifth without; what each must get."""
    wanted = {}
    for i in range(10):
        ids = prompt(5 + 6 * (i % 4), seed=i)
        if i % 5 == 4:
            key = submit(cluster, f"r{i}", ids, SamplingParams(max_new_tokens=12, temperature=0.0))
            wanted[key] = reference_tokens(ids, 12)
        else:
            shape = SHAPES[i % 4]
            key = submit(cluster, f"r{i}", ids, wanted_params(shape))
            wanted[key] = constrained_tokens(ids, NUM_NEW, *(shape if jumps else shape[:2]))
    return wanted


def num_jumped(cluster: Cluster) -> int:
    return sum(node.vitals.num_jumped_tokens for node in cluster.nodes.values())


schedules = pytest.mark.parametrize(
    ("topology", "overlap"), [("1P1D", True), ("0P1D", False)], ids=["1P1D-overlap", "0P1D-serial"]
)


OPTIONS: list[dict[str, object]] = [
    {},
    {"page_size": 1},
    {"retract_every": 3},
    {"retract_every": 2, "page_size": 1, "enable_mixed_chunk": True},
    {"enable_mixed_chunk": True},
    {"chunk": 1},
    {"chunk": 4},
    {"chunk": 6, "enable_mixed_chunk": True},
    {"keeps_prefixes": False},
    {"keeps_prefixes": False, "retract_every": 3},
    {"enable_jump_forward": False},
    {"enable_jump_forward": False, "retract_every": 3, "page_size": 1},
]


@pytest.mark.parametrize(
    ("topology", "overlap", "options"),
    [
        (topology, (i % 2 == 0) == (topology == "1P1D"), options)
        for i, options in enumerate(OPTIONS)
        for topology in ("1P1D", "0P1D")
    ],
    ids=str,
)
def test_every_schedule_gives_the_same(topology: str, overlap: bool, options: dict[str, object]) -> None:
    jumps = bool(options.get("enable_jump_forward", True))
    with RecordingCluster(topology, config(overlap=overlap, **options)) as cluster:  # type: ignore[arg-type]
        wanted = crowd(cluster, jumps=jumps)
        assert any(tokens[-1] == EOS and len(tokens) > 1 for tokens in wanted.values())
        cluster.run_all(check=True)
        assert {key: cluster.tokens(key) for key in wanted} == wanted
        assert num_jumped(cluster) > 50 if jumps else num_jumped(cluster) == 0
        num_retractions = cluster.nodes["d0"].scheduler.batcher.num_retractions
        assert num_retractions > 3 if options.get("retract_every") else num_retractions == 0
        cluster.assert_idle()


@schedules
@pytest.mark.parametrize("policy", ["host", "recompute", "auto"])
def test_a_pool_that_is_too_small_for_the_jumps(topology: str, overlap: bool, policy: str) -> None:
    small = config(
        tokens=100, overlap=overlap, retract_policy=policy, host_tokens=200, schedule_conservativeness=0.0
    )
    with RecordingCluster(topology, config(), small) as cluster:
        wanted = crowd(cluster)
        cluster.run_all(check=True)
        assert {key: cluster.tokens(key) for key in wanted} == wanted
        count = cluster.nodes["d0"].scheduler.batcher.retraction.count
        assert count.num_host + count.num_recompute + count.num_waits > 0
        cluster.assert_idle()


@schedules
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sampled_token_and_those_jumped_over_are_told_in_one_entry(
    topology: str, overlap: bool, shape: tuple[int, int, int]
) -> None:
    with RecordingCluster(topology, config(overlap=overlap)) as cluster:
        for seed in range(12):
            ids = prompt(9, seed=seed)
            key = submit(cluster, f"r{seed}", ids, wanted_params(shape))
            cluster.run_all(check=True)
            sent = cluster.entries_of(key, "d0")
            entries = constrained_entries(ids, NUM_NEW, *shape)
            assert [sent[at] for at in sorted(sent)] == entries
            if topology == "1P1D":
                assert cluster.entries_of(key, "p0") == {0: entries[0]}
            finish = cluster.router.answers[key].finish
            num_tokens = sum(map(len, entries))
            assert finish == (Finish("length") if num_tokens == NUM_NEW else Finish("stop", entries[-1][-1]))
        assert num_jumped(cluster) > 12
        cluster.assert_idle()


def test_the_prefill_node_jumps_after_the_first_token() -> None:
    """It hands all of them over; where the jump ends the request, nothing is handed over at all."""
    with RecordingCluster("1P1D", config()) as cluster:
        first = {seed: constrained_entries(prompt(9, seed=seed), NUM_NEW, 3, 36, 7)[0] for seed in range(40)}
        seed = next(seed for seed, entry in first.items() if len(entry) > 3)
        key = submit(cluster, "goes on", prompt(9, seed=seed), wanted_params((3, 36, 7)))
        enough = wanted_params((3, 36, 7), max_new_tokens=len(first[seed]))
        ends = submit(cluster, "ends", prompt(9, seed=seed), enough)
        cluster.run_all(check=True)
        assert cluster.nodes["p0"].vitals.num_jumped_tokens == 2 * (len(first[seed]) - 1)
        assert cluster.tokens(key) == constrained_tokens(prompt(9, seed=seed), NUM_NEW, 3, 36, 7)
        assert cluster.tokens(ends) == first[seed]
        assert cluster.router.answers[ends].finish == Finish("length")
        assert cluster.entries_of(ends, "d0") == {}
        cluster.assert_idle()


def test_jumped_tokens_are_counted_in_every_pong() -> None:
    with RecordingCluster("0P1D", config()) as cluster:
        wanted = crowd(cluster)
        cluster.run_all()
        cluster.assert_idle()  # asks for a Pong
        cluster.step()
        load = cluster.router.loads["d0"]
        assert load.num_generated_tokens == sum(map(len, wanted.values()))
        assert load.num_jumped_tokens == num_jumped(cluster) > 0


def test_a_step_that_was_in_flight_and_fails_does_not_matter_after_a_jump() -> None:
    """What it wrote is not relied on."""
    with RecordingCluster("0P1D", config()) as cluster:
        key = submit(cluster, "r", prompt(9), wanted_params(SHAPES[1]))
        d0 = cluster.nodes["d0"]
        cluster.run(lambda: any(req.num_jumped for req in d0.scheduler.reqs.values()))
        assert d0.scheduler._launcher.in_flight is not None
        d0.engine.stream.fail_next = True
        cluster.run_all(check=True)
        assert not d0.engine.stream.fail_next
        assert cluster.tokens(key) == constrained_tokens(prompt(9), NUM_NEW, *SHAPES[1])
        cluster.assert_idle()


@given(data=st.data())
@settings(max_examples=25)
def test_cancelled_at_any_step(data: st.DataObject) -> None:
    """Whatever is cancelled when, in whatever configuration: the others get what they must, all pages come home."""
    draw = data.draw
    options = {
        "overlap": draw(st.booleans()),
        "page_size": draw(st.sampled_from([1, 3, 8])),
        "chunk": draw(st.sampled_from([2, 7, 64])),
        "retract_every": draw(st.sampled_from([0, 0, 2, 5])),
        "retract_policy": draw(st.sampled_from(["host", "recompute", "auto"])),
        "host_tokens": draw(st.sampled_from([48, 240])),
        "enable_mixed_chunk": draw(st.booleans()),
        "tokens": draw(st.sampled_from([96, 168, 600])),
        "enable_jump_forward": draw(st.booleans()),
    }
    topology = draw(st.sampled_from(["1P1D", "0P1D"]))
    rng = random.Random(draw(st.integers(0, 2**32)))
    of_both = {name: options[name] for name in ("page_size", "enable_jump_forward")}
    with RecordingCluster(topology, config(**of_both), config(**options)) as cluster:
        wanted = crowd(cluster, jumps=options["enable_jump_forward"])
        dropped = {key: rng.randrange(60) for key in wanted if rng.random() < 0.4}
        for step in range(60):
            for key, at in dropped.items():
                if at == step:
                    cluster.router.cancel(key)
            cluster.step()
        for key in dropped:
            answer = cluster.router.answers[key]
            answer.finish = answer.finish or Finish("abort")  # nobody tells a router what it cancelled itself
        cluster.run_all(check=True)
        for key, tokens in wanted.items():
            if key not in dropped:
                assert cluster.tokens(key) == tokens
        cluster.assert_idle()
