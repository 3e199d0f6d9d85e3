"""From flags to a loaded engine: model, KV pool, ledger, forward stream."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from shared import log
from shared.config import CacheOptions, ModelOptions, NodeConfig
from shared.cpu_cores import CpuCores, own_cores
from shared.engine.backends import OnProgress, load_model
from shared.engine.forward_stream import ForwardStream, make_forward_stream
from shared.engine.model_runner import ModelRunner
from shared.engine.profiler import Profiler
from shared.engine.progress import Progress
from shared.errors import ConfigError, RequestError
from shared.grammar.backend import GrammarBackend
from shared.grammar.compile_pool import CompilePool
from shared.kernels.cpu.build import NativeUnavailable, missing_cxx
from shared.kernels.cpu.pages import NativePageMover
from shared.kvcache.allocator import PageAllocator
from shared.kvcache.host_pages import HostPages
from shared.kvcache.host_pool import HostKVPool, make_host_pool
from shared.kvcache.ledger import KVLedger
from shared.kvcache.page_mover import NumpyPageMover, PageMover
from shared.kvcache.pools import ReqToTokenPool, TokenToKVPool
from shared.kvcache.radix_cache import RadixCache
from shared.model.config import ModelConfig, load_model_config
from shared.model.files import resolve_model
from shared.protocol.messages import KVLayout, NodeLimits
from shared.timeline import Clock

HOST_KV_CAP_BYTES = 4 << 30
"""Largest host pool for retracted requests that is chosen by itself."""
CPU_KV_CAP_BYTES = 2 << 30
"""Largest KV pool that is chosen by itself on a CPU, where other processes share the memory."""
FINGERPRINT_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A loaded model with its KV pool: what a scheduler is built from. It outlives the scheduler, and its role."""

    model_config: ModelConfig
    pool: TokenToKVPool
    ledger: KVLedger
    stream: ForwardStream
    layout: KVLayout
    limits: NodeLimits
    progress: Progress
    attention_backend: str
    """The name of the one that was chosen."""
    eos_token_ids: frozenset[int]
    profiler: Profiler
    cpu_cores: CpuCores
    grammars: CompilePool = field(default_factory=lambda: CompilePool(no_grammars))
    clock: Clock = time.monotonic
    """Of deadlines and measurements. No decision reads it."""
    cpu_clock: Clock = time.thread_time
    """CPU time of the calling thread: of the measurements that bound what following a grammar may cost."""

    def close(self) -> None:
        """Finish what was launched and end the engine's threads. A scheduler that uses it is closed before."""
        self.stream.close()
        self.grammars.close()
        self.profiler.close()


def build_engine(config: NodeConfig, on_progress: OnProgress) -> Engine:
    """Load the model and size the pools. Raises ConfigError (ModelError for the model's folder)."""
    folder = resolve_model(config.model.model)
    model_config = load_model_config(folder)
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model, model_config, device)
    context_length = resolve_context_length(config.model, model_config)
    cpu_cores = config.model.cpu_cores or own_cores()
    torch.set_num_threads(cpu_cores.num_threads)
    with _memory_of(device, "the model"):
        model = load_model(
            config.model.attention_backend,
            folder,
            model_config,
            dtype=dtype,
            device=device,
            cores=cpu_cores.team,
            on_progress=on_progress,
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
            mover=_page_mover(config.model.attention_backend),
        )
    limits = NodeLimits(
        context_length=context_length,
        max_total_num_tokens=num_pages * config.cache.page_size,
        max_running_requests=max_rows,
    )
    progress = Progress()
    page_nbytes = pool.gather_nbytes(1, pool.num_layers)
    num_host_pages = resolve_num_host_pages(config, num_pages, page_nbytes, device)
    host_pool = new_host_pool(pool, num_host_pages)
    ledger = make_ledger(
        num_pages + 1, config.cache, max_rows, context_length, HostPages(num_host_pages, page_nbytes)
    )
    profiler = Profiler(config.profile_dir, config.net.node_id or "node")
    backend = model.bind(pool, progress)
    stream_cores = cpu_cores.pinned
    if backend.has_threads:
        stream_cores = stream_cores[:1]
        torch.set_num_threads(1)  # what is left to torch between two native calls is not worth more
    runner = ModelRunner(backend, max_rows, device, profiler.span)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the forward stream does not wait for the stream that made all this
    ignored = missing_cxx() if backend.name == "native" else None
    log.event(
        "engine_ready",
        model=config.model.model,
        device=device,
        dtype=dtype_name(dtype),
        attention_backend=f"{backend.name} ({ignored})" if ignored else backend.name,
        page_mover=pool.mover.name,
        context_length=context_length,
        max_total_num_tokens=limits.max_total_num_tokens,
        page_size=config.cache.page_size,
        kv_mib=round(pool.buffer_LSNHPD.nbytes / 2**20),
        host_kv_mib=round(num_host_pages * page_nbytes / 2**20),
        cpu_cores=cpu_cores,
    )
    return Engine(
        model_config=model_config,
        pool=pool,
        ledger=ledger,
        stream=make_forward_stream(runner, host_pool, stream_cores),
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
        attention_backend=backend.name,
        profiler=profiler,
        cpu_cores=cpu_cores,
        grammars=CompilePool(make_grammar_backend(config.schedule.grammar_backend, folder, model_config)),
        eos_token_ids=frozenset(model_config.eos_token_ids),
    )


