"""What a seeded request samples depends on nothing but itself: not on its batch, its node, or where it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.protocol.sampling_params import SamplingParams
from tests.golden.references import Zoo, reference_tokens
from tests.golden.serving import GREEDY, Client, node_config, split, unsplit

PARAMS = {
    "plain": SamplingParams(max_new_tokens=24, temperature=1.0, seed=11),
    "top_k": SamplingParams(max_new_tokens=24, temperature=1.0, top_k=20, seed=12),
    "top_p": SamplingParams(max_new_tokens=24, temperature=1.0, top_p=0.8, seed=13),
    "min_p": SamplingParams(max_new_tokens=24, temperature=1.0, min_p=0.05, seed=14),
    "all": SamplingParams(
        max_new_tokens=24, temperature=0.8, top_k=50, top_p=0.9, min_p=0.02, min_new_tokens=24, seed=2**63 - 1
    ),
}
sampled = pytest.mark.parametrize("name", PARAMS)
PROMPT = 5


@pytest.fixture(scope="module")
def expected(zoo: Zoo) -> dict[str, list[int]]:
    """A plain loop with a numpy sampler."""
    folder, ids = zoo.folder("llama"), zoo.prompts("llama")[PROMPT]
    return {name: reference_tokens(folder, ids, params) for name, params in PARAMS.items()}


def test_the_outputs_are_diverse_and_not_greedy(zoo: Zoo, expected: dict[str, list[int]]) -> None:
    for tokens in expected.values():
        assert tokens[:8] != zoo.greedy("llama", PROMPT)[:8]
        assert len(set(tokens)) >= 10
    assert len({tuple(tokens) for tokens in expected.values()}) == len(PARAMS)


@sampled
@pytest.mark.parametrize("topology", [split, unsplit], ids=["1P1D", "0P1D"])
def test_alone(zoo: Zoo, llama: Path, expected: dict[str, list[int]], name: str, topology: object) -> None:
    with topology(node_config(llama)) as cluster:  # type: ignore[operator]
        assert Client(cluster).tokens([zoo.prompts("llama")[PROMPT]], PARAMS[name]) == [expected[name]]


@sampled
@pytest.mark.parametrize("retract_every", [0, 3])
def test_among_sixteen_others(
    zoo: Zoo, llama: Path, expected: dict[str, list[int]], name: str, retract_every: int
) -> None:
    with split(node_config(llama, retract_every=retract_every)) as cluster:
        client = Client(cluster)
        others = [GREEDY, *PARAMS.values()]
        keys = [client.submit(ids, others[i % 6]) for i, ids in enumerate(zoo.prompts("llama")[6:14])]
        key = client.submit(zoo.prompts("llama")[PROMPT], PARAMS[name])
        keys += [client.submit(ids, others[i % 6]) for i, ids in enumerate(zoo.prompts("llama")[14:22])]
        cluster.run_all()
        assert len(keys) == 16
        assert cluster.tokens(key) == expected[name]
        assert bool(cluster.nodes["d0"].scheduler.batcher.num_retractions) == bool(retract_every)
        cluster.assert_idle()


@sampled
@pytest.mark.parametrize("num_known", [1, 10, 23])
@pytest.mark.parametrize("topology", [split, unsplit], ids=["1P1D", "0P1D"])
def test_resumed_in_the_middle(
    zoo: Zoo, llama: Path, expected: dict[str, list[int]], name: str, num_known: int, topology: object
) -> None:
    with topology(node_config(llama)) as cluster:  # type: ignore[operator]
        known = expected[name][:num_known]
        key = Client(cluster).submit(zoo.prompts("llama")[PROMPT], PARAMS[name], output_ids=known)
        cluster.run_all()
        assert cluster.tokens(key) == expected[name]
        cluster.assert_idle()


def test_another_seed_samples_something_else(zoo: Zoo, llama: Path) -> None:
    with unsplit(node_config(llama)) as cluster:
        client = Client(cluster)
        keys = [
            client.submit(
                zoo.prompts("llama")[PROMPT], SamplingParams(max_new_tokens=8, seed=seed, ignore_eos=True)
            )
            for seed in range(8)
        ]
        cluster.run_all()
        assert len({tuple(cluster.tokens(key)) for key in keys}) == 8
