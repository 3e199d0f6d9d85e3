"""64 concurrent streams through a decode pool a quarter of what they need: all correct, nothing leaked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.golden.references import NUM_NEW, NUM_PROMPTS, Zoo
from tests.golden.serving import GREEDY, Client, node_config, real_engine

NUM_STREAMS = 64


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("reserved", [0, 32])
def test_all_streams_are_correct(zoo: Zoo, llama: Path, page_size: int, overlap: bool, reserved: int) -> None:
    prompts = [zoo.prompts("llama")[i % NUM_PROMPTS] for i in range(NUM_STREAMS)]
    needed = sum(len(ids) + GREEDY.max_new_tokens for ids in prompts)
    options: dict[str, object] = {
        "page_size": page_size,
        "overlap": overlap,
        "max_running_requests": NUM_STREAMS,
        "num_reserved_decode_tokens": reserved,
        "schedule_conservativeness": 0.0,
    }
    with Cluster(
        1,
        1,
        real_engine,
        node_config(llama, **options),  # type: ignore[arg-type]
        decode_config=node_config(llama, max_total_tokens=needed // 4, **options),  # type: ignore[arg-type]
    ) as cluster:
        tokens = Client(cluster).tokens(prompts)  # audits both nodes when all have ended
        for i in range(NUM_STREAMS):
            assert tokens[i] == zoo.greedy("llama", i % NUM_PROMPTS), f"stream {i}"
            assert len(tokens[i]) == NUM_NEW
        assert reserved or cluster.nodes["d0"].scheduler.batcher.num_retractions > 0
        assert cluster.nodes["d0"].engine.ledger.count().total <= needed // 4 // page_size
