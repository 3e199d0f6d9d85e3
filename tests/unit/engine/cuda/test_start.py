"""A whole start on a CPU with the numbers of a fake GPU, and the self test that a broken engine fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.cpu_cores import CpuCores
from shared.engine.backends import load_model
from shared.engine.build import build_engine
from shared.engine.cuda.batches import StartBatches
from shared.engine.cuda.gpu_claims import GpuClaim
from shared.engine.cuda.gpu_share import GpuShare
from shared.engine.cuda.self_test import problem_with, self_test
from shared.engine.device_share import BoundModel, DeviceShare, OnProgress
from shared.engine.engine_shape import EngineShape
from shared.engine.forward_stream import make_forward_stream
from shared.engine.model_runner import ModelBackend, ModelRunner
from shared.engine.progress import Progress
from shared.engine.torch_backend import TorchBackend
from shared.engine.torch_ops import torch_kernels
from shared.errors import ConfigError
from shared.kvcache.pools import TokenToKVPool
from shared.model.config import load_model_config
from shared.model.decoder import Decoder
from shared.model.dummy_weights import DummyWeights
from tests.backend_rig import kv_pool
from tests.unit.engine.cuda.fake_gpu import FakeGpu, FakeMemory

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
    "eos_token_id": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json, and nothing else."""
    folder = tmp_path_factory.mktemp("dummy")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def node_config(folder: Path, **schedule: int) -> NodeConfig:
    return NodeConfig(
        model=ModelOptions(model=str(folder), load_format="dummy", device="cpu", cpu_cores=CpuCores(1)),
        cache=CacheOptions(page_size=8),
        schedule=ScheduleOptions(max_running_requests=4, chunked_prefill_size=32, **schedule),
    )


WINDOWS = {"use_sliding_window": True, "sliding_window": 24}


@pytest.mark.parametrize(
    "fields",
    [{}, {**WINDOWS, "max_window_layers": 1}, {**WINDOWS, "max_window_layers": 0}],
    ids=["no-windows", "windows", "windows-alone"],
)
def test_every_step_of_a_start_in_order(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    progress: list[str] = []
    gpu = FakeGpu(20 << 20)
    memory = FakeMemory(gpu, "node")
    claim = GpuClaim(tmp_path)

    def share_of(shape: EngineShape, on_progress: OnProgress) -> DeviceShare:
        return GpuShare(shape, memory, claim, on_progress, clock=lambda: 0.0, sleep=lambda seconds: None)

    engine = build_engine(node_config(folder), lambda what, _: progress.append(what), share_of=share_of)
    other = GpuClaim(tmp_path)
    assert other.others().num_starting == 0
    assert other.others().nbytes > 0, "the node tells others what it has"
    engine.close()
    assert other.others().nbytes == 0
    other.close()
    steps = [what for what, before in zip(progress, ["", *progress], strict=False) if what != before]
    assert steps == ["loading weights", "measuring memory", "allocating KV pages", "warming up", "testing"]
    pools = (
        (engine.pool,) if isinstance(engine.pool, TokenToKVPool) else (engine.pool.full, engine.pool.window)
    )
    assert len(pools) == 1 + bool(fields)
    assert not any(pool.buffer_LSNHPD[:, :, 1:].any() for pool in pools), "pages of the self test are cleared"
    assert engine.ledger.count().free == engine.ledger.count().total


class OffByOne(Decoder):
    """Computes decode steps one position too far."""

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, *to: Any) -> torch.Tensor:
        return super().forward(input_ids_T, positions_T + (len(positions_T) == 1), *to)


class LastBits(Decoder):
    """Computes decode steps with other last bits, as other kernels do. On some CPUs torch's own have the same."""

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, *to: Any) -> torch.Tensor:
        hidden_TD = super().forward(input_ids_T, positions_T, *to)
        return hidden_TD * (1 + 1e-6 * (len(positions_T) == 1))


