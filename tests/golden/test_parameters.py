"""What a request samples depends on its parameters and nothing else: not on its batch, its node, or where it goes on.

Every parameter through both fleets == a plain transformers loop with a numpy sampler.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.protocol.sampling_params import SamplingParams, TokenBias
from tests.golden.pairwise import pairwise
from tests.golden.references import EOS_IDS, Zoo, reference_tokens
from tests.golden.serving import GREEDY, Client, Topology, node_config, split, topologies, unsplit

FAVOURED = TokenBias(77, 9.0)
PARAMS = [
    SamplingParams(max_new_tokens=24, **params)  # type: ignore[arg-type]
    for params in (
        {"seed": 11},
        {"top_k": 20, "seed": 12},
        {"top_p": 0.8, "seed": 13},
        {"min_p": 0.05, "seed": 14},
        {
            "temperature": 0.8,
            "top_k": 50,
            "top_p": 0.9,
            "min_p": 0.02,
            "min_new_tokens": 24,
            "seed": 2**63 - 1,
        },
        {"frequency_penalty": 1.5, "temperature": 0.0, "logit_bias": (FAVOURED,)},
        {"presence_penalty": 2.0, "temperature": 0.0, "logit_bias": (FAVOURED,)},
        {"repetition_penalty": 1.7, "temperature": 0.0},
        {"repetition_penalty": 0.6, "seed": 5},
        {"logit_bias": (TokenBias(EOS_IDS[0], 20.0),), "min_new_tokens": 9, "seed": 6},
        {
            "frequency_penalty": 0.6,
            "presence_penalty": 0.4,
            "repetition_penalty": 1.3,
            "logit_bias": (FAVOURED, TokenBias(200, -100.0)),
            "min_new_tokens": 4,
            "temperature": 0.9,
            "top_p": 0.9,
            "seed": 7,
        },
    )
]


@pytest.fixture(scope="module")
def prompts(zoo: Zoo) -> list[list[int]]:
    """One of each length, and then others again."""
    return zoo.prompts("llama")[: len(PARAMS)]


@pytest.fixture(scope="module")
def expected(zoo: Zoo, prompts: list[list[int]]) -> list[list[int]]:
    folder = zoo.folder("llama")
    outputs = [reference_tokens(folder, ids, params) for ids, params in zip(prompts, PARAMS, strict=True)]
    assert outputs[9][9:] == [EOS_IDS[0]], "the bias, once it may"
    assert all(tokens[:8] != zoo.greedy("llama", i)[:8] for i, tokens in enumerate(outputs)), "each matters"
    return outputs


@pytest.mark.parametrize(
    ("topology", "overlap", "retract_every"),
    pairwise({"topology": (split, unsplit), "overlap": (False, True), "retract_every": (0, 3)}),
)
def test_among_others(
    zoo: Zoo,
    llama: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    topology: Topology,
    overlap: bool,
    retract_every: int,
) -> None:
    """Neighbours with other parameters and without come and go; rows change hands."""
    config = node_config(llama, overlap=overlap, retract_every=retract_every, max_running_requests=7)
    with topology(config) as cluster:
        client = Client(cluster)
        plain = range(len(PARAMS), 2 * len(PARAMS))
        keys = []
        for ids, params, other in zip(prompts, PARAMS, plain, strict=True):
            keys.append((client.submit(ids, params), client.submit(zoo.prompts("llama")[other], GREEDY)))
        cluster.run_all()
        assert [cluster.tokens(key) for key, _ in keys] == expected
        assert [cluster.tokens(key) for _, key in keys] == [zoo.greedy("llama", i) for i in plain]
        assert bool(cluster.nodes["d0"].scheduler.batcher.num_retractions) == bool(retract_every)
        cluster.assert_idle()


@topologies
def test_alone_and_over_a_cached_prompt(
    llama: Path, prompts: list[list[int]], expected: list[list[int]], topology: Topology
) -> None:
    with topology(node_config(llama)) as cluster:
        client = Client(cluster)
        for ids, params, tokens in zip(prompts, PARAMS, expected, strict=True):
            assert client.tokens([ids], params) == [tokens]
            assert client.tokens([ids, ids], params) == [tokens] * 2


@topologies
def test_resumed_elsewhere(
    llama: Path, prompts: list[list[int]], expected: list[list[int]], topology: Topology
) -> None:
    """Tokens that another node sampled count like its own."""
    with topology(node_config(llama)) as cluster:
        client = Client(cluster)
        keys = [
            client.submit(ids, params, output_ids=tokens[:num_known])
            for ids, params, tokens in zip(prompts, PARAMS, expected, strict=True)
            for num_known in (1, len(tokens) // 2, len(tokens) - 1)
        ]
        cluster.run_all()
        assert [cluster.tokens(key) for key in keys] == [tokens for tokens in expected for _ in range(3)]
        cluster.assert_idle()
