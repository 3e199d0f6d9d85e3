"""An engine whose forward stream, page copies and host pool are those of CUDA, over a FakeGpu.

Only the model is a stand-in: K holds the token ids themselves, and V their complements. So a page that is read before
it was written, or written after it was given away, shows in what a forward reads, or in the tokens that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from shared.config import NodeConfig
from shared.engine.build import Engine
from shared.engine.cuda.forward_stream import CudaForwardStream
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.engine.input_block import BlockShape, InputBlock
from shared.engine.model_runner import Forwarded, ModelRunner
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.penalties import Penalize, penalize
from shared.engine.sampling_inputs import SamplingInputs
from shared.engine.uploads import StartCopy
from shared.kernels.triton.pages import TritonPageMover
from shared.kvcache.allocator import PageAllocator
from shared.kvcache.cuda_host_pool import CudaHostKVPool
from shared.kvcache.host_pool import HostKVPool
from shared.kvcache.ledger import KVLedger
from shared.kvcache.page_digest import chunk_digest
from shared.kvcache.page_mover import PageMover
from shared.kvcache.pools import TokenToKVPool
from tests.sim.streams.device import FakeGpu
from tests.sim.streams.tensors import DEVICE, DeviceTensor, FakeTorch
from tests.token_engine import VOCAB_SIZE, next_token, token_engine


class TokenBackend:
    """A ModelBackend of three kernels: write K and V, read the context of each sequence, draw."""

    name = numerics = "tokens"
    has_threads = False
    vocab_size = VOCAB_SIZE

    def __init__(self, torch_mode: FakeTorch, pool: TokenToKVPool, inputs: InputBlock) -> None:
        self._torch = torch_mode
        self._pool = pool
        self._inputs = inputs

    def forward(self, batch: ModelWorkerBatch, future_map: FutureMap) -> Forwarded:
        block = self._inputs.fill(batch, BlockShape.of(batch), np.empty(0, dtype=np.int32))
        fb = ForwardBatch.from_model_worker_batch(batch, block)
        ids_T = future_map.resolve(fb.input_ids_T, fb.future_rows_B, fb.future_tokens_B)
        k, v = self._pool.layer_kv(0)
        self._launch("write_kv", _write_kv, k, v, ids_T, fb.out_pages_T, fb.out_offsets_T)
        next_S1 = torch.empty((len(batch.sampled_B), 1), dtype=torch.int64, device=DEVICE)
        attend = partial(_attend, self._pool.page_size, batch.sampled_B)
        self._launch("attend", attend, k, v, fb.page_table_BP, fb.seq_lens_B, next_S1)
        return Forwarded(next_S1 if len(next_S1) else None, fb.rows_S, batch.sampling)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no request asks for logprobs of its prompt")

    @property
    def penalize(self) -> Penalize:
        return penalize

    def draw(
        self,
        logits_SV: torch.Tensor,
        inputs: SamplingInputs[torch.Tensor],
        rows_S: torch.Tensor,
        future_map: FutureMap,
    ) -> torch.Tensor:
        token_ids_S = logits_SV[:, 0].clone()
        if inputs.draws is not None:
            token_ids_S = drawn_token(token_ids_S, inputs.draws.temperatures_S, inputs.draws.uniforms_S)
        future_map.store(rows_S, token_ids_S)
        return token_ids_S

    def measure_graphs(self, future_map: FutureMap) -> int:
        return 0

    def capture_graphs(self, future_map: FutureMap) -> None: ...

    def close(self) -> None: ...

    def _launch(self, name: str, kernel: Callable[..., None], *tensors: torch.Tensor) -> None:
        arrays = [tensor.backing.numpy() for tensor in tensors]  # type: ignore[attr-defined]
        self._torch.launch(name, partial(kernel, *arrays), tensors)


def drawn_token(
    likeliest_S: torch.Tensor, temperatures_S: torch.Tensor, uniforms_S: torch.Tensor
) -> torch.Tensor:
    """The likeliest token, and one that depends on the uniform where the temperature is not 0."""
    return (likeliest_S + (temperatures_S > 0) * (uniforms_S * VOCAB_SIZE).long()) % VOCAB_SIZE


def _write_kv(k: np.ndarray, v: np.ndarray, ids: np.ndarray, pages: np.ndarray, offsets: np.ndarray) -> None:
    k[pages, 0, offsets, 0] = ids
    v[pages, 0, offsets, 0] = ~ids


def _attend(
    page_size: int,
    sampled: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    page_table: np.ndarray,
    seq_lens: np.ndarray,
    next_tokens: np.ndarray,
) -> None:
    contexts = []
    for b, length in enumerate(seq_lens):
        positions = np.arange(length)
        pages, offsets = page_table[b, positions // page_size], positions % page_size
        ids = k[pages, 0, offsets, 0]
        # A forward behind one that has failed reads what was never written, and its results are dropped.
        ids[ids != ~v[pages, 0, offsets, 0]] = VOCAB_SIZE
        contexts.append(ids.tolist())
    next_tokens[:, 0] = [next_token(contexts[b]) for b in sampled]


def copy_pages(
    torch_mode: FakeTorch,
    pages_RPN: torch.Tensor,
    rows: range,
    slot: torch.Tensor,
    block: torch.Tensor,
    *,
    scatter: bool,
) -> None:
    """The kernel of TritonPageMover: copies pages into `slot` or back. `block` is host memory, used when it runs."""
    pages, staged = (tensor.backing for tensor in (pages_RPN, slot))  # type: ignore[attr-defined]
    num_ids = (len(block) - 1) // (1 + len(rows))

    def run() -> None:
        seed, ids, parts = int(block[0]), block[1 : 1 + num_ids], block[1 + num_ids :]
        chunk = staged.view(len(rows), len(ids), -1)
        if scatter:
            pages[rows.start : rows.stop, ids] = chunk
        else:
            chunk.copy_(pages[rows.start : rows.stop, ids])
        digest = chunk_digest(pages[rows.start : rows.stop, ids], pages.shape[2], seed % (1 << 64))
        parts.zero_()
        parts[0] = digest - (1 << 64) if digest >> 63 else digest

    torch_mode.launch("copy_pages", run, pages_RPN, slot)


def triton_mover(gpu: FakeGpu, torch_mode: FakeTorch) -> TritonPageMover:
    """The mover of CUDA, with a kernel of torch's operations."""
    return TritonPageMover(DEVICE, gpu, partial(copy_pages, torch_mode))


