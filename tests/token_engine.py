"""An engine whose KV pages hold the token ids themselves: a wrong page or a late write shows as a wrong token.

It stands in for the model runner and the KV pool only; everything above them is the real code.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.config import CacheOptions, NodeConfig
from shared.cpu_cores import CpuCores
from shared.engine.build import Engine, make_ledger
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.profiler import Profiler
from shared.engine.progress import Progress
from shared.engine.sampling_inputs import VocabMask
from shared.kvcache.allocator import HostPages, PageCopy
from shared.kvcache.host_pool import CpuHostKVPool
from shared.kvcache.page_digest import chunk_digest
from shared.kvcache.windows import WindowPages
from shared.model.config import ModelConfig, load_model_config
from shared.protocol.messages import KVLayout, NodeLimits
from shared.scheduling.commit import Sampled

VOCAB_SIZE = 997
EOS = 7


def next_token(ids: Sequence[int]) -> int:
    """A "model": depends on every token and its place, and is EOS now and then."""
    x = 17
    for token in ids:
        x = (x * 31 + token + 1) % 1_000_003
    return x % VOCAB_SIZE


def reference_tokens(input_ids: Sequence[int], max_new_tokens: int, eos: int | None = EOS) -> list[int]:
    """What any schedule must produce."""
    ids = list(input_ids)
    while len(ids) - len(input_ids) < max_new_tokens:
        ids.append(next_token(ids))
        if ids[-1] == eos:
            break
    return ids[len(input_ids) :]


class CorruptKV(AssertionError):
    """A forward read a page that does not hold what its sequence wrote."""


class TokenPool:
    """A PageStore of one layer: K is the token id, V its complement. Window pages are those of a second layer."""

    def __init__(self, num_pages: int, page_size: int, num_window_pages: int = 0) -> None:
        self.page_size = page_size
        self.device = torch.device("cpu")
        self.kv, self.window_kv = (
            np.full((2, num, page_size), -1, dtype=np.int64) for num in (num_pages, num_window_pages)
        )
        self.num_window_layers = int(num_window_pages > 0)

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        return 2 * num_layers * num_pages * self.page_size * 8

    def gather(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor, seed: int = 0
    ) -> int:
        kv = self.window_kv if first_layer else self.kv
        out.copy_(torch.from_numpy(np.ascontiguousarray(kv[:, page_ids])).view(torch.uint8).flatten())
        return chunk_digest(out, self.page_size * 8, seed)

    def scatter(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor, seed: int = 0
    ) -> int:
        kv = self.window_kv if first_layer else self.kv
        kv[:, page_ids] = src.numpy().view(np.int64).reshape(2, len(page_ids), self.page_size)
        return chunk_digest(src, self.page_size * 8, seed)


@dataclass(eq=False)
class TokenResult:
    stream: TokenStream
    tokens: list[int] | None = None
    vocab_mask: VocabMask[np.ndarray] | None = None

    def wait(self) -> Sampled:
        while self.tokens is None:
            self.stream.run_one()
        return Sampled(self.tokens)

    def allowed_by_entry(self) -> dict[int, np.ndarray]:
        if self.vocab_mask is None:
            return {}
        bits_GV = np.unpackbits(self.vocab_mask.allowed_GW.view(np.uint8), axis=1, bitorder="little")
        return dict(zip(self.vocab_mask.entries_G.tolist(), bits_GV, strict=True))


@dataclass(eq=False)
class TokenCopy:
    stream: TokenStream
    is_done: bool = False
    error: Exception | None = None

    def wait(self) -> float:
        while not self.is_done:
            self.stream.run_one()
        if self.error is not None:
            raise self.error
        return 0.001


class TokenStream:
    """Runs everything as late as it may: when somebody waits for it. That is when a broken reuse rule bites."""

    def __init__(
        self, pool: TokenPool, num_rows: int, num_host_pages: int = 0, window: int | None = None
    ) -> None:
        self.pool, self.window = pool, window
        num_layers = 1 + pool.num_window_layers
        page_nbytes = pool.gather_nbytes(1, num_layers)
        self.host_pool = CpuHostKVPool(pool, num_layers, num_host_pages, page_nbytes, pool.num_window_layers)
        self.num_copies = 0
        self.fail_copies: list[bool] = []
        """Which of the next copies fail; none, when it is empty."""
        self.future_map = np.full(num_rows, -1, dtype=np.int64)
        self.queue: list[tuple[ModelWorkerBatch, TokenResult] | tuple[PageCopy, TokenCopy]] = []
        self.num_forwards = 0
        self.fail_next = False
        self.is_closed = False

    def submit(self, batch: ModelWorkerBatch) -> TokenResult:
        assert not self.is_closed
        result = TokenResult(self)
        self.queue.append((batch, result))
        return result

    def sample(self, forwarded: TokenResult, vocab_mask: VocabMask[np.ndarray] | None = None) -> TokenResult:
        forwarded.vocab_mask = vocab_mask
        return forwarded

    def copy(self, pages: PageCopy) -> TokenCopy:
        result = TokenCopy(self)
        self.queue.append((pages, result))
        return result

    def _copy(self, pages: PageCopy, result: TokenCopy) -> None:
        self.num_copies += 1
        result.is_done = True
        if self.fail_copies and self.fail_copies.pop(0):
            result.error = RuntimeError("copy told to fail")
            return
        self.host_pool.copy(pages)

    def run_one(self) -> None:
        batch, result = self.queue.pop(0)
        if isinstance(batch, PageCopy):
            assert isinstance(result, TokenCopy)
            self._copy(batch, result)
            return
        assert isinstance(result, TokenResult)
        self.num_forwards += 1
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("forward told to fail")
        result.tokens = self._forward(batch, result.allowed_by_entry())

    def _forward(self, batch: ModelWorkerBatch, allowed: Mapping[int, np.ndarray]) -> list[int]:
        size, kv = self.pool.page_size, self.pool.kv
        for row, token in batch.future_writes:
            self.future_map[row] = token
        decoding = batch.rows_B[len(batch.rows_B) - batch.num_decodes :]
        inputs = batch.input_ids.tolist() + self.future_map[decoding].tolist()
        at, contexts = 0, []
        for b, (start, length) in enumerate(zip(batch.starts_B, batch.lengths_B, strict=True)):
            table = batch.page_table_BP[b]
            for i in range(start, start + length):
                kv[:, table[i // size], i % size] = inputs[at], ~inputs[at]
                if batch.window_table_BP is not None:
                    window_page = batch.window_table_BP[b, i // size]
                    self.pool.window_kv[:, window_page, i % size] = inputs[at], ~inputs[at]
                at += 1
            positions = np.arange(start + length)
            k = kv[0, table[positions // size], positions % size]
            v = kv[1, table[positions // size], positions % size]
            if (k != ~v).any() or (k < 0).any():
                raise CorruptKV(f"sequence {b}: K and V differ at {np.nonzero(k != ~v)[0]}")
            if batch.window_table_BP is not None:
                self._check_window(batch.window_table_BP[b], start, k)
            contexts.append(k.tolist())
        tokens, masked = [], batch.sampling.masked
        masked_ids = set() if masked is None else {*zip(masked.entries_N, masked.token_ids_N, strict=True)}
        for i, b in enumerate(batch.sampled_B):
            token = next_token(contexts[b])
            while (i, token) in masked_ids or not (i not in allowed or allowed[i][token]):
                token = (token + 1) % VOCAB_SIZE
            self.future_map[batch.rows_B[b]] = token
            tokens.append(token)
        return tokens

    def _check_window(self, table: np.ndarray, start: int, ids: np.ndarray) -> None:
        """What the new tokens from `start` on see through the window is what the other layer has."""
        assert self.window is not None
        seen, size = np.arange(max(start + 1 - self.window, 0), len(ids)), self.pool.page_size
        kv = self.pool.window_kv[:, table[seen // size], seen % size]
        if (kv[0] != ids[seen]).any() or (kv[1] != ~ids[seen]).any():
            raise CorruptKV(f"the window before token {start} differs at {seen[kv[0] != ids[seen]]}")

    def close(self) -> None:
        self.is_closed = True
        while self.queue:
            self.run_one()


def token_model_config(**fields: Any) -> ModelConfig:
    """A Llama of one head in one layer. `fields` are those of config.json."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 8,
        "intermediate_size": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config | fields))
        return load_model_config(Path(folder))


