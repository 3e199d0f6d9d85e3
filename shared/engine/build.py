"""From options to a loaded engine: model, KV pool, ledger, forward stream. `start` has what a GPU adds."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shared import log
from shared.config import CacheOptions, NodeConfig
from shared.cpu_cores import CpuCores, own_cores
from shared.cuda_streams import synchronize
from shared.device_threads import DeviceThreads
from shared.engine.backends import load_model
from shared.engine.device_share import BoundModel, DeviceShare, OnProgress, device_share, host_memory
from shared.engine.engine_shape import EngineShape
from shared.engine.forward_stream import ForwardStream, make_forward_stream
from shared.engine.model_runner import ModelRunner
from shared.engine.model_worker_batch import Snapshot, snapshot
from shared.engine.profiler import Profiler
from shared.engine.progress import Progress
from shared.engine.resolve import (
    dtype_name,
    fingerprint,
    resolve_num_host_pages,
)
from shared.errors import ConfigError, RequestError
from shared.grammar.backend import GrammarBackend
from shared.grammar.compile_pool import CompilePool
from shared.kernels.cpu.build import NativeUnavailable, invalid_cxx
from shared.kernels.cpu.pages import NativePageMover
from shared.kvcache.allocator import HostPages, PageAllocator
from shared.kvcache.host_pool import HostKVPool, make_host_pool
from shared.kvcache.ledger import KVLedger
from shared.kvcache.page_mover import PageMover
from shared.kvcache.pools import ReqToTokenPool, TokenToKVPool
from shared.kvcache.radix_cache import RadixCache
from shared.kvcache.windowed_pool import AnyKVPool, WindowedKVPool
from shared.kvcache.windows import WindowPages
from shared.model.checkpoint import Checkpoint
from shared.model.config import ModelConfig, load_model_config
from shared.model.dummy_weights import DummyWeights
from shared.model.files import resolve_model
from shared.protocol.messages import KVLayout, NodeLimits
from shared.timeline import Clock

MIN_CORES_TO_SPIN = 4
"""With fewer cores, a scheduler that spins until the GPU is done would take the core that data threads need."""
ShareOf = Callable[[EngineShape, OnProgress], DeviceShare]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A loaded model with its KV pool: what a scheduler is built from. It outlives the scheduler, and its role."""

    model_config: ModelConfig
    pool: AnyKVPool
    ledger: KVLedger
    stream: ForwardStream
    layout: KVLayout
    limits: NodeLimits
    progress: Progress
    attention_backend: str
    """The name of the one that was chosen."""
    is_exact: bool
    """Whether it is (`ModelBackend.is_exact`)."""
    eos_token_ids: frozenset[int]
    profiler: Profiler
    cpu_cores: CpuCores
    share: DeviceShare | None = None
    """Of the device's memory; None for an engine that a test has put together."""
    grammars: CompilePool = field(default_factory=lambda: CompilePool(no_grammars))
    snapshot: Snapshot = snapshot
    """What the stream takes of a decision."""
    clock: Clock = time.monotonic
    """Of deadlines and measurements. No decision reads it."""
    stamp_clock: Clock = time.time
    """Of the stages of requests, which routers and clients are told."""
    cpu_clock: Clock = time.thread_time
    """CPU time of the calling thread: of the measurements that bound what following a grammar may cost."""

    def close(self) -> None:
        """Finish what was launched and end the engine's threads. A scheduler that uses it is closed before."""
        self.stream.close()
        self.grammars.close()
        self.profiler.close()
        if self.share is not None:
            self.share.close()


