"""Flags to sizes: what is chosen by itself, and refusals that name the flag."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.cpu_cores import CpuCores
from shared.engine.build import build_engine, make_ledger, new_page_mover, new_windows
from shared.engine.device_share import CPU_KV_CAP_BYTES, HostShare
from shared.engine.engine_shape import EngineShape
from shared.engine.forward_stream import CpuForwardStream
from shared.engine.resolve import (
    FINGERPRINT_BLOCK_NBYTES,
    FINGERPRINT_BLOCKS,
    fingerprint,
    resolve_context_length,
    resolve_device,
    resolve_dtype,
    resolve_schedule,
)
from shared.errors import ConfigError
from shared.kernels.triton.pages import TritonPageMover
from tests.modelzoo import make_model
from tests.token_engine import token_model_config

CPU = torch.device("cpu")
MODEL = token_model_config()  # one layer, one KV head of 8: 64 bytes a token in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2", num_hidden_layers=2)


class TestDevice:
    def test_auto_is_what_torch_sees(self) -> None:
        assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
        assert resolve_device("cpu") == CPU

    @pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "mps", "meta"])
    def test_others_are_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"--device {name}"):
            resolve_device(name)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
    def test_cuda_without_a_gpu(self) -> None:
        with pytest.raises(ConfigError, match="--device cuda:1"):
            resolve_device("cuda:1")


class TestPageMover:
    def test_pages_on_a_gpu_are_never_given_to_the_cpu(self) -> None:
        gpu = torch.device("cuda")
        assert isinstance(new_page_mover("auto", gpu), TritonPageMover)
        assert isinstance(new_page_mover("triton", gpu), TritonPageMover)
        assert new_page_mover("torch", gpu) is None, "the pool takes torch's"

    def test_pages_on_a_cpu(self) -> None:
        assert new_page_mover("torch", CPU) is None


class TestDtype:
    @pytest.mark.parametrize(
        ("flag", "checkpoint", "device", "expected"),
        [
            ("auto", "bfloat16", "cpu", torch.bfloat16),
            ("auto", "float32", "cpu", torch.float32),
            ("auto", "float16", "cpu", torch.bfloat16),
            ("auto", "float16", "cuda", torch.float16),
            ("float16", "float32", "cpu", torch.float16),
            ("float32", "bfloat16", "cuda", torch.float32),
        ],
    )
    def test_choice(self, flag: str, checkpoint: str, device: str, expected: torch.dtype) -> None:
        model = replace(MODEL, dtype=checkpoint)
        assert resolve_dtype(ModelOptions(dtype=flag), model, torch.device(device)) is expected


class TestContextLength:
    def test_the_model_s_own_or_shorter(self) -> None:
        assert resolve_context_length(ModelOptions(), MODEL) == 4096
        assert resolve_context_length(ModelOptions(context_length=4096), MODEL) == 4096
        assert resolve_context_length(ModelOptions(context_length=1), MODEL) == 1

    def test_longer_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"--context-length 4097: .*4096"):
            resolve_context_length(ModelOptions(context_length=4097), MODEL)


class TestNumPages:
    """The KV pool of a CPU node. A GPU's is in start/test_gpu_share.py."""

    @staticmethod
    def num_pages(options: CacheOptions, useful_tokens: int = 1 << 40) -> int:
        shape = EngineShape(
            name="tiny",
            model=MODEL,
            dtype=torch.float32,
            device=CPU,
            cache=options,
            schedule=ScheduleOptions(max_running_requests=1),
            context_length=useful_tokens,
            decodes=True,
        )
        return HostShare(shape).num_pages()

    def test_from_max_total_tokens_rounded_down(self) -> None:
        assert self.num_pages(CacheOptions(page_size=16, max_total_tokens=100), 10) == 6

    def test_too_few_tokens(self) -> None:
        with pytest.raises(ConfigError, match="--max-total-tokens 31"):
            self.num_pages(CacheOptions(page_size=16, max_total_tokens=31))
        assert self.num_pages(CacheOptions(page_size=16, max_total_tokens=32)) == 2

    def test_more_tokens_than_memory(self) -> None:
        with pytest.raises(ConfigError, match=r"--max-total-tokens 999999999999: \d+ bytes"):
            self.num_pages(CacheOptions(max_total_tokens=999_999_999_999))

    def test_no_more_than_is_useful(self) -> None:
        assert self.num_pages(CacheOptions(page_size=16), 1000) == 63

    def test_free_memory_is_capped_on_a_cpu(self) -> None:
        num_pages = self.num_pages(CacheOptions(page_size=16, mem_fraction_static=0.99))
        assert 2 <= num_pages <= CPU_KV_CAP_BYTES // (16 * 64)

    def test_a_smaller_share_is_fewer_pages(self) -> None:
        pages = [self.num_pages(CacheOptions(mem_fraction_static=f)) for f in (0.001, 0.0001)]
        assert pages[0] > pages[1]

    def test_no_room(self) -> None:
        with pytest.raises(ConfigError, match=r"--mem-fraction-static 1e-12 .*--page-size"):
            self.num_pages(CacheOptions(mem_fraction_static=1e-12))

    def test_weights_that_are_larger_than_all_memory_are_refused_unread(self, tmp_path: Path) -> None:
        vast = token_model_config(hidden_size=1 << 20, intermediate_size=1 << 22)
        shape = EngineShape(
            name="vast",
            model=vast,
            dtype=torch.float32,
            device=CPU,
            cache=CacheOptions(),
            schedule=ScheduleOptions(),
            context_length=1,
            decodes=True,
        )
        with pytest.raises(ConfigError, match=r"weights .* \d+\.\d\d GiB"):
            HostShare(shape).await_room()


