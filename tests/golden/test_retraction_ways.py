"""Each way out of memory pressure leads to the reference's tokens: copied away and back, computed anew, or waited."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.protocol.sampling_params import SamplingParams, TokenBias
from tests.cluster import Cluster
from tests.golden.references import Zoo, reference_tokens
from tests.golden.serving import GREEDY, Client, node_config, real_engine

PENALIZED = SamplingParams(
    max_new_tokens=32,
    temperature=0.9,
    seed=3,
    ignore_eos=True,
    frequency_penalty=0.6,
    presence_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias=(TokenBias(77, 9.0),),
)
SEEDED = SamplingParams(max_new_tokens=32, temperature=1.0, seed=4, ignore_eos=True)
NUM_REQS = 9


@dataclass(frozen=True)
class Case:
    """No other than `ways` may be taken; a wait is part of every crowd."""

    policy: str
    host_kv_tokens: int
    ways: frozenset[str]
    max_total_tokens: int = 560
    retract_every: int = 0


FORCED_AND_FULL = frozenset({"host", "recompute"})
CASES = {
    "host, forced": Case("host", 4096, frozenset({"host"}), max_total_tokens=16384, retract_every=3),
    "host": Case("host", 4096, frozenset({"host"})),
    "host, full": Case("host", 184, frozenset({"host", "waits"})),
    "host, forced and full": Case("host", 240, FORCED_AND_FULL, max_total_tokens=16384, retract_every=3),
    "recompute": Case("recompute", 0, frozenset({"recompute"})),
    "auto, host is dear": Case("auto", 4096, frozenset({"recompute"})),
    "auto, host is cheap": Case("auto", 4096, frozenset({"host"})),
    "auto, forced and full": Case("auto", 240, FORCED_AND_FULL, max_total_tokens=16384, retract_every=3),
}


@pytest.fixture(scope="module")
def expected(zoo: Zoo) -> list[list[int]]:
    folder, prompts = zoo.folder("llama"), zoo.prompts("llama")
    return [reference_tokens(folder, prompts[i], params_of(i)) for i in range(NUM_REQS)]


def params_of(i: int) -> SamplingParams:
    return (GREEDY, PENALIZED, SEEDED)[i % 3]


@pytest.mark.parametrize(
    ("num_prefill", "overlap"), [(0, True), (1, False)], ids=["0P1D-overlap", "1P1D-serial"]
)
@pytest.mark.parametrize("name", CASES)
def test_every_output_is_the_reference(
    zoo: Zoo,
    llama: Path,
    expected: list[list[int]],
    num_prefill: int,
    overlap: bool,
    name: str,
) -> None:
    case = CASES[name]
    config = node_config(
        llama,
        overlap=overlap,
        page_size=8,
        max_total_tokens=case.max_total_tokens,
        host_kv_tokens=case.host_kv_tokens,
        retract_every=case.retract_every,
        retract_policy=case.policy,  # type: ignore[arg-type]
        schedule_conservativeness=0.0,
        num_reserved_decode_tokens=0,
    )
    with Cluster(
        num_prefill, 1, real_engine, node_config(llama, page_size=8), decode_config=config
    ) as cluster:
        retraction = cluster.nodes["d0"].scheduler.batcher.retraction
        setattr(retraction.costs, "copy" if "dear" in name else "prefill", Dear())
        client = Client(cluster)
        keys = [client.submit(zoo.prompts("llama")[i], params_of(i)) for i in range(NUM_REQS)]
        cluster.run_all()
        cluster.assert_idle()
        for key, tokens in zip(keys, expected, strict=True):
            assert cluster.tokens(key) == tokens
        count = retraction.count
        taken = {way for way in ("host", "recompute", "waits") if getattr(count, f"num_{way}")}
        assert taken - {"waits"} <= case.ways
        assert ("host" in taken) == ("host" in case.ways)
        if not num_prefill:  # that makes the largest crowd
            assert taken >= case.ways


class Dear:
    """A MovingRate that stays where it is: nothing is slower."""

    per_second = 1e-3

    def observe(self, work: float, seconds: float) -> None:
        return