def _check_writes(allocator: PageAllocator, changed_LSNHPD: torch.Tensor) -> None:
    pages = changed_LSNHPD.transpose(0, 2).flatten(1).any(1).nonzero()[:, 0].tolist()
    given_away = {*pages} & {*allocator._free}
    assert not given_away, f"it writes pages {sorted(given_away)}, which are free for arrivals"


MakeStream = Callable[[ModelRunner, HostKVPool, FakeGpu], CudaForwardStream]
NewMover = Callable[[FakeGpu, FakeTorch], PageMover]
NewInputs = Callable[[int, int, int, torch.device, StartCopy], InputBlock]


def streams_engine(
    gpu: FakeGpu,
    torch_mode: FakeTorch,
    config: NodeConfig,
    *,
    make_stream: MakeStream = CudaForwardStream,
    new_allocator: Callable[[int], PageAllocator] = PageAllocator,
    new_inputs: NewInputs = InputBlock,
    new_mover: NewMover = triton_mover,
) -> Engine:
    """An Engine for the real schedulers, of the parts that a test may replace."""
    engine = token_engine(config)
    num_pages = engine.ledger.allocator.num_pages + 1
    allocator = new_allocator(num_pages)
    of = engine.ledger
    ledger = KVLedger(allocator, of.rows, of.radix_cache, keep_prefixes=of.keep_prefixes, host=of.host)
    pool = TokenToKVPool(
        num_pages=num_pages,
        page_size=config.cache.page_size,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        dtype=torch.int64,
        device=DEVICE,
        mover=new_mover(gpu, torch_mode),
    )
    num_rows = config.schedule.max_running_requests
    nbytes = BlockShape(4 * config.schedule.chunk_tokens, num_rows).nbytes(num_rows * num_pages)
    inputs = new_inputs(nbytes, num_rows, config.cache.page_size, DEVICE, gpu.start_copy)
    backend = TokenBackend(torch_mode, pool, inputs)
    runner = ModelRunner(backend, num_rows, DEVICE, start_copy=gpu.start_copy)
    stream = make_stream(runner, CudaHostKVPool(pool, of.host.num_pages), gpu)
    gpu.synchronize()  # as build_engine does
    buffer = pool.buffer_LSNHPD
    assert isinstance(buffer, DeviceTensor)
    buffer.block.memory.check_writes = partial(_check_writes, allocator)
    return replace(engine, pool=pool, ledger=ledger, stream=stream)