def test_the_ledger_has_the_sizes_that_were_asked_for() -> None:
    ledger = make_ledger(11, CacheOptions(page_size=8, disable_radix_cache=True), 3, 100)
    assert ledger.count().total == 10
    assert (ledger.rows.num_rows, ledger.rows.pages.shape[1]) == (3, 13)
    assert not ledger.keep_prefixes


class TestBuildEngine:
    def test_from_flags_to_engine(self, folder: Path) -> None:
        config = NodeConfig(
            model=ModelOptions(model=str(folder), device="cpu", context_length=100, cpu_cores=CpuCores(1)),
            cache=CacheOptions(page_size=8, max_total_tokens=800),
            schedule=ScheduleOptions(max_running_requests=7),
        )
        progress: list[tuple[str, float]] = []
        engine = build_engine(config, lambda what, fraction: progress.append((what, fraction)))
        assert isinstance(engine.stream, CpuForwardStream)
        engine.stream.close()
        assert (engine.limits.context_length, engine.limits.max_total_num_tokens) == (100, 800)
        assert engine.limits.max_running_requests == engine.ledger.rows.num_rows == 7
        assert engine.ledger.count().total == 100
        assert engine.pool.num_pages == 101, "the scratch page comes on top"
        layout = engine.layout
        assert (layout.dtype, layout.page_size, layout.num_layers) == ("float32", 8, 2)
        assert (layout.num_kv_heads, layout.head_dim) == (2, 16)
        assert layout.fingerprint == fingerprint(folder)
        assert engine.eos_token_ids == {0, 2}
        assert progress[0] == ("loading weights", 0.0)
        assert progress[-1] == ("allocating KV pages", 1.0)

    def test_nodes_with_other_rotary_frequencies_have_other_numerics(self, tmp_path: Path) -> None:
        model = make_model(tmp_path, "phi3", num_hidden_layers=1, original_max_position_embeddings=64)
        for context_length, ending in ((64, "/float32/rope-short"), (None, "/float32/rope-long")):
            config = NodeConfig(
                model=ModelOptions(
                    model=str(model), device="cpu", context_length=context_length, cpu_cores=CpuCores(1)
                ),
                cache=CacheOptions(max_total_tokens=800),
            )
            engine = build_engine(config, lambda what, fraction: None)
            engine.close()
            assert engine.layout.numerics.endswith(ending)

    def test_kv_of_int8(self, folder: Path) -> None:
        config = NodeConfig(
            model=ModelOptions(model=str(folder), device="cpu", cpu_cores=CpuCores(1)),
            cache=CacheOptions(page_size=8, max_total_tokens=800, kv_cache_dtype="int8"),
        )
        engine = build_engine(config, lambda what, fraction: None)
        engine.close()
        assert (engine.layout.dtype, engine.layout.kv_cache_dtype) == ("float32", "int8")
        page_nbytes = EngineShape.of(config, engine.model_config, decodes=True).page_nbytes
        assert engine.ledger.host.page_nbytes == page_nbytes
        assert page_nbytes == 8 * engine.layout.nbytes_per_token == engine.pool.buffer_LSNHPD.nbytes // 101
        with pytest.raises(ConfigError, match="heads of 18"):
            EngineShape.of(config, replace(engine.model_config, head_dim=18), decodes=True)
        config = replace(config, cache=replace(config.cache, kv_cache_dtype="fp8"))
        with pytest.raises(ConfigError, match="fp8"):
            EngineShape.of(config, engine.model_config, decodes=True)

    @pytest.mark.parametrize(("decodes", "num_host_pages"), [(True, 5), (False, 0)])
    def test_a_node_that_never_decodes_has_no_host_pages(
        self, folder: Path, decodes: bool, num_host_pages: int
    ) -> None:
        config = NodeConfig(
            model=ModelOptions(model=str(folder), device="cpu", cpu_cores=CpuCores(1)),
            cache=CacheOptions(page_size=8, max_total_tokens=800, host_kv_tokens=40),
        )
        engine = build_engine(config, lambda what, fraction: None, decodes=decodes)
        assert engine.ledger.host.num_pages == num_host_pages
        engine.close()

    def test_dummy_weights_need_a_config_alone(self, folder: Path, tmp_path: Path) -> None:
        """Nodes of one seed may exchange pages, those of two may not."""
        shutil.copy(folder / "config.json", tmp_path)
        found = []
        for seed in (1, 1, 2):
            config = NodeConfig(
                model=ModelOptions(
                    model=str(tmp_path), device="cpu", load_format="dummy", cpu_cores=CpuCores(1)
                ),
                cache=CacheOptions(page_size=8, max_total_tokens=800),
                schedule=ScheduleOptions(random_seed=seed),
            )
            engine = build_engine(config, lambda what, fraction: None)
            found.append(engine.layout)
            engine.close()
        assert found[0] == found[1]
        assert found[0].fingerprint != found[2].fingerprint
        assert found[0].fingerprint != fingerprint(folder)

    def test_a_folder_that_is_no_model(self, tmp_path: Path) -> None:
        config = NodeConfig(model=ModelOptions(model=str(tmp_path), device="cpu"))
        with pytest.raises(ConfigError, match=r"config\.json"):
            build_engine(config, lambda what, fraction: None)


