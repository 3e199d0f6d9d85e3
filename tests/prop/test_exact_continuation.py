"""By the native kernels, the KV, logits and logprobs of a token have the same bits however they are computed.

In bf16 and with quantized weights: of one sequence, every cut into extends and decode steps, beside any other
sequences, with any page size and number of threads, leaves the KV of one extend over all of it. Each cut ends with
the logits of an extend up to there. Layers with windows have pages of their own in the cuts, and not in that extend.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from shared.config import ModelOptions
from shared.engine.backends import LoadedModel, NativeModel
from shared.engine.future_map import FutureMap
from shared.engine.input_block import ForwardLimits
from shared.engine.logprobs import RawLogprobs
from shared.engine.progress import Progress
from shared.engine.resolve import resolve_quantization
from shared.engine.sampling_inputs import LogprobInputs, LogprobShare
from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.library import Team, load_library
from shared.kernels.row_codes import split_codes
from shared.kvcache.pools import TokenToKVPool
from shared.kvcache.windowed_pool import AnyKVPool, WindowedKVPool
from shared.model.config import ModelConfig, load_model_config
from shared.protocol.messages import first_window_page
from tests.backend_rig import CPU, batch_over, kv_pool, native_model
from tests.kernels.cpu.conftest import BUILDS
from tests.modelzoo import make_model, random_prompt
from tests.quantized_models import awq, compressed_tensors, fp8, gptq, mxfp4, quantize_folder

MODELS = {
    "qwen3": {"num_hidden_layers": 2},
    "gptoss": {"num_hidden_layers": 2, "sliding_window": 100, "max_position_embeddings": 2048},
    "qwen3moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": 5},
    "llama": {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 48},
    "glm4": {"num_hidden_layers": 2},
    "gemma3": {"num_hidden_layers": 2, "sliding_window": 200},
}
QUANTIZED = {
    "qwen3-w8a8": ("qwen3", lambda: compressed_tensors(8, activations=True)),
    "qwen3-w4a16-zeros": ("qwen3", lambda: compressed_tensors(4, group_size=32, symmetric=False)),
    "llama-w8a16": ("llama", lambda: compressed_tensors(8)),
    "qwen3-awq": ("qwen3", lambda: awq(32)),
    "llama-gptq": ("llama", lambda: gptq(4, 32, desc_act=True)),
    "qwen3-gptq-of-8-bits": ("qwen3", lambda: gptq(8, -1)),
    "llama-fp8": ("llama", lambda: fp8("block")),
    "llama-int4": ("llama", lambda: None),
    "glm4-int4": ("glm4", lambda: None),
    "gemma3-int4": ("gemma3", lambda: None),
    "qwen3-gptq-weight-only": ("qwen3", lambda: gptq(4, 32, desc_act=True)),
    "qwen3moe-int4": ("qwen3moe", lambda: None),
    "mixtral-gptq": ("mixtral", lambda: gptq(4, 32, desc_act=True)),
    "gptoss-int4": ("gptoss", lambda: None),
    "gptoss-mxfp4": ("gptoss", mxfp4),
    "gptoss-mxfp4-weight-only": ("gptoss", mxfp4),
    "qwen3-kv-int8": ("qwen3", lambda: None),
    "llama-w8a8-kv-int8": ("llama", lambda: compressed_tensors(8, activations=True)),
}
NUM_ROWS = 8
LENGTH = 1100
"""More than two of the splits in which attention adds up a context."""
IDS = random_prompt(LENGTH, seed=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exact")
    dense = {
        name: make_model(root / name, name, dtype="bfloat16", **changes) for name, changes in MODELS.items()
    }
    return dense | {
        name: quantize_folder(dense[of], root / name, how) if (how := make()) else dense[of]
        for name, (of, make) in QUANTIZED.items()
    }


class Engine:
    """A backend over a fresh pool, whose rows have scattered pages."""

    def __init__(
        self,
        config: ModelConfig,
        model: LoadedModel,
        page_size: int,
        device: torch.device,
        kv_dtype: torch.dtype = torch.bfloat16,
        has_windows: bool = False,
    ) -> None:
        """With `has_windows`, layers with windows have a pool, and pages that are numbered from the other end."""
        self.page_size, pages_a_row = page_size, -(-(LENGTH + 1) // page_size)
        shuffled = np.random.default_rng(page_size).permutation(NUM_ROWS * pages_a_row)
        self.tables = (1 + shuffled).astype(np.int32).reshape(NUM_ROWS, pages_a_row)
        self.num_pages = 1 + NUM_ROWS * pages_a_row
        self.window = config.longest_window if has_windows else None
        self.layer_windows = tuple(window is not None for window in config.windows)

        def pool(num_layers: int) -> TokenToKVPool:
            return kv_pool(config, self.num_pages, page_size, kv_dtype, device, num_layers=num_layers)

        self.pool: AnyKVPool = pool(config.num_layers)
        if self.window is not None:
            num_windows = sum(self.layer_windows)
            self.pool = WindowedKVPool(
                pool(config.num_layers - num_windows), pool(num_windows), self.layer_windows
            )
        self.future_map = FutureMap(NUM_ROWS, device)
        limits = ForwardLimits(num_rows=NUM_ROWS, context_length=LENGTH + 1, max_tokens=2 * LENGTH)
        self.backend = model.bind(self.pool, Progress(), limits)

    def forward(self, extends: dict[int, tuple[int, Sequence[int]]], decodes: dict[int, int]) -> torch.Tensor:
        """Logits of extends, and of decode steps of the next token of IDS by (row, start)."""
        for row, start in decodes.items():
            self.future_map.last_token_R[row] = IDS[start]
        batch = batch_over(self.tables, self.page_size, extends, decodes)
        if self.window is not None:
            first_B = [first_window_page(start, self.window, self.page_size) for start in batch.starts_B]
            is_kept_BP = np.arange(batch.page_table_BP.shape[1]) >= np.array(first_B)[:, None]
            table_BP = np.where(is_kept_BP, self.num_pages - batch.page_table_BP, 0).astype(np.int32)
            batch = replace(batch, window_table_BP=table_BP)
        forwarded = self.backend.forward(batch, self.future_map)
        assert forwarded.logits_SV is not None
        return forwarded.logits_SV.clone()

    def close(self) -> None:
        """End what the backend has of threads and memory."""
        self.backend.close()

    def kv(self, row: int, length: int) -> torch.Tensor:
        """The bits of K and V of a row, [layer, K or V, token, head, dim]."""
        page_ids = torch.from_numpy(self.tables[row].astype(np.int64)).to(self.pool.device)
        ids_of = page_ids, page_ids if self.window is None else self.num_pages - page_ids
        pages = torch.stack(
            [
                torch.stack(self.pool.layer_kv(layer))[:, ids_of[has_window]]
                for layer, has_window in enumerate(self.layer_windows)
            ]
        )
        if pages.dtype == torch.int8:
            codes, scales = split_codes(pages)
            pages = torch.cat([codes, scales[..., None].contiguous().view(torch.int8)], -1)
        return pages.transpose(3, 4).flatten(2, 3)[:, :, :length].contiguous().view(torch.int8)


@dataclass(frozen=True)
class Piece:
    """A part of the sequence: one extend, or as many decode steps, beside `others` sequences of other lengths."""

    length: int
    is_decode: bool
    others: int


lengths = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 511, 512, 513]), st.integers(1, LENGTH))
pieces = st.builds(Piece, length=lengths, is_decode=st.booleans(), others=st.integers(0, NUM_ROWS - 1))


class Expected:
    """What single extends over empty rows give."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.logits = functools.cache(self._logits)
        self.logits(LENGTH)
        self.kv = self.engine.kv(0, LENGTH).clone()

    def _logits(self, length: int) -> torch.Tensor:
        row = 0 if length == LENGTH else 1
        return self.engine.forward({row: (0, IDS[:length])}, {})[0]