def build_engine(
    config: NodeConfig, on_progress: OnProgress, *, decodes: bool = True, share_of: ShareOf = device_share
) -> Engine:
    """Load the model, measure, size the KV pool, bind, warm up, test (ADR 32). The calling thread will schedule.

    `decodes` is False for a node that never runs a decode step, and so retracts nothing to host memory. Raises
    ConfigError (ModelError for the folder).
    """
    folder = resolve_model(config.model.model, with_weights=False)
    shape = EngineShape.of(config, load_model_config(folder), decodes)
    device = shape.device
    DeviceThreads.of(device).enter()
    cpu_cores = config.model.cpu_cores or own_cores()
    torch.set_num_threads(cpu_cores.num_threads)
    progress, profiler = Progress(), Profiler(config.profile_dir, config.net.node_id or "node")
    seed = config.schedule.random_seed if config.model.load_format == "dummy" else None
    with ExitStack() as undo:
        share = share_of(shape, on_progress)
        undo.callback(share.close)
        if seed is None:  # weights are downloaded when it is known that they fit
            folder = resolve_model(config.model.model)
        with share.alone():
            share.await_room()
            begun = time.monotonic()
            with _memory_of(device, "the model"):
                model = load_model(
                    config.model.attention_backend,
                    Checkpoint(folder) if seed is None else DummyWeights(seed, device),
                    shape.model,
                    dtype=shape.dtype,
                    device=device,
                    cores=cpu_cores.team,
                    on_progress=on_progress,
                    exact=config.model.exact,
                    cuda_graph_max_bs=None
                    if config.model.disable_cuda_graph
                    else config.model.cuda_graph_max_bs,
                )

            load_s = round(time.monotonic() - begun, 2)

            def bind(num_pages: int, num_host_pages: int = 0) -> BoundModel:
                with _memory_of(device, "the KV pool with the workspace of attention"):
                    pool = _new_pool(shape, num_pages, new_page_mover(config.model.attention_backend, device))
                    backend = model.bind(pool, progress, shape.forward_limits)
                host_pool = new_host_pool(pool, num_host_pages)
                cores = cpu_cores.pinned
                if backend.has_threads:
                    cores = cores[:1]
                    torch.set_num_threads(
                        1
                    )  # what is left to torch between two native calls is not worth more
                runner = ModelRunner(backend, shape.num_rows, device, profiler.span)
                synchronize(device)  # the forward stream does not wait for the stream that made all this
                sleeps = cpu_cores.num_threads < MIN_CORES_TO_SPIN
                stream = make_forward_stream(runner, host_pool, cores, sleeps=sleeps)
                return BoundModel(pool, backend, runner, stream)

            share.measure(bind)
            on_progress("allocating KV pages", 1.0)
            num_pages = share.num_pages()
            num_host_pages = (
                resolve_num_host_pages(config, num_pages, shape.page_nbytes, device) if decodes else 0
            )
            bound = bind(num_pages, num_host_pages)
            share.warm_up(bound)
        undo.pop_all()
    backend, pool = bound.backend, bound.pool
    quantized = "" if shape.model.quantization is None else shape.model.quantization.name
    limits = NodeLimits(
        context_length=shape.context_length,
        max_total_num_tokens=num_pages * config.cache.page_size,
        max_running_requests=shape.num_rows,
    )
    ignored = invalid_cxx() if backend.name == "native" else None
    log.event(
        "engine_ready",
        model=config.model.model,
        device=device,
        dtype=dtype_name(shape.dtype),
        kv_cache_dtype=dtype_name(shape.kv_dtype),
        quantization=quantized or None,
        load_s=load_s,
        attention_backend=f"{backend.name} ({ignored})" if ignored else backend.name,
        numerics=backend.numerics,
        page_mover=pool.mover.name,
        context_length=shape.context_length,
        max_total_num_tokens=limits.max_total_num_tokens,
        page_size=config.cache.page_size,
        host_kv_mib=round(num_host_pages * shape.page_nbytes / 2**20),
        cpu_cores=cpu_cores,
        **{"kv_mib": round(pool.nbytes / 2**20), **share.memory_mib},
    )
    return Engine(
        model_config=shape.model,
        pool=pool,
        ledger=make_ledger(
            num_pages + 1,
            config.cache,
            shape.num_rows,
            shape.context_length,
            HostPages(num_host_pages, shape.page_nbytes),
            windows=new_windows(shape, num_pages),
        ),
        stream=bound.stream,
        layout=KVLayout(
            fingerprint=fingerprint(folder, seed),
            dtype=dtype_name(shape.dtype),
            page_size=config.cache.page_size,
            num_layers=shape.model.num_layers,
            num_kv_heads=shape.model.num_kv_heads,
            head_dim=shape.model.head_dim,
            numerics=f"{backend.numerics}/{dtype_name(shape.dtype)}{shape.model.context_name}",
            quantization=quantized,
            windows=() if shape.window is None else tuple(window or 0 for window in shape.model.windows),
            kv_cache_dtype="" if shape.kv_dtype == shape.dtype else dtype_name(shape.kv_dtype),
        ),
        limits=limits,
        progress=progress,
        attention_backend=backend.name,
        is_exact=backend.is_exact,
        profiler=profiler,
        cpu_cores=cpu_cores,
        share=share,
        grammars=CompilePool(make_grammar_backend(config.schedule.grammar_backend, folder, shape.model)),
        eos_token_ids=frozenset(shape.model.eos_token_ids),
    )


