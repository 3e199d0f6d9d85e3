"""The native forward beside its slow twin, the torch one: the same function, and no less accurate."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.engine.backends import load_model
from shared.engine.future_map import FutureMap
from shared.engine.logprobs import GatheredLogprobs, prompt_logprobs
from shared.engine.model_runner import Forwarded, ModelRunner
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.sampling_inputs import (
    BiasInputs,
    DrawInputs,
    HostSampling,
    KnownTokens,
    LogprobInputs,
    LogprobShare,
    MaskedInputs,
    PenaltyInputs,
    SamplingInputs,
    VocabMask,
)
from shared.engine.torch_ops import TorchTokens
from shared.errors import ConfigError
from shared.model.checkpoint import Checkpoint
from shared.model.config import load_model_config
from shared.model.packed_weights import native_obstacle
from tests.backend_rig import NUM_ROWS, Rig, batch_of, native_model, rig
from tests.modelzoo import make_model, random_prompt
from tests.token_engine import token_model_config

MODELS = {
    "llama": {},
    "llama_biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "mistral_tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"num_hidden_layers": 1},
    "qwen3_window": {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1},
    "phi3": {},
    "glm4": {},
    "gemma3": {},
}
MIXTURES = {
    "qwen3moe": {"num_key_value_heads": 1},
    "olmoe": {"attention_bias": True},
    "mixtral": {},
    "gptoss": {"sliding_window": 17},
}
GPTQ = {"quant_method": "gptq", "group_size": -1}
BF16_FACTOR = 1.1
"""The native path rounds to bf16 in a subset of the places where torch does: its residual stream stays float32."""


pytestmark = pytest.mark.usefixtures("native_kernels")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("native")

    def make(name: str) -> Path:
        """Weights that are bf16 already, so that all paths compute with the same numbers."""
        folder = root / name
        architecture = name.split("_")[0]
        return (
            folder
            if folder.exists()
            else make_model(folder, architecture, dtype="bfloat16", **(MODELS | MIXTURES)[name])
        )

    return make


def prompts(count: int) -> list[list[int]]:
    return [random_prompt(20 + 7 * i, seed=i) for i in range(count)]


def logits_of_every_kind(path: Rig) -> torch.Tensor:
    """Of an extend of seven rows, a decode step of all, and a mixed batch with prefixes."""
    ids = prompts(7)
    parts = [path.extend({row: (0, ids[row]) for row in range(7)})]
    path.future_map.last_token_R[:NUM_ROWS] = torch.arange(NUM_ROWS) + 40
    parts.append(path.forward({}, {row: len(ids[row]) for row in range(7)}))
    next_ids = random_prompt(9, seed=100)
    parts.append(
        path.forward(
            {row: (len(ids[row]) + 1, next_ids) for row in range(3)},
            {row: len(ids[row]) + 1 for row in range(3, 7)},
        )
    )
    return torch.cat(parts)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_as_close_to_float32_as_torch_is(folder_of: Callable[[str], Path], name: str) -> None:
    """Root mean square of the logits' error, relative to their spread; ADR 27 has the figures."""
    folder = folder_of(name)
    with rig(folder, "torch", torch.float32) as path:
        exact = logits_of_every_kind(path)
    with rig(folder, "torch") as path:
        by_torch = error(logits_of_every_kind(path), exact)
    with rig(folder, "native") as path:
        native = error(logits_of_every_kind(path), exact)
    assert native < BF16_FACTOR * by_torch
    assert by_torch < 0.1, "bf16 is what differs"