def token_engine(config: NodeConfig, window: int | None = None, window_tokens: int = 0) -> Engine:
    """An Engine for the real schedulers, over a TokenPool.

    With a `window`, one layer of two has it, and a pool for `window_tokens` tokens, by default as large as the other.
    """
    cache: CacheOptions = config.cache
    assert cache.max_total_tokens is not None
    num_pages = cache.max_total_tokens // cache.page_size + 1
    num_rows = config.schedule.max_running_requests
    context_length = config.model.context_length or 4096
    pool, windows = TokenPool(num_pages, cache.page_size), None
    if window is not None:
        num_window_pages = (
            min(-(-window_tokens // cache.page_size) + 1, num_pages) if window_tokens else num_pages
        )
        pool = TokenPool(num_pages, cache.page_size, num_window_pages)
        windows = WindowPages(num_pages, num_window_pages, window, cache.page_size)
    num_host_pages = (cache.host_kv_tokens or 0) // cache.page_size
    return Engine(
        model_config=token_model_config(),
        pool=pool,  # type: ignore[arg-type]
        ledger=make_ledger(
            num_pages,
            cache,
            num_rows,
            context_length,
            HostPages(num_host_pages, pool.gather_nbytes(1, 1)),
            windows,
        ),
        stream=TokenStream(pool, num_rows, num_host_pages, window),
        layout=KVLayout(
            "tokens",
            "int64",
            cache.page_size,
            1 + pool.num_window_layers,
            1,
            1,
            windows=() if window is None else (0, window),
        ),
        limits=NodeLimits(context_length, (num_pages - 1) * cache.page_size, num_rows),
        progress=Progress(),
        attention_backend="tokens",
        is_exact=True,
        eos_token_ids=frozenset({EOS}),
        profiler=Profiler(config.profile_dir, "tokens"),
        cpu_cores=CpuCores(1),
    )