def _new_pool(shape: EngineShape, num_pages: int, mover: PageMover | None) -> AnyKVPool:
    """A pool of `num_pages` pages and the scratch page, and of window pages if layers with windows have their own."""

    def pool_of(num_pages: int, num_layers: int) -> TokenToKVPool:
        return TokenToKVPool(
            num_pages=num_pages + 1,
            page_size=shape.cache.page_size,
            num_layers=num_layers,
            num_kv_heads=shape.model.num_kv_heads,
            head_dim=shape.model.head_dim,
            dtype=shape.kv_dtype,
            device=shape.device,
            mover=mover,
        )

    if shape.window is None:
        return pool_of(num_pages, shape.model.num_layers)
    has_window = tuple(window is not None for window in shape.model.windows)
    full = pool_of(num_pages, has_window.count(False))
    return WindowedKVPool(full, pool_of(shape.num_window_pages(num_pages), sum(has_window)), has_window)


def new_windows(shape: EngineShape, num_pages: int) -> WindowPages | None:
    """What says which page has which window page. None where all layers share one pool."""
    if shape.window is None:
        return None
    num_window_pages = shape.num_window_pages(num_pages)
    return WindowPages(num_pages + 1, num_window_pages + 1, shape.window, shape.cache.page_size)


def new_page_mover(attention_backend: str, device: torch.device) -> PageMover | None:
    """The fastest that can be had for KV pages on `device`. None: the one of torch that a pool takes by itself."""
    if device.type == "cuda":
        return _triton_page_mover(device) if attention_backend in ("auto", "triton") else None
    if attention_backend in ("auto", "native"):
        try:
            return NativePageMover()
        except NativeUnavailable as error:
            log.event("native_page_mover_unavailable", reason=error)
    return None


def _triton_page_mover(device: torch.device) -> PageMover | None:
    try:
        from shared.kernels.triton.pages import TritonPageMover  # CPUs do without Triton
    except ImportError as error:
        log.event("triton_page_mover_unavailable", reason=error)
        return None
    return TritonPageMover(device)


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


def new_host_pool(pool: AnyKVPool, num_host_pages: int) -> HostKVPool | None:
    """Host memory for retracted requests. Raises ConfigError when there is not so much of it."""
    nbytes = num_host_pages * pool.gather_nbytes(1, pool.num_layers)
    have = host_memory()
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
    windows: WindowPages | None = None,
) -> KVLedger:
    """The KV ledger over `num_pages` pages (the scratch page included), and over window pages if there are any."""
    rows = ReqToTokenPool(num_rows, context_length, options.page_size)
    return KVLedger(
        PageAllocator(num_pages),
        rows,
        RadixCache(options.page_size, windows=windows),
        keep_prefixes=not options.disable_radix_cache,
        host=host,
        windows=windows,
    )
