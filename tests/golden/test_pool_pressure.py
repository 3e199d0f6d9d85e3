"""Tight memory, prompts that share prefixes, priorities, any policy: the order of service changes no output."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shared.scheduling.schedule_policy import POLICIES
from tests.cluster import Cluster
from tests.golden.pairwise import pairwise
from tests.golden.references import Zoo
from tests.golden.serving import GREEDY, node_config, real_engine
from tests.modelzoo import random_prompt, reference_greedy

FACTORS: dict[str, tuple[object, ...]] = {
    "policy": tuple(POLICIES),
    "num_prefill": (0, 1),
    "page_size": (1, 8),
    "overlap": (True, False),
    "reserved": (0, 32),
}


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
    return [reference_greedy(zoo.folder("llama"), prompt, GREEDY.max_new_tokens) for prompt in prompts]


@pytest.mark.parametrize(tuple(FACTORS), pairwise(FACTORS))
def test_every_output_is_the_reference(
    llama: Path,
    prompts: list[list[int]],
    references: list[list[int]],
    policy: str,
    num_prefill: int,
    page_size: int,
    overlap: bool,
    reserved: int,
) -> None:
    config = node_config(
        llama,
        page_size=page_size,
        overlap=overlap,
        max_total_tokens=520,
        schedule_policy=policy,  # type: ignore[arg-type]
        schedule_conservativeness=0.0,
        num_reserved_decode_tokens=reserved,
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=1,
        priority_aging_steps=20,
    )
    with Cluster(num_prefill, 1, real_engine, config) as cluster:
        keys = []
        for i, prompt in enumerate(prompts):
            keys.append(
                cluster.router.submit(
                    f"r{i}",
                    prompt,
                    GREEDY,
                    "p0" if num_prefill else None,
                    "d0",
                    priority=i % 4,
                    routing_key=f"family {i % 3}",
                )
            )
            for _ in range(i % 3):
                cluster.step()
        cluster.run_all()
        cluster.assert_idle()
        assert [cluster.tokens(key) for key in keys] == references
        assert reserved or cluster.nodes["d0"].scheduler.batcher.num_retractions > 0
