"""Where a bench without a network runs its forwards: a node's engine on one core, or a device that needs no GIL."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from planner.cost_model import CostModel
from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.cpu_cores import CpuCores
from shared.engine.build import build_engine, make_ledger
from shared.engine.forward_stream import ForwardStream
from shared.engine.node_process import SWITCH_INTERVAL_S
from shared.kvcache.ledger import KVLedger
from shared.protocol.messages import ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.req import Req
from shared.timeline import Timeline
from tests.bench.machine import usable_cores
from tests.bench.models import random_model
from tests.bench.timed_stream import VOCAB_SIZE, TimedStream, forward_s

TIMED = "timed wait, needs no GIL"
CONTEXT_LENGTH = 2048
FIRST_TEXT_TOKEN = 256


@dataclass(frozen=True, kw_only=True)
class Device:
    """A forward stream, and the pages its forwards run over. One Batcher at a time may use it."""

    name: str
    stream: ForwardStream
    ledger: KVLedger
    eos_token_ids: frozenset[int]
    busy_s: Callable[[], float]
    """Seconds that forwards have taken so far, whatever was waited for before and after them."""


def engine_device(model: str, max_running: int, *, num_tokens: int) -> Device:
    """A node's engine on the first core: `builtin`, or one of the random models."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as a node does
    config = NodeConfig(
        model=ModelOptions(
            model=model if model == "builtin" else str(random_model(model)),
            cpu_cores=CpuCores(1, usable_cores()[:1]),
        ),
        cache=CacheOptions(max_total_tokens=num_tokens),
        schedule=ScheduleOptions(max_running_requests=max_running),
    )
    engine = build_engine(config, lambda what, fraction: None)
    return Device(
        name=f"{model}, {engine.attention_backend}",
        stream=engine.stream,
        ledger=engine.ledger,
        eos_token_ids=engine.eos_token_ids,
        busy_s=_forward_thread_cpu_s,
    )


def _forward_thread_cpu_s() -> float:
    """CPU time of the forward stream's thread: it computes, or waits for work and for the GIL without using any."""
    thread = next(thread for thread in threading.enumerate() if thread.name.startswith("forward"))
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def timed_device(max_running: int, *, step_s: float) -> Device:
    """A stand-in for a GPU; see `TimedStream`."""
    cache = CacheOptions()
    num_pages = max_running * CONTEXT_LENGTH // cache.page_size + 1
    costs = CostModel(a=step_s, b=0.0, c=0.0, d=step_s, e=0.0, f=0.0)
    stream = TimedStream(partial(forward_s, costs))
    return Device(
        name=TIMED,
        stream=stream,
        ledger=make_ledger(num_pages, cache, max_running, CONTEXT_LENGTH),
        eos_token_ids=frozenset(),
        busy_s=lambda: stream.busy_s,
    )


def make_req(rid: int, prompt_len: int, params: SamplingParams) -> Req:
    """A prompt of random tokens that is its own."""
    rng = random.Random(rid)
    ids = tuple(rng.randrange(FIRST_TEXT_TOKEN, VOCAB_SIZE) for _ in range(prompt_len))
    key = ReqKey("bench", str(rid))
    return Req(key, Work(ids, params), Timeline(Role.DECODE), params.max_new_tokens)


def release(req: Req, batcher: Batcher, ledger: KVLedger) -> None:
    """A request has ended; its pages come home."""
    batcher.remove(req)
    assert req.kv is not None
    ledger.cache_finished_req(req.kv, req.ids)
    req.kv = None