def assert_same_bits(engine: Engine, expected: Expected, cut: Sequence[Piece]) -> None:
    """The pieces of `cut`, and what is left as one extend, leave the KV and end with the logits that are expected."""
    end = 0
    for piece in [*cut, Piece(LENGTH, is_decode=False, others=0)]:
        start, end = end, min(end + piece.length, LENGTH)
        if piece.is_decode:
            end = min(start + piece.length, start + 20, LENGTH)
            steps = [({}, {0: at}) for at in range(start, end)]
        else:
            steps = [({0: (start, IDS[start:end])}, {})] if end > start else []
        for extends, decodes in steps:
            others = range(1, 1 + piece.others)
            extends |= {row: (0, IDS[: 9 * row]) for row in others if row % 2}
            decodes = {row: 70 * row for row in others if row % 2 == 0} | decodes
            logits = engine.forward(extends, decodes)[0 if 0 in extends else -1]
        if end > start:
            assert torch.equal(logits, expected.logits(end)), (start, end)
            assert torch.equal(logprobs(logits[None]), logprobs(logits.expand(3, -1))[:1])
    assert torch.equal(engine.kv(0, LENGTH), expected.kv)


class Native:
    """A model, and the compiler's flags of the kernels that compute it. Three threads pack its weights, once."""

    def __init__(
        self, folder: Path, flags: Sequence[str], options: ModelOptions, kv_dtype: torch.dtype
    ) -> None:
        self.flags, self.kv_dtype = flags, kv_dtype
        self.folder = folder
        self.config = resolve_quantization(options, load_model_config(folder))
        self._packed = self.packed(num_threads=3)
        self._packed.team.close()

    def packed(self, num_threads: int) -> NativeModel:
        """The model with weights that so many threads have packed, which are there to compute with it."""
        return native_model(self.folder, self.config, num_threads, self.flags)

    def engine(self, num_threads: int, page_size: int) -> Engine:
        team = Team(load_library(*self.flags), [-1] * num_threads)
        model = replace(self._packed, team=team)
        return Engine(self.config, model, page_size, CPU, self.kv_dtype, has_windows=True)