def test_embeddings_are_scaled_by_a_number_of_their_type(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "gemma3", "gemma3", hidden_size=48, dtype="bfloat16")
    model = native_model(folder, load_model_config(folder), 1, ())
    model.team.close()
    assert model.weights.desc.embed_scale == 6.9375


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_as_close_to_float32_as_torch_is(folder_of: Callable[[str], Path], name: str) -> None:
    """Of the median row: in a few, rounding decides between two experts of nearly the same score."""
    folder = folder_of(name)
    with rig(folder, "torch", torch.float32) as path:
        exact = logits_of_every_kind(path)
    errors = {}
    for kernels in ("torch", "native"):
        with rig(folder, kernels) as path:
            rows = (logits_of_every_kind(path) - exact).square().mean(1).sqrt()
            errors[kernels] = float(rows.median() / exact.std())
    assert errors["native"] < BF16_FACTOR * errors["torch"] < 0.1


def error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).square().mean().sqrt() / exact.std())


@pytest.mark.parametrize(
    "name", ["llama_biases", "qwen3", "qwen3_window", "phi3", "glm4", "gemma3", *MIXTURES]
)
def test_a_rows_logits_depend_on_nothing_else(folder_of: Callable[[str], Path], name: str) -> None:
    """Alone or in a batch, in one chunk or several: the same bits."""
    ids = prompts(7)
    with rig(folder_of(name), "native") as path:
        together = logits_of_every_kind(path)
    with rig(folder_of(name), "native") as path:
        path.future_map.last_token_R[:NUM_ROWS] = torch.arange(NUM_ROWS) + 40
        for row in range(7):
            for start in range(0, len(ids[row]), 6):
                logits = path.extend({row: (start, ids[row][start : start + 6])})
            assert torch.equal(logits[0], together[row])
            decoded = path.forward({}, {row: len(ids[row])})
            assert torch.equal(decoded[0], together[7 + row])


def test_tokens_from_prefill_nodes_are_there_before_they_are_read(
    folder_of: Callable[[str], Path],
) -> None:
    with rig(folder_of("llama"), "native") as path:
        path.extend({0: (0, prompts(1)[0]), 1: (0, prompts(1)[0])})
        path.future_map.last_token_R[:] = 77
        written = path.forward({}, {0: 20, 1: 20}, future_writes=((1, 55), (3, 66)))
        assert path.future_map.last_token_R[:NUM_ROWS].tolist() == [77, 55, 77, 66, 77, 77, 77, 77]
        assert not torch.equal(written[0], written[1])
        path.future_map.last_token_R[0] = 55
        assert torch.equal(path.forward({}, {0: 20})[0], written[1])


def test_a_chunk_in_the_middle_samples_nothing_and_leaves_its_kv(
    folder_of: Callable[[str], Path],
) -> None:
    ids = prompts(5)[4]
    with rig(folder_of("llama"), "native") as path:
        whole = path.extend({0: (0, ids)})
        path.run({1: (0, ids[:21])}, {}, sampled_B=np.empty(0, dtype=np.int64))
        assert path.logits is None
        assert torch.equal(path.extend({1: (21, ids[21:])}), whole)


def test_prompt_logprobs_are_those_of_torch(folder_of: Callable[[str], Path]) -> None:
    ids = prompts(2)[1]
    wanted = LogprobInputs(
        rows_N=np.arange(3, 10, dtype=np.int64),
        targets_N=np.array(ids[4:11], dtype=np.int64),
        token_ids_NM=np.zeros((7, 1), dtype=np.int64),
        top_num=2,
        shares=(LogprobShare(0, 7, 2, 1),),
    )
    found: dict[str, GatheredLogprobs] = {}
    for kernels in ("native", "torch"):
        with rig(folder_of("qwen2"), kernels) as path, torch.inference_mode():
            hidden_ND = path.run({0: (0, ids)}, {}, sampling=SamplingInputs(input_logprobs=wanted))
            assert hidden_ND is not None
            found[kernels] = prompt_logprobs(
                path.backend.logits, hidden_ND, wanted.map(torch.from_numpy), path.backend.vocab_size
            )
    assert torch.allclose(found["native"].chosen_N, found["torch"].chosen_N, atol=0.6)
    assert torch.allclose(found["native"].top_NK, found["torch"].top_NK, atol=0.6)