FILE_NBYTES = 3 * FINGERPRINT_BLOCKS * FINGERPRINT_BLOCK_NBYTES
TENSOR = b"\1" * (FILE_NBYTES // (FINGERPRINT_BLOCKS - 1))
"""The smallest of which every place in the file is noticed."""


class TestFingerprint:
    def test_equal_folders_have_equal_fingerprints(self, tmp_path: Path) -> None:
        assert fingerprint(checkpoint(tmp_path / "a")) == fingerprint(checkpoint(tmp_path / "b"))

    @pytest.mark.parametrize(
        "change",
        [
            lambda f: (f / "config.json").write_text('{"x": 2}'),
            lambda f: overwrite(f / "a.safetensors", 0),
            lambda f: overwrite(f / "a.safetensors", -1),
            lambda f: overwrite(f / "a.safetensors", FILE_NBYTES // 3, TENSOR),
            lambda f: (f / "a.safetensors").write_bytes((f / "a.safetensors").read_bytes() + b"\0"),
            lambda f: (f / "a.safetensors").rename(f / "b.safetensors"),
            lambda f: (f / "b.safetensors").write_bytes(b""),
        ],
        ids=["config", "first byte", "last byte", "a tensor", "length", "name", "another file"],
    )
    def test_any_of_these_is_another_checkpoint(
        self, tmp_path: Path, change: Callable[[Path], object]
    ) -> None:
        folder = checkpoint(tmp_path / "a")
        before = fingerprint(folder)
        change(folder)
        assert fingerprint(folder) != before

    def test_the_tokenizer_does_not_matter(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path / "a")
        before = fingerprint(folder)
        (folder / "tokenizer.json").write_text("{}")
        assert fingerprint(folder) == before


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"x": 1}')
    (folder / "a.safetensors").write_bytes(bytes(FILE_NBYTES))
    return folder


def overwrite(path: Path, at: int, new: bytes = b"\1") -> None:
    content = bytearray(path.read_bytes())
    content[at : at % len(content) + len(new)] = new
    path.write_bytes(content)


def test_a_chunk_follows_the_device_unless_the_flag_gives_it() -> None:
    """Options that nothing has resolved have the chunk of a CPU."""
    gpu, options = torch.device("cuda", 0), ScheduleOptions()
    assert [options.chunk_tokens, resolve_schedule(options, CPU).chunk_tokens] == [512, 512]
    assert resolve_schedule(options, gpu).chunked_prefill_size == 2048
    assert resolve_schedule(ScheduleOptions(chunked_prefill_size=64), gpu).chunk_tokens == 64


class TestWindows:
    @pytest.mark.parametrize("context_length", [8704, 32768])
    def test_a_pool_holds_three_times_as_many_streams(self, context_length: int) -> None:
        """Of Gemma-3-1b's shape (hf.co/google/gemma-3-1b-it), 8k tokens each, received as a decode node does."""
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "hidden_size": 1152}
        whole = token_model_config(**sizes, num_hidden_layers=26, max_position_embeddings=32768)
        layers = [
            layer if i % 6 == 5 else replace(layer, attention=replace(layer.attention, window=512))
            for i, layer in enumerate(whole.layers)
        ]
        num_streams = []
        for model in (whole, replace(whole, layers=tuple(layers))):
            shape = EngineShape(
                name="gemma",
                model=model,
                dtype=torch.bfloat16,
                device=CPU,
                cache=CacheOptions(page_size=16),
                schedule=ScheduleOptions(max_running_requests=64),
                context_length=context_length,
                decodes=True,
            )
            num_pages = shape.useful_pages(2 << 30)
            assert shape.kv_nbytes(num_pages) <= 2 << 30 < shape.kv_nbytes(num_pages + 1)
            num_streams.append(received(shape, num_pages, 8192))
        assert num_streams == [9, 34 if context_length == 8704 else 30]

    def test_no_more_window_pages_than_pages(self) -> None:
        model = token_model_config(max_position_embeddings=4096)
        layer = replace(model.layers[0], attention=replace(model.layers[0].attention, window=64))
        shape = EngineShape(
            name="m",
            model=replace(model, layers=(layer,)),
            dtype=torch.float32,
            device=CPU,
            cache=CacheOptions(page_size=16),
            schedule=ScheduleOptions(max_running_requests=4),
            context_length=4096,
            decodes=True,
        )
        assert shape.num_window_pages(100) == 100
        assert shape.num_window_pages(10_000) == 256 + 4 * (4 + 2)
        assert shape.useful_pages(1 << 30) == 4 * 256, "where all layers have windows, pages are names"


def received(shape: EngineShape, num_pages: int, num_tokens: int) -> int:
    """How many sequences of so many tokens find room for their KV."""
    windows = new_windows(shape, num_pages)
    ledger = make_ledger(num_pages + 1, shape.cache, 64, shape.context_length, windows=windows)
    while (kv := ledger.admit(ledger.match_prefix([0], ""), "")) is not None:
        ledger.slide(kv, num_tokens)
        if not ledger.grow_for_arrival(kv, num_tokens):
            break
        ledger.arrived(kv, num_tokens)
    return len(ledger.live) - 1
