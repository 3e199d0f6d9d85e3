"""Where a bench without a network runs its forwards: the built-in model, or a device that needs no GIL."""

from __future__ import annotations

import random
from dataclasses import dataclass

from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.cpu_cores import CpuCores
from shared.engine.build import build_engine, make_ledger
from shared.engine.forward_stream import ForwardStream
from shared.kvcache.ledger import KVLedger
from shared.protocol.messages import ReqKey, Role
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.req import Req
from shared.timeline import Timeline
from tests.bench.timed_stream import VOCAB_SIZE, TimedStream

BUILTIN = "built-in model, CPU thread, shares the GIL"
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


def builtin_device(max_running: int) -> Device:
    """The real engine with the built-in model, on one thread of a CPU."""
    config = NodeConfig(
        model=ModelOptions(model="builtin", cpu_cores=CpuCores(1)),
        cache=CacheOptions(max_total_tokens=max_running * CONTEXT_LENGTH),
        schedule=ScheduleOptions(max_running_requests=max_running),
    )
    engine = build_engine(config, lambda what, fraction: None)
    return Device(
        name=BUILTIN, stream=engine.stream, ledger=engine.ledger, eos_token_ids=engine.eos_token_ids
    )


def timed_device(max_running: int, *, step_s: float, prompt_token_s: float = 0.0) -> Device:
    """A stand-in for a GPU; see `TimedStream`."""
    cache = CacheOptions()
    num_pages = max_running * CONTEXT_LENGTH // cache.page_size + 1
    return Device(
        name=TIMED,
        stream=TimedStream(step_s=step_s, prompt_token_s=prompt_token_s),
        ledger=make_ledger(num_pages, cache, max_running, CONTEXT_LENGTH),
        eos_token_ids=frozenset(),
    )


def make_req(rid: int, prompt_len: int, params: SamplingParams) -> Req:
    """A prompt of random tokens that is its own."""
    rng = random.Random(rid)
    ids = [rng.randrange(FIRST_TEXT_TOKEN, VOCAB_SIZE) for _ in range(prompt_len)]
    key = ReqKey("bench", str(rid))
    return Req(key, ids, prompt_len, params, Timeline(Role.DECODE), params.max_new_tokens)


def release(req: Req, batcher: Batcher, ledger: KVLedger) -> None:
    """A request has ended; its pages come home."""
    batcher.remove(req)
    assert req.kv is not None
    ledger.cache_finished_req(req.kv, req.ids)
    req.kv = None