OF_EACH_KIND = (
    *("qwen3", "gptoss-mxfp4", "llama-w8a8-kv-int8", "gemma3-int4", "mixtral-gptq"),
    "qwen3-gptq-weight-only",
)
"""Models that have every kind of layer and of page between them."""
CASES = [
    *(("as-built", name) for name in (*MODELS, *QUANTIZED)),
    *((build, name) for build in ("emulated-amx", "plain-avx512", "avx2") for name in OF_EACH_KIND),
]
"""tests/kernels/cpu has each kernel in each build."""


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def native(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Native:
    build, name = request.param
    kv_dtype = torch.int8 if name.endswith("kv-int8") else torch.bfloat16
    options = ModelOptions(
        quantization="int4" if name.endswith("int4") else None,
        weight_only_quantization=name.endswith("weight-only"),
    )
    try:
        return Native(folders[name], BUILDS[build], options, kv_dtype)
    except NativeUnavailable as reason:
        pytest.skip(f"NO NATIVE KERNELS: {reason}")


@pytest.fixture(scope="module")
def expected(native: Native) -> Iterator[Expected]:
    model = native.packed(num_threads=1)
    with closing(Engine(native.config, model, 16, CPU, native.kv_dtype)) as engine:
        yield Expected(engine)


cuts = st.lists(pieces, max_size=6)


def test_every_cut_gives_the_same_bits(native: Native, expected: Expected) -> None:
    @given(cut=cuts, num_threads=st.integers(1, 3), page_size=st.sampled_from([1, 16, 48]))
    @settings(max_examples=3 if native.flags == BUILDS["emulated-amx"] else 10)  # emulation takes its time
    def check(cut: list[Piece], num_threads: int, page_size: int) -> None:
        with closing(native.engine(num_threads, page_size)) as engine:
            assert_same_bits(engine, expected, cut)

    check()


def logprobs(logits_SV: torch.Tensor) -> torch.Tensor:
    """What a sequence that samples is told of its tokens."""
    num = len(logits_SV)
    inputs = LogprobInputs(
        rows_N=np.arange(num),
        targets_N=None,
        token_ids_NM=np.zeros((num, 1), dtype=np.int64),
        top_num=5,
        shares=(LogprobShare(0, num, 5, 1),),
    )
    on_device = inputs.map(lambda array: torch.from_numpy(array).to(logits_SV.device))
    return RawLogprobs.of(logits_SV, on_device).gather(logits_SV.argmax(dim=1)).top_NK
