"""From flags to a loaded engine: model, KV pool, ledger, forward stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from shared import log
from shared.config import CacheOptions, ModelOptions, NodeConfig
from shared.engine.attention import Progress
from shared.engine.forward_stream import ForwardStream, make_forward_stream
from shared.engine.model_runner import ModelRunner
from shared.errors import ConfigError
from shared.kvcache.allocator import PageAllocator
from shared.kvcache.ledger import KVLedger
from shared.kvcache.pools import ReqToTokenPool, TokenToKVPool
from shared.kvcache.radix_cache import RadixCache
from shared.model.config import ModelConfig, load_model_config
from shared.model.decoder import Decoder
from shared.model.files import resolve_model
from shared.protocol.messages import KVLayout, NodeLimits

CPU_KV_CAP_BYTES = 2 << 30
"""Largest KV pool that is chosen by itself on a CPU, where other processes share the memory."""
FINGERPRINT_SAMPLE_BYTES = 1 << 16

OnProgress = Callable[[str, float], None]
"""(what is being done, fraction done)"""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Everything a role's scheduler is built from."""

    model_config: ModelConfig
    pool: TokenToKVPool
    ledger: KVLedger
    stream: ForwardStream
    layout: KVLayout
    limits: NodeLimits
    progress: Progress
    eos_token_ids: frozenset[int]


def build_engine(config: NodeConfig, on_progress: OnProgress) -> Engine:
    """Load the model and size the pools. Raises ConfigError (ModelError for the model's folder)."""
    folder = resolve_model(config.model.model)
    model_config = load_model_config(folder)
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model, model_config, device)
    context_length = resolve_context_length(config.model, model_config)
    if config.model.cpu_threads is not None:
        torch.set_num_threads(config.model.cpu_threads)
    on_progress("loading weights", 0.0)
    with _memory_of(device, "the model"):
        decoder = Decoder.load(
            folder,
            model_config,
            dtype=dtype,
            device=device,
            on_progress=lambda f: on_progress("loading weights", f),
        )
    on_progress("allocating KV pages", 1.0)
    max_rows = config.schedule.max_running_requests
    num_pages = resolve_num_pages(config.cache, model_config, dtype, device, max_rows * context_length)
    with _memory_of(device, "the KV pool"):
        pool = TokenToKVPool(
            num_pages=num_pages + 1,
            page_size=config.cache.page_size,
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            dtype=dtype,
            device=device,
        )
    limits = NodeLimits(
        context_length=context_length,
        max_total_num_tokens=num_pages * config.cache.page_size,
        max_running_requests=max_rows,
    )
    progress = Progress()
    ledger = make_ledger(num_pages + 1, config.cache, max_rows, context_length)
    runner = ModelRunner(decoder, pool, max_rows, progress)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the forward stream does not wait for the stream that made all this
    log.event(
        "engine_ready",
        model=config.model.model,
        device=device,
        dtype=dtype_name(dtype),
        context_length=context_length,
        max_total_num_tokens=limits.max_total_num_tokens,
        page_size=config.cache.page_size,
        kv_mib=round(pool.buffer_LSNHPD.nbytes / 2**20),
        threads=torch.get_num_threads(),
    )
    return Engine(
        model_config=model_config,
        pool=pool,
        ledger=ledger,
        stream=make_forward_stream(runner),
        layout=KVLayout(
            fingerprint=fingerprint(folder),
            dtype=dtype_name(dtype),
            page_size=config.cache.page_size,
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
        ),
        limits=limits,
        progress=progress,
        eos_token_ids=frozenset(model_config.eos_token_ids),
    )


@contextmanager
def _memory_of(device: torch.device, what: str) -> Iterator[None]:
    """Turn "out of memory" into a ConfigError that says what did not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{what} does not fit into the memory of {device}: lower --mem-fraction-static or --max-total-tokens "
            "(nodes that share a GPU share its memory)"
        ) from error


def make_ledger(num_pages: int, options: CacheOptions, num_rows: int, context_length: int) -> KVLedger:
    """The KV ledger over `num_pages` pages (the scratch page included)."""
    rows = ReqToTokenPool(num_rows, context_length, options.page_size)
    return KVLedger(
        PageAllocator(num_pages),
        rows,
        RadixCache(options.page_size),
        keep_prefixes=not options.disable_radix_cache,
    )


def resolve_device(name: str) -> torch.device:
    """`auto` is a GPU if torch sees one. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: not a device; give auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: only cpu and cuda are supported")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch sees no GPU here")
    return device


def resolve_dtype(options: ModelOptions, model: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's type; float16 becomes bfloat16 on a CPU, whose kernels prefer it."""
    name = model.dtype if options.dtype == "auto" else options.dtype
    if options.dtype == "auto" and name == "float16" and device.type == "cpu":
        name = "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def resolve_context_length(options: ModelOptions, model: ModelConfig) -> int:
    """The model's own, or a shorter one. Raises ConfigError for a longer one."""
    if options.context_length is None:
        return model.context_length
    if options.context_length > model.context_length:
        raise ConfigError(
            f"--context-length {options.context_length}: the model was made for at most {model.context_length}"
        )
    return options.context_length


def resolve_num_pages(
    options: CacheOptions, model: ModelConfig, dtype: torch.dtype, device: torch.device, useful_tokens: int
) -> int:
    """Pages of the KV pool: from --max-total-tokens, or from the memory that is free once the weights are loaded.

    Raises ConfigError when not even two pages fit.
    """
    page_nbytes = (
        2 * model.num_layers * model.num_kv_heads * model.head_dim * options.page_size * dtype.itemsize
    )
    if options.max_total_tokens is not None:
        num_pages = options.max_total_tokens // options.page_size
        if num_pages < 2:
            raise ConfigError(
                f"--max-total-tokens {options.max_total_tokens}: at least two pages of {options.page_size} "
                "tokens are needed (--page-size)"
            )
        return num_pages
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_allocated(device)  # the weights; other nodes may share the GPU
        budget = min(int(total * options.mem_fraction_static) - own, free)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        budget = min(int(free * options.mem_fraction_static), CPU_KV_CAP_BYTES)
    num_pages = min(budget // page_nbytes, -(-useful_tokens // options.page_size))
    if num_pages < 2:
        raise ConfigError(
            f"--mem-fraction-static {options.mem_fraction_static} leaves {budget} bytes for KV on {device}, and a "
            f"page takes {page_nbytes}; raise it, or choose a smaller --page-size"
        )
    return num_pages


def fingerprint(folder: Path) -> str:
    """A digest that tells checkpoints apart without reading them whole: config, sizes, and both ends of each file."""
    digest = xxhash.xxh3_64((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(FINGERPRINT_SAMPLE_BYTES))
            file.seek(max(size - FINGERPRINT_SAMPLE_BYTES, 0))
            digest.update(file.read(FINGERPRINT_SAMPLE_BYTES))
    return digest.hexdigest()
