"""Natively in bf16: a window pool changes no bit, at the edges of windows, over cached prefixes and through moves.

The reference keeps the KV of all layers whole, and runs one request at a time on one node.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from shared.config import NodeConfig
from shared.engine.engine_shape import EngineShape
from shared.protocol.logprobs import LogprobParams, TokenLogprobs
from shared.protocol.messages import ReqKey
from tests.cluster import Cluster
from tests.golden.serving import GREEDY, Client, real_engine, unsplit
from tests.golden.test_native import config_of
from tests.modelzoo import make_model, random_prompt

WINDOW = 24
MODELS = {
    "mistral": {"sliding_window": WINDOW},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "mixtral": {"sliding_window": WINDOW},
    "gptoss": {"sliding_window": WINDOW},
    "gemma3": {"sliding_window": WINDOW},
}
"""Mixtral's experts are computed in int4."""
PARAMS = msgspec.structs.replace(GREEDY, logprobs=LogprobParams(top_num=2))
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 61)
Outputs = list[tuple[list[int], dict[int, TokenLogprobs]]]

pytestmark = pytest.mark.usefixtures("native_kernels")


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param, **MODELS[request.param])


def prompts() -> list[list[int]]:
    """Each length, and each of them behind what the first one of its length begins with."""
    first = [random_prompt(length, seed=length) for length in LENGTHS]
    return [*first, *([*ids[: len(ids) - 3], *random_prompt(9, seed=1)] for ids in first)]


def outputs(cluster: Cluster, keys: list[ReqKey]) -> Outputs:
    return [(cluster.router.answers[key].token_ids, cluster.router.answers[key].logprobs) for key in keys]


def whole(config: NodeConfig) -> Outputs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineShape, "window", None)
        with unsplit(config) as cluster:
            client, keys = Client(cluster), list[ReqKey]()
            for ids in prompts():
                keys.append(client.submit(ids, PARAMS))
                cluster.run_all()
            return outputs(cluster, keys)


def node_config(folder: Path, **options: object) -> NodeConfig:
    config = config_of(folder, chunk=23, **options)
    quantization = "int4" if "mixtral" in folder.name else None
    return replace(config, model=replace(config.model, quantization=quantization))


@pytest.mark.parametrize("page_size", [4, 16])
def test_split_with_hits_retraction_and_moves(folder: Path, page_size: int) -> None:
    expected = whole(node_config(folder, page_size=page_size, retract_policy="recompute"))
    shape = node_config(
        folder, page_size=page_size, retract_every=5, retract_policy="host", host_kv_tokens=4096
    )
    with Cluster(1, 2, real_engine, shape) as cluster:
        assert cluster.nodes["d0"].engine.ledger.windows is not None
        router, keys = cluster.router, list[ReqKey]()
        for half in (prompts()[: len(LENGTHS)], prompts()[len(LENGTHS) :]):
            some = [router.submit(f"r{len(keys) + i}", ids, PARAMS, "p0", "d0") for i, ids in enumerate(half)]
            keys += some
            cluster.run(lambda: all(len(router.answers[key].token_ids) > 2 for key in some))  # noqa: B023
            moves = [router.move(key, "d0", "d1") for key in some]
            cluster.run_all()
            assert any(move.arrived for move in moves), [move.failures for move in moves]
        assert outputs(cluster, keys) == expected
        assert cluster.nodes["d0"].scheduler.batcher.retraction.count.num_host
        cluster.assert_idle()