def _page_mover(attention_backend: str) -> PageMover:
    if attention_backend in ("auto", "native"):
        try:
            return NativePageMover()
        except NativeUnavailable as error:
            log.event("native_page_mover_unavailable", reason=error)
    return NumpyPageMover()


def no_grammars() -> GrammarBackend:
    """The backend `none`: every request with a grammar is refused with a RequestError."""
    raise RequestError("this node follows no grammars (--grammar-backend none)")


def make_grammar_backend(name: str, folder: Path, model: ModelConfig) -> Callable[[], GrammarBackend]:
    """What makes the backend `name` for the model in `folder`, when the first grammar comes."""

    def load_xgrammar() -> GrammarBackend:
        from shared.grammar.xgrammar_backend import XGrammarBackend  # a second, and only grammars need it

        return XGrammarBackend.load(folder, model.vocab_size, model.eos_token_ids)

    return {"xgrammar": load_xgrammar, "none": no_grammars}[name]


@contextmanager
def _memory_of(device: torch.device, what: str) -> Iterator[None]:
    """Turn "out of memory" into a ConfigError that says what did not fit."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise ConfigError(
            f"{what} does not fit into the memory of {device}: lower --mem-fraction-static or --max-total-tokens "
            "(nodes that share a GPU share its memory)"
        ) from error


def new_host_pool(pool: TokenToKVPool, num_host_pages: int) -> HostKVPool | None:
    """Host memory for retracted requests. Raises ConfigError when there is not so much of it."""
    nbytes = num_host_pages * pool.gather_nbytes(1, pool.num_layers)
    have = _whole_memory(torch.device("cpu"))
    try:
        if nbytes > have:
            raise MemoryError
        return make_host_pool(pool, num_host_pages)
    except (MemoryError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"--host-kv-tokens {num_host_pages * pool.page_size}: {nbytes} bytes of host memory cannot be had "
            f"(this machine has {have}); choose fewer"
        ) from error


def make_ledger(
    num_pages: int,
    options: CacheOptions,
    num_rows: int,
    context_length: int,
    host: HostPages | None = None,
) -> KVLedger:
    """The KV ledger over `num_pages` pages (the scratch page included)."""
    rows = ReqToTokenPool(num_rows, context_length, options.page_size)
    return KVLedger(
        PageAllocator(num_pages),
        rows,
        RadixCache(options.page_size),
        keep_prefixes=not options.disable_radix_cache,
        host=host,
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

    Raises ConfigError for less than two pages, and for more than the device's memory.
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
        if num_pages * page_nbytes > (have := _whole_memory(device)):
            raise ConfigError(
                f"--max-total-tokens {options.max_total_tokens}: {num_pages * page_nbytes} bytes of KV do not fit "
                f"into the memory of {device}, which has {have}; choose fewer"
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


def _whole_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def resolve_num_host_pages(config: NodeConfig, num_pages: int, page_nbytes: int, device: torch.device) -> int:
    """Pages of the host pool: from --host-kv-tokens, or as many as the KV pool has, within a cap.

    On a CPU the KV pool is in host memory already, and a larger one serves better than a second one: there it is
    none by itself. Raises ConfigError when --retract-policy host is left without a page.
    """
    policy, tokens = config.schedule.retract_policy, config.cache.host_kv_tokens
    if policy == "recompute":
        if tokens:
            raise ConfigError(
                f"--host-kv-tokens {tokens}: --retract-policy recompute copies nothing to the host"
            )
        return 0
    if tokens is None:
        by_itself = device.type == "cuda" or policy == "host"
        return min(num_pages, max(HOST_KV_CAP_BYTES // page_nbytes, 1)) if by_itself else 0
    if policy == "host" and tokens < config.cache.page_size:
        raise ConfigError(
            f"--host-kv-tokens {tokens}: --retract-policy host needs at least one page of "
            f"{config.cache.page_size} tokens (--page-size)"
        )
    return tokens // config.cache.page_size


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
