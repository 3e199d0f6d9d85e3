"""Penalties, biases and `min_new_tokens` through both fleets == a plain transformers loop, resumed or retracted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.protocol.sampling_params import SamplingParams, TokenBias
from tests.cluster import Cluster
from tests.golden.references import EOS_IDS, Zoo, reference_tokens
from tests.golden.serving import GREEDY, Client, node_config, split, unsplit

PROMPT = 3
NUM_NEW = 24
FAVOURED = TokenBias(77, 9.0)
PARAMS = {
    "frequency": {"frequency_penalty": 1.5, "temperature": 0.0, "logit_bias": (FAVOURED,)},
    "presence": {"presence_penalty": 2.0, "temperature": 0.0, "logit_bias": (FAVOURED,)},
    "repetition": {"repetition_penalty": 1.7, "temperature": 0.0},
    "repetition_reward": {"repetition_penalty": 0.6, "temperature": 1.0, "seed": 5},
    "bias": {
        "logit_bias": (TokenBias(EOS_IDS[0], 20.0),),
        "min_new_tokens": 9,
        "temperature": 1.0,
        "seed": 6,
    },
    "all": {
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.3,
        "logit_bias": (FAVOURED, TokenBias(200, -100.0)),
        "min_new_tokens": 4,
        "temperature": 0.9,
        "top_p": 0.9,
        "seed": 7,
    },
}
named = pytest.mark.parametrize("name", PARAMS)
topologies = pytest.mark.parametrize("topology", [split, unsplit], ids=["1P1D", "0P1D"])
Topology = Callable[..., Cluster]


def params_of(name: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=NUM_NEW, **PARAMS[name])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(zoo: Zoo) -> dict[str, list[int]]:
    folder, ids = zoo.folder("llama"), zoo.prompts("llama")[PROMPT]
    return {name: reference_tokens(folder, ids, params_of(name)) for name in PARAMS}


def test_each_changes_what_is_sampled(zoo: Zoo, expected: dict[str, list[int]]) -> None:
    """And those that look at the tokens before do so: without them, the favoured token comes again and again."""
    folder, ids = zoo.folder("llama"), zoo.prompts("llama")[PROMPT]
    for name, params in PARAMS.items():
        plain = SamplingParams(
            max_new_tokens=NUM_NEW,
            **{k: v for k, v in params.items() if k in ("temperature", "seed", "top_p")},  # type: ignore[arg-type]
        )
        assert reference_tokens(folder, ids, plain) != expected[name]
    favoured = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, logit_bias=(FAVOURED,))
    times = reference_tokens(folder, ids, favoured).count(77)
    assert times > expected["frequency"].count(77) > 0
    assert times > expected["presence"].count(77) > 0
    assert expected["bias"][9:] == [EOS_IDS[0]]
    assert len({tuple(tokens) for tokens in expected.values()}) == len(PARAMS)


@named
@topologies
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize("retract_every", [0, 3])
def test_among_others(
    zoo: Zoo,
    llama: Path,
    expected: dict[str, list[int]],
    name: str,
    topology: Topology,
    overlap: bool,
    retract_every: int,
) -> None:
    """Neighbours with other penalties and without come and go; rows change hands."""
    neighbours = [GREEDY, *(params_of(other) for other in PARAMS)]
    with topology(node_config(llama, overlap=overlap, retract_every=retract_every)) as cluster:
        client = Client(cluster)
        for i, ids in enumerate(zoo.prompts("llama")[6:10]):
            client.submit(ids, neighbours[i % len(neighbours)])
        key = client.submit(zoo.prompts("llama")[PROMPT], params_of(name))
        for i, ids in enumerate(zoo.prompts("llama")[10:14], start=4):
            client.submit(ids, neighbours[i % len(neighbours)])
        cluster.run_all()
        assert cluster.tokens(key) == expected[name]
        assert bool(cluster.nodes["d0"].scheduler.batcher.num_retractions) == bool(retract_every)
        cluster.assert_idle()


@named
@topologies
@pytest.mark.parametrize("num_known", [1, 8])
def test_resumed_elsewhere(
    zoo: Zoo, llama: Path, expected: dict[str, list[int]], name: str, topology: Topology, num_known: int
) -> None:
    """Tokens that another node sampled count like its own."""
    with topology(node_config(llama)) as cluster:
        key = Client(cluster).submit(
            zoo.prompts("llama")[PROMPT], params_of(name), output_ids=expected[name][:num_known]
        )
        cluster.run_all()
        assert cluster.tokens(key) == expected[name]
        cluster.assert_idle()


@named
@topologies
def test_a_cached_prompt_counts_too(
    zoo: Zoo, llama: Path, expected: dict[str, list[int]], name: str, topology: Topology
) -> None:
    ids = zoo.prompts("llama")[PROMPT]
    with topology(node_config(llama)) as cluster:
        client = Client(cluster)
        assert client.tokens([ids], params_of(name)) == [expected[name]]
        assert client.tokens([ids, ids], params_of(name)) == [expected[name]] * 2
