"""The real forward and sampling on torch's `meta` device, which has shapes and no values.

An operation that needs a value on the host raises there, and so does one that mixes host and device. A GPU would wait
at the first kind, and fail at the second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.config import CacheOptions, ScheduleOptions
from shared.engine.model_runner import ModelRunner, SampledTensors
from shared.engine.progress import Progress
from shared.engine.start.batches import EVERYTHING, GREEDY, Extend, StartBatches
from shared.engine.start.shape import EngineShape
from shared.engine.torch_backend import TorchBackend
from shared.engine.torch_ops import torch_kernels
from shared.kvcache.pools import TokenToKVPool
from shared.model.config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.dummy_weights import DummyWeights
from shared.protocol.sampling_params import SamplingParams
from tests.token_engine import token_model_config

META = torch.device("meta")
PAGE_SIZE, NUM_ROWS = 8, 6
MODELS = {
    "llama": token_model_config(),
    "qwen2": replace(token_model_config(), qkv_bias=True, num_heads=4, num_kv_heads=2),
    "qwen3": replace(token_model_config(), qk_norm=True, tie_word_embeddings=False, num_layers=2),
}
EXTENDS = [Extend(0, 16, [5, 6, 7]), Extend(3, 0, [8]), Extend(1, 0, [9, 10])]
DECODES = [(2, 4), (4, 30)]


class Rig:
    def __init__(self, model: ModelConfig, decoder: type[Decoder] = Decoder) -> None:
        shape = EngineShape(
            name="meta",
            model=model,
            dtype=torch.bfloat16,
            device=META,
            cache=CacheOptions(page_size=PAGE_SIZE),
            schedule=ScheduleOptions(max_running_requests=NUM_ROWS),
            context_length=64,
            decodes=True,
        )
        pool = TokenToKVPool(
            num_pages=10,
            page_size=PAGE_SIZE,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=shape.dtype,
            device=META,
        )
        weights = decoder.load(DummyWeights(0, META), model, dtype=shape.dtype, device=META)
        backend = TorchBackend(torch_kernels(pool.device), weights, pool, Progress(), shape.forward_limits)
        self.runner = ModelRunner(backend, NUM_ROWS, META)
        self.batches = StartBatches(shape)

    def run(
        self,
        extends: list[Extend],
        decodes: list[tuple[int, int]],
        params: SamplingParams,
        *,
        with_grammars: bool = False,
    ) -> SampledTensors:
        batch = self.batches.forward(extends, decodes, params)
        batch = replace(batch, future_writes=tuple((row, 40) for row, _ in decodes[:1]))
        mask = self.batches.mask_of(batch) if with_grammars else None
        return self.runner.sample(self.runner.forward(batch), mask)


def devices_of(sampled: SampledTensors) -> set[torch.device]:
    found: set[torch.device] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.add(tensor.device)
        return tensor

    sampled.map(note)
    return found


@pytest.mark.parametrize(
    ("extends", "decodes"),
    [(EXTENDS, []), ([], DECODES), (EXTENDS, DECODES)],
    ids=["extend", "decode", "mixed"],
)
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        EVERYTHING,
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.5, min_new_tokens=1, stop_token_ids=(3,)),
        SamplingParams(temperature=0.0, frequency_penalty=1.0),
    ],
    ids=["greedy", "everything", "temperature", "filter", "penalty"],
)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_waits_for_a_value_and_nothing_mixes_devices(
    model: str, params: SamplingParams, extends: list[Extend], decodes: list[tuple[int, int]]
) -> None:
    rig = Rig(MODELS[model])
    for with_grammars in (False, True):
        sampled = rig.run(extends, decodes, params, with_grammars=with_grammars)
        assert devices_of(sampled) == {META}
        assert sampled.token_ids_S.shape == (len(extends) + len(decodes),)
        assert (sampled.logprobs is not None) == (params.logprobs is not None)
        assert (sampled.input_logprobs is not None) == bool(params.logprobs is not None and extends)


class LooksAtAValue(Decoder):
    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, *to: Any) -> torch.Tensor:
        assert int(positions_T.max()) < 100
        return super().forward(input_ids_T, positions_T, *to)


class MixesDevices(Decoder):
    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, *to: Any) -> torch.Tensor:
        return super().forward(input_ids_T, positions_T + torch.zeros(len(positions_T)).long(), *to)


@pytest.mark.parametrize("decoder", [LooksAtAValue, MixesDevices])
def test_a_forward_that_does_either_is_caught(decoder: type[Decoder]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta|device"):
        Rig(MODELS["llama"], decoder).run(EXTENDS, DECODES, GREEDY)
