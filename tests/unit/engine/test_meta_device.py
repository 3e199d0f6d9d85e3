"""Neither the forward nor sampling by torch's operations waits for a value or mixes devices.

The test of Triton's launches shows the same of the kernels of a GPU (tests/kernels/triton/launches.py).
"""

from __future__ import annotations

import pytest
import torch

from shared.engine.cuda.batches import EVERYTHING, GREEDY, Extend
from shared.engine.model_runner import SampledTensors
from shared.protocol.sampling_params import SamplingParams
from tests.meta_rig import META, MetaRig
from tests.token_engine import token_model_config

MODELS = {
    "llama": token_model_config(),
    "qwen2": token_model_config(
        architectures=["Qwen2ForCausalLM"], num_attention_heads=4, num_key_value_heads=2
    ),
    "qwen3": token_model_config(
        architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False, num_hidden_layers=2
    ),
    "mistral": token_model_config(architectures=["MistralForCausalLM"], sliding_window=9),
}
EXTENDS = [Extend(0, 16, [5, 6, 7]), Extend(3, 0, [8]), Extend(1, 0, [9, 10])]
DECODES = [(2, 4), (4, 30)]


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
    rig = MetaRig(MODELS[model])
    for with_grammars in (False, True):
        sampled = rig.run(extends, decodes, params, with_grammars=with_grammars)
        assert devices_of(sampled) == {META}
        assert sampled.token_ids_S.shape == (len(extends) + len(decodes),)
        assert (sampled.logprobs is not None) == (params.logprobs is not None)
        assert (sampled.input_logprobs is not None) == bool(params.logprobs is not None and extends)
