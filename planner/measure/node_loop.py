"""The loop of a decode node over the real engine, one turn at a time, with a clock on every forward.

Everything but the pages of prompts that another node has prefilled is real: messages come through the RouterPort, the
DecodeScheduler decides, the engine computes, tokens are encoded for a router. Pages of such a prompt count as there
at once, with whatever the pool holds: how long a decode step takes does not depend on the values of K and V.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from decode_node.scheduler import DecodeScheduler
from shared.config import NetOptions, NodeConfig
from shared.engine.build import Engine
from shared.engine.forward_stream import ForwardStream, GenerationBatchResult
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.node_process import node_parts, presence_of
from shared.kvtransfer.queues import record_digest
from shared.kvtransfer.states import Received
from shared.kvtransfer.transports.choice import make_transports
from shared.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Decode,
    NodeRef,
    ReqKey,
    Role,
    RouterHello,
    Work,
)
from shared.protocol.sampling_params import SamplingParams
from shared.protocol.transfer_messages import Handoff
from shared.scheduling.commit import Sampled
from shared.scheduling.plan import ScheduleBatch

_ROUTER = "router"
_PREFILL_NODE = NodeRef("prefill", "prefill#1", "tcp://nowhere:0")
_FIRST_TOKEN = 1


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One forward, and the turn of the scheduler that launched it."""

    extends: tuple[tuple[int, int], ...]
    """(start, length) of each part of a prompt."""
    batch: int
    """Requests that took a decode step."""
    kv_tokens: int
    """Tokens of KV that the decode step read."""
    seconds: float
    """From its launch, or the end of the forward before it, until its tokens were on the host."""
    host_s: float
    """The turns since the forward before it, without launching and without waiting: what overlap hides."""