class SameLogits:
    """Draws as torch does, from logits that are given."""

    name = "torch"
    numerics = ""
    has_threads = False

    def __init__(self, logits_SV: torch.Tensor) -> None:
        tokens = TorchTokens()
        self.penalize, self.draw = tokens.penalize, tokens.draw
        self.vocab_size = logits_SV.shape[1]
        self._logits_SV = logits_SV

    def forward(self, batch: ModelWorkerBatch, future_map: FutureMap) -> Forwarded:
        rows_S = torch.from_numpy(batch.rows_B[batch.sampled_B])
        return Forwarded(self._logits_SV.clone(), rows_S, batch.sampling)

    def close(self) -> None:
        pass


def test_everything_that_changes_logits_changes_them_before_the_native_draw(
    folder_of: Callable[[str], Path],
) -> None:
    """Penalties, biases, stop tokens that may not come yet, a grammar's mask, and the logprobs of what was drawn."""
    S, V = 4, 512
    steps = [sampling_of_everything(seed) for seed in range(6)]
    mask = VocabMask(entries_G=np.array([1]), allowed_GW=np.full((1, V // 32), 0x0F0F0F0F, dtype=np.int32))
    with rig(folder_of("llama"), "native") as path:
        path.extend({row: (0, prompts(S)[row]) for row in range(S)})
        starts = {row: len(prompts(S)[row]) for row in range(S)}
        batch = replace(batch_of({}, starts), future_writes=tuple((row, 0) for row in starts))
        logits_SV = path.forward({}, starts)
        runners = [
            ModelRunner(backend, NUM_ROWS, torch.device("cpu"))
            for backend in (path.backend, SameLogits(logits_SV))
        ]
        for inputs in steps:
            native, by_torch = (
                runner.sample(runner.forward(replace(batch, sampling=inputs)), mask).as_values()
                for runner in runners
            )
            assert native.token_ids == by_torch.token_ids
            assert native.token_ids[0] == 9, "the bias decides"
            assert native.token_ids[1] & 7 < 4, "the mask decides"
            assert native.logprobs == by_torch.logprobs


def sampling_of_everything(seed: int) -> HostSampling:
    known = KnownTokens(
        slots_A=np.array([0]),
        token_slots_N=np.zeros(4, dtype=np.int64),
        token_ids_N=np.array([5, 6, 7, 7]),
        in_output_N=np.array([0, 0, 1, 1], dtype=np.int32),
    )
    return SamplingInputs(
        draws=DrawInputs(
            temperatures_S=np.array([0, 1, 0.7, 2], dtype=np.float32),
            top_ks_S=np.array([0, 0, 20, 0], dtype=np.int64),
            top_ps_S=np.array([1, 1, 0.9, 0.95], dtype=np.float32),
            min_ps_S=np.array([0, 0, 0, 0.02], dtype=np.float32),
            uniforms_S=np.random.default_rng(seed).random(4),
            needs_filter=True,
        ),
        masked=MaskedInputs(entries_N=np.array([2, 2]), token_ids_N=np.array([3, 4])),
        penalties=PenaltyInputs(
            entries_P=np.array([3]),
            slots_P=np.array([0]),
            frequency_P=np.array([0.5], dtype=np.float32),
            presence_P=np.array([0.5], dtype=np.float32),
            repetition_P=np.array([1.5], dtype=np.float32),
            num_slots=1,
            anew=known if seed == 0 else None,
        ),
        biases=BiasInputs(
            entries_N=np.array([0]), token_ids_N=np.array([9]), values_N=np.array([100], dtype=np.float32)
        ),
        logprobs=LogprobInputs(
            rows_N=np.array([2, 3]),
            targets_N=None,
            token_ids_NM=np.zeros((2, 0), dtype=np.int64),
            top_num=3,
            shares=(LogprobShare(2, 1, 3, 0), LogprobShare(3, 1, 1, 0)),
        ),
    )


def test_a_token_outside_the_vocabulary_is_refused(folder_of: Callable[[str], Path]) -> None:
    with rig(folder_of("llama"), "native") as path:
        for token in (-1, 512):
            with pytest.raises(IndexError, match="vocabulary"):
                path.extend({0: (0, [5, token])})
        assert path.extend({0: (0, [5, 511])}).isfinite().all()


def test_progress_is_seen_layer_by_layer(folder_of: Callable[[str], Path]) -> None:
    with rig(folder_of("llama"), "native") as path:
        path.extend({0: (0, [5])})
        assert path.progress.count == load_model_config(folder_of("llama")).num_layers


class TestChoice:
    """Which backend is taken, and what is said where it is not the one that was asked for."""

    def test_auto_takes_native_for_bf16_and_torch_for_float32(self, folder_of: Callable[[str], Path]) -> None:
        with rig(folder_of("llama"), "auto") as path:
            assert path.backend.name == "native"
        with rig(folder_of("llama"), "auto", torch.float32) as path:
            assert path.backend.name == "torch"

    @pytest.mark.parametrize(
        ("kernels", "exact", "reason"),
        [
            ("triton", False, "--attention-backend triton: its kernels are for GPUs, and this is cpu"),
            ("torch", True, "--exact: torch's operations are not exact"),
            ("auto", True, "--exact: torch's operations are not exact"),
        ],
    )
    def test_triton_and_exact_say_why_they_cannot(
        self, folder_of: Callable[[str], Path], kernels: str, exact: bool, reason: str
    ) -> None:
        folder = folder_of("llama")
        with pytest.raises(ConfigError, match=reason):
            load_model(
                kernels,
                Checkpoint(folder),
                load_model_config(folder),
                dtype=torch.float32,
                device=torch.device("cpu"),
                cores=(-1,),
                on_progress=lambda what, fraction: None,
                exact=exact,
            )

    def test_native_says_why_it_cannot(self, folder_of: Callable[[str], Path]) -> None:
        with (
            pytest.raises(ConfigError, match=r"--attention-backend native: .*bfloat16.*float32"),
            rig(folder_of("llama"), "native", torch.float32),
        ):
            pass

    @pytest.mark.parametrize(
        ("changes", "obstacle"),
        [
            ({"head_dim": 24}, "head_dim 24 is no multiple of 16"),
            ({"head_dim": 272}, "up to 256"),
            (
                {"num_attention_heads": 193, "num_key_value_heads": 1, "head_dim": 16},
                "193 query heads share a KV head",
            ),
            ({"hidden_size": 65, "head_dim": 16}, "a layer has 65 inputs"),
            ({"num_attention_heads": 192, "num_key_value_heads": 1, "head_dim": 256}, None),
            ({"hidden_size": 68, "head_dim": 16, "quantization_config": GPTQ | {"bits": 4}}, "68 inputs"),
            ({"hidden_size": 68, "head_dim": 16, "quantization_config": GPTQ | {"bits": 8}}, None),
        ],
    )
    def test_shapes_that_the_kernels_cannot_do(self, changes: dict[str, Any], obstacle: str | None) -> None:
        found = native_obstacle(token_model_config(**changes))
        assert found is None if obstacle is None else obstacle in str(found)

    def test_without_a_compiler_torch_computes(
        self, folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
        with rig(folder_of("llama"), "auto") as path:
            assert path.backend.name == "torch"
        with (
            pytest.raises(ConfigError, match="C\\+\\+ compiler"),
            rig(folder_of("llama"), "native"),
        ):
            pass


def test_it_keeps_what_native_code_writes_to(folder_of: Callable[[str], Path]) -> None:
    """The progress it counts in lives as long as the backend, whoever else has let go of it."""
    with rig(folder_of("llama"), "native") as path:
        progress, layers = weakref.ref(path.progress), weakref.ref(path.progress.layers)
        del path.progress
        gc.collect()
        assert progress() is not None and layers() is not None