class NotANumber(Decoder):
    """Has weights that overflow."""

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, *to: Any) -> torch.Tensor:
        self.weights.layers[1].attention.qkv_proj.weight_NK[0] = torch.inf
        return super().forward(input_ids_T, positions_T, *to)


class SelfTestRig:
    """An engine's parts, put together around a decoder."""

    def __init__(
        self, folder: Path, decoder: type[Decoder] | None, dtype: torch.dtype, page_size: int
    ) -> None:
        """Without a decoder the native kernels compute. Raises ConfigError where there are none."""
        model = load_model_config(folder)
        config = node_config(folder)
        self.shape = EngineShape(
            name="tiny",
            model=model,
            dtype=dtype,
            device=CPU,
            cache=replace(config.cache, page_size=page_size),
            schedule=config.schedule,
            context_length=256,
            decodes=True,
        )
        pool = kv_pool(model, 101, page_size, dtype)
        weights, limits = DummyWeights(0, CPU), self.shape.forward_limits
        backend: ModelBackend
        if decoder is None:
            native = load_model(
                "native",
                weights,
                model,
                dtype=dtype,
                device=CPU,
                cores=(-1,),
                on_progress=lambda what, fraction: None,
            )
            backend = native.bind(pool, Progress(), limits)
        else:
            made = decoder.load(weights, model, dtype=dtype, device=CPU)
            backend = TorchBackend(torch_kernels(pool.device), made, pool, Progress(), limits)
        runner = ModelRunner(backend, 4, CPU)
        self.bound = BoundModel(pool, backend, runner, make_forward_stream(runner))

    def run(self) -> None:
        self_test(self.bound, self.shape, StartBatches(self.shape))


@pytest.fixture
def rigs() -> Iterator[list[SelfTestRig]]:
    made: list[SelfTestRig] = []
    yield made
    for rig in made:
        rig.bound.stream.close()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_sound_engine_passes(
    folder: Path, rigs: list[SelfTestRig], dtype: torch.dtype, page_size: int
) -> None:
    rigs.append(SelfTestRig(folder, Decoder, dtype, page_size))
    rigs[0].run()
    assert not rigs[0].bound.pool.buffer_LSNHPD[:, :, 1:].any()


@pytest.mark.parametrize(
    ("decoder", "problem"),
    [
        (OffByOne, r"K and V of an extend and of decode steps differ by \d+%"),
        (NotANumber, "a logprob is infinite or not a number"),
    ],
)
def test_a_broken_engine_is_refused(
    folder: Path, rigs: list[SelfTestRig], decoder: type[Decoder], problem: str
) -> None:
    rigs.append(SelfTestRig(folder, decoder, torch.float32, 16))
    with pytest.raises(ConfigError, match=f"{problem}.*torch"):
        rigs[0].run()


def test_a_backend_that_promises_equal_bits_is_held_to_it(folder: Path, rigs: list[SelfTestRig]) -> None:
    rigs.append(SelfTestRig(folder, LastBits, torch.float32, 16))
    rigs[0].bound.backend.is_exact = True
    with pytest.raises(ConfigError, match="different bits"):
        rigs[0].run()


@pytest.mark.parametrize("again", [(7, -1.0), (8, -1.5)], ids=["token", "logprob"])
def test_equal_bits_are_those_of_the_sample_too(again: tuple[int, float]) -> None:
    kv = torch.ones(2, 2, 1, 3, 4)
    assert problem_with(True, kv, kv, (8, -1.0), (8, -1.0)) is None
    assert "different bits" in str(problem_with(True, kv, kv, (8, -1.0), again))
    assert problem_with(False, kv, kv, (8, -1.0), again) is None


def test_the_native_kernels_keep_their_promise_of_equal_bits(folder: Path, rigs: list[SelfTestRig]) -> None:
    try:
        rigs.append(SelfTestRig(folder, None, torch.bfloat16, 16))
    except ConfigError as unavailable:
        pytest.skip(str(unavailable))
    assert rigs[0].bound.backend.is_exact
    rigs[0].run()
