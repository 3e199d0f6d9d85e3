"""An engine for the real schedulers that has a ledger and a clock, and neither a model nor memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from planner.simulator.events import NodeClock
from planner.simulator.runner import EOS, VOCAB_SIZE, SimStream
from shared.config import NodeConfig
from shared.cpu_cores import CpuCores
from shared.engine.build import Engine, make_ledger
from shared.engine.profiler import Profiler
from shared.engine.progress import Progress
from shared.kvcache.allocator import HostPages
from shared.model.config import ModelConfig, load_model_config
from shared.model.files import BUILTIN_MODEL, resolve_model
from shared.protocol.messages import KVLayout, NodeLimits


def sim_engine(config: NodeConfig, stream: SimStream, clock: NodeClock, page_nbytes: int) -> Engine:
    """An Engine over `stream`, under the clock of one simulated node. `config` has the tokens of its pool.

    `page_nbytes` is what a page of KV takes, by which `--retract-policy auto` weighs a copy against a prefill.
    """
    cache, num_rows = config.cache, config.schedule.max_running_requests
    assert cache.max_total_tokens is not None and config.model.context_length is not None
    num_pages = cache.max_total_tokens // cache.page_size + 1
    host = HostPages((cache.host_kv_tokens or 0) // cache.page_size, page_nbytes)
    context_length = config.model.context_length
    return Engine(
        model_config=_model_config(),
        pool=None,  # type: ignore[arg-type]  # what reads and writes pages is simulated
        ledger=make_ledger(num_pages, cache, num_rows, context_length, host),
        stream=stream,  # type: ignore[arg-type]
        layout=KVLayout("simulated", "int64", cache.page_size, 1, 1, 1),
        limits=NodeLimits(context_length, (num_pages - 1) * cache.page_size, num_rows),
        progress=Progress(),
        attention_backend="simulated",
        is_exact=True,
        eos_token_ids=frozenset({EOS}),
        profiler=Profiler(config.profile_dir, "simulated"),
        cpu_cores=CpuCores(1),
        snapshot=lambda batch, *_: batch,
        clock=clock,
        stamp_clock=clock,
    )


@cache
def _model_config() -> ModelConfig:
    """What the schedulers look at is the vocabulary; the rest is that of the built-in model."""
    builtin = load_model_config(resolve_model(BUILTIN_MODEL, with_weights=False))
    return replace(builtin, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
