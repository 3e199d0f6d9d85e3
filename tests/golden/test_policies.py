"""The order of service never changes an output: every policy, prompts that share prefixes, memory that is tight."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shared.protocol.messages import ReqKey
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.schedule_policy import POLICIES
from tests.cluster import Cluster
from tests.golden.references import Zoo
from tests.golden.serving import node_config, real_engine
from tests.modelzoo import random_prompt, reference_greedy

NUM_NEW = 16
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Three families of eight; members share 40 to 75 tokens."""
    rng = random.Random(9)
    families = [random_prompt(80, seed=700 + i) for i in range(3)]
    return [
        families[i % 3][: 40 + 5 * (i // 3)] + random_prompt(rng.randint(1, 30), seed=800 + i)
        for i in range(24)
    ]


@pytest.fixture(scope="module")
def references(zoo: Zoo, prompts: list[list[int]]) -> list[list[int]]:
    return [reference_greedy(zoo.folder("llama"), prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.parametrize("num_prefill", [0, 1], ids=["0P1D", "1P1D"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_output_is_the_reference(
    llama: Path, prompts: list[list[int]], references: list[list[int]], policy: str, num_prefill: int
) -> None:
    config = node_config(
        llama,
        page_size=8,
        max_total_tokens=520,
        schedule_policy=policy,  # type: ignore[arg-type]
        schedule_conservativeness=0.0,
        num_reserved_decode_tokens=0,
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=1,
        priority_aging_steps=20,
    )
    with Cluster(num_prefill, 1, real_engine, config) as cluster:
        keys: list[ReqKey] = []
        for i, prompt in enumerate(prompts):
            key = cluster.router.submit(
                f"r{i}",
                prompt,
                GREEDY,
                "p0" if num_prefill else None,
                "d0",
                priority=i % 4,
                routing_key=f"family {i % 3}",
            )
            keys.append(key)
            for _ in range(i % 3):
                cluster.step()
        cluster.run_all()
        cluster.assert_idle()
        assert [cluster.tokens(key) for key in keys] == references
        assert cluster.nodes["d0"].scheduler.batcher.num_retractions > 0