class NodeLoop:
    """Feeds a DecodeScheduler on the calling thread until `close`. `engine` is the caller's to close, after that."""

    def __init__(self, config: NodeConfig, engine: Engine) -> None:
        self._exits = ExitStack()
        self._stream = _TimedStream(engine.stream)
        self._random = np.random.default_rng(0)
        self._host_s = 0.0
        self._num_reqs = 0
        self._ledger = engine.ledger
        self._vocab_size = engine.model_config.vocab_size
        config = replace(config, net=NetOptions(router_timeout_s=float("inf")))
        presence = self._exits.enter_context(presence_of(Role.DECODE, config, "127.0.0.1", None))
        transports = make_transports(config.transfer, engine.pool.device)
        engine = replace(engine, stream=self._stream)
        parts = node_parts(presence, config, engine, transports, threading.Event())
        self._exits.callback(parts.transfer.close)
        self._router_port = parts.router_port
        self._receiver = _InstantReceiver(engine.ledger.page_size)
        parts = replace(parts, transfer=replace(parts.transfer, receiver=self._receiver))  # type: ignore[arg-type]
        self._scheduler = DecodeScheduler(parts)
        self._stream.launching = lambda: self._scheduler.batcher.last_batch
        self._hear(RouterHello(_ROUTER, PROTOCOL_VERSION))

    def prefill(self, spans: Sequence[tuple[int, int]]) -> list[Forward]:
        """The forwards of prompts that arrive together, (start, length) each, with a single token of output.

        The KV of `start` tokens, in whole pages, is cached before: such a prompt needs a RadixCache.
        """
        prompts = [(self._ids(start), length) for start, length in spans]
        for prefix, _ in prompts:
            if prefix:
                self._add(prefix, 2, _PREFILL_NODE)
        self._until_idle()
        for prefix, length in prompts:
            self._add(prefix + self._ids(length), 1, None)
        forwards = self._until_idle()
        self._ledger.flush()  # the next prompts find pages free, as these did
        return forwards

    def decode(self, batch: int, kv_len: int, num_steps: int) -> list[Forward]:
        """Decode steps of `batch` requests over about `kv_len` tokens of KV each, no two of which share a page.

        Fewer steps where pages run out, and none where the requests have no room together.
        """
        length = max(kv_len - num_steps // 2, 2)
        keys = [self._add(self._ids(length), num_steps + 8, _PREFILL_NODE) for _ in range(batch)]
        steps: list[Forward] = []
        for _ in range(num_steps + 4):  # all run after two turns, and a turn commits the forward before it
            steps += [forward for forward in self._turn()[0] if forward.batch == batch]
        for key in keys:
            self._hear(Cancel(key))
        self._until_idle()
        self._ledger.flush()
        return steps[1 : num_steps + 1]

    def close(self) -> None:
        """End the scheduler; the engine goes on."""
        self._scheduler.close("measured")
        self._exits.close()

    def _ids(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.integers(1, self._vocab_size, length).tolist())

    def _add(self, ids: tuple[int, ...], max_new_tokens: int, prefill: NodeRef | None) -> ReqKey:
        self._num_reqs += 1
        key = ReqKey(_ROUTER, str(self._num_reqs))
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
        if prefill is not None:
            self._receiver.input_ids[key] = ids
        self._hear(Decode(key, Work(ids, params), prefill))
        return key

    def _hear(self, message: Any) -> None:
        self._router_port.on_message(_ROUTER, message)

    def _until_idle(self) -> list[Forward]:
        forwards: list[Forward] = []
        worked = True
        while worked or self._scheduler.reqs:
            done, worked = self._turn()
            forwards += done
        return forwards

    def _turn(self) -> tuple[list[Forward], bool]:
        """Take a turn. Returns the forwards that it has committed, and whether there was anything to do."""
        stream = self._stream
        away_s, start = stream.away_s, time.perf_counter()
        worked = self._scheduler.step()
        self._host_s += time.perf_counter() - start - (stream.away_s - away_s)
        done, stream.done = stream.done, []
        forwards = [
            Forward(
                extends=tuple((item.start, item.length) for item in batch.extends),
                batch=len(batch.decodes),
                kv_tokens=sum(item.start + item.length for item in batch.decodes),
                seconds=seconds,
                host_s=self._host_s,
            )
            for batch, seconds in done
        ]
        if done or not worked:
            self._host_s = 0.0
        return forwards, worked


class _TimedStream:
    """A ForwardStream that notes when forwards are launched and done."""

    def __init__(self, stream: ForwardStream) -> None:
        self._stream = stream
        self._submitted_at = 0.0
        self.done_at = 0.0
        self.away_s = 0.0
        """Spent in launching forwards and in waiting for them, so far."""
        self.done: list[tuple[ScheduleBatch, float]] = []
        self.launching: Callable[[], ScheduleBatch | None] = lambda: None
        self.copy, self.fence, self.close = stream.copy, stream.fence, stream.close

    def submit(self, batch: ModelWorkerBatch) -> Any:
        """Launch a forward."""
        self._submitted_at = time.perf_counter()
        forwarded = self._stream.submit(batch)
        self.away_s += time.perf_counter() - self._submitted_at
        return forwarded

    def sample(self, forwarded: Any, vocab_mask: Any = None) -> _TimedResult:
        """Queue its sampling."""
        start = time.perf_counter()
        pending = self._stream.sample(forwarded, vocab_mask)
        self.away_s += time.perf_counter() - start
        batch = self.launching()
        assert batch is not None
        return _TimedResult(self, pending, batch, self._submitted_at)


@dataclass(frozen=True, slots=True)
class _TimedResult:
    """A forward that was told to sample."""

    stream: _TimedStream
    pending: GenerationBatchResult
    batch: ScheduleBatch
    submitted_at: float

    def wait(self) -> Sampled:
        """Its tokens."""
        stream, start = self.stream, time.perf_counter()
        sampled = self.pending.wait()
        end = time.perf_counter()
        stream.away_s += end - start
        stream.done.append((self.batch, end - max(self.submitted_at, stream.done_at)))
        stream.done_at = end
        return sampled


class _InstantReceiver:
    """A KVReceiver whose transfers have ended when they begin."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._received: list[Received] = []
        self.input_ids: dict[ReqKey, tuple[int, ...]] = {}
        """Of the prompts that are to come."""
        self.link_reports: tuple[()] = ()
        self.unreachable: dict[str, str] = {}

    def open(self, key: ReqKey, peer_id: str, page_ids: Sequence[int], *others: object) -> None:
        """The pages are there, and so is the first token."""
        ids, tokens = self.input_ids.pop(key), (_FIRST_TOKEN,)
        handoff = Handoff(
            key=key,
            total_pages=-(-len(ids) // self._page_size),
            token_ids=tokens,
            kv_len=len(ids),
            digest=record_digest(ids, (), tokens, len(ids)),
            cached_tokens=0,
            stamps=(),
        )
        self._received.append(Received(key, peer_id, handoff, 0, len(page_ids), 0.0))

    def poll(self) -> list[Received]:
        """What was opened since the last call."""
        received, self._received = self._received, []
        return received

    def tick(self) -> None:
        """Nothing is overdue."""

    def cancel(self, key: ReqKey, reason: str) -> None:
        """No transfer is under way."""

    def close(self) -> None:
        """Nothing to end."""
