"""A request that moves between decode nodes gives what one that stays gives, to the bit: its tokens and logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from shared.config import NodeConfig
from shared.protocol.logprobs import LogprobParams
from tests.cluster import Answer, Cluster
from tests.golden.references import Zoo
from tests.golden.serving import GREEDY, real_engine
from tests.golden.test_native import config_of
from tests.golden.test_retraction_ways import PENALIZED, SEEDED

TOP_TWO = LogprobParams(top_num=2)
WANTED = [msgspec.structs.replace(params, logprobs=TOP_TWO) for params in (GREEDY, PENALIZED, SEEDED)]


def run(config: NodeConfig, prompts: Sequence[list[int]], *, moves: bool) -> list[Answer]:
    """WANTED at once. With `moves`, each goes from d0 to d1 and back as often as it can."""
    with Cluster(1, 2, real_engine, config) as cluster:
        router = cluster.router
        keys = [router.submit(f"r{i}", prompts[i], wanted, "p0", "d0") for i, wanted in enumerate(WANTED)]
        cluster.run(lambda: all(len(router.answers[key].token_ids) > 2 for key in keys))
        under_way = {key: router.move(key, "d0", "d1") for key in keys} if moves else {}
        num_arrived = 0

        def ended() -> bool:
            nonlocal num_arrived
            for key, move in list(under_way.items()):
                if move.arrived and not router.answers[key].ended:
                    num_arrived += 1
                    under_way[key] = router.move(move.to_key, move.target, move.source)
            return all(router.answers[key].ended for key in keys)

        cluster.run(ended)
        for _ in range(20):  # what is still on its way to a node has been called off
            cluster.step()
        cluster.assert_idle()
        assert num_arrived >= (len(keys) if moves else 0)
        return [router.answers[key] for key in keys]


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize(("model", "overlap"), [("builtin", True), ("qwen3-w8a8", False)])
def test_together_on_the_native_kernels(zoo: Zoo, model: str, overlap: bool) -> None:
    """In bfloat16, and with weights and KV of int8."""
    config = config_of(zoo.folder(model), overlap=overlap, page_size=8)
    stayed, moved = (run(config, zoo.prompts(model), moves=moves) for moves in (False, True))
    for one, other in zip(stayed, moved, strict=True):
        assert other.token_ids == one.token_ids
        assert other.logprobs == one.logprobs
        assert sorted(other.logprobs) == list(range(len(other.token_ids)))
