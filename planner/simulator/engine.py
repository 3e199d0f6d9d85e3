"""An engine for the real schedulers that has a ledger and a clock, and neither a model nor memory."""

from __future__ import annotations

from planner.simulator.events import NodeClock
from planner.simulator.runner import EOS, VOCAB_SIZE, SimStream
from shared.config import NodeConfig
from shared.cpu_cores import CpuCores
from shared.engine.build import Engine, make_ledger
from shared.engine.profiler import Profiler
from shared.engine.progress import Progress
from shared.kvcache.host_pages import HostPages
from shared.model.config import ModelConfig
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
        model_config=_model_config(context_length),
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


def _model_config(context_length: int) -> ModelConfig:
    """What the schedulers look at is the vocabulary; the rest is the smallest that is a model."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        dtype="float32",
        eos_token_ids=(EOS,),
        bos_token_id=None,
    )
