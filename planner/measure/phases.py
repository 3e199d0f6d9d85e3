"""The phases of measuring, in order: the engine first, since processes that are started later would disturb it.

engine      prefill, decode and the scheduler, in this process; the engine is closed before the next phase
transfer    this process and a second one
"""

from __future__ import annotations

import contextlib
import gc
import platform
import sys
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

from planner.measure.fitting import remarks_of
from planner.measure.forwards import MeasureLimits, OnProgress, measure_forwards, tasks_of
from planner.measure.node_loop import NodeLoop
from planner.measure.transfer import MAX_NBYTES, Shape, measure_transfers
from planner.profile import MAX_BYTES_S, Measured, NodeKind, Profile, TransferCost
from shared.config import NodeConfig, ScheduleOptions
from shared.engine.build import Engine, build_engine
from shared.engine.node_process import SWITCH_INTERVAL_S
from shared.engine.resolve import resolve_device, resolve_schedule
from shared.kvtransfer.transports.choice import make_transports
from shared.protocol.messages import KVLayout


def measure(
    config: NodeConfig, *, effort: MeasureLimits | None = None, on_progress: OnProgress = lambda what: None
) -> Profile:
    """The profile of a node with `config`. Raises ConfigError.

    It takes about a minute with the built-in model; a slow one takes longer, since every point has to be measured
    a few times.
    """
    effort = effort or MeasureLimits()
    make_transports(config.transfer, resolve_device(config.model.device))  # its options are checked first
    profile, layout, device = measure_engine(config, effort, on_progress)
    layout = msgspec.structs.replace(layout, windows=())  # pages of all layers, as at the end of a prompt
    gc.collect()  # the engine's memory
    page_nbytes = layout.nbytes_per_token * layout.page_size
    num_pages = min(profile.node.context_length // layout.page_size, MAX_NBYTES // page_nbytes)
    shape = Shape(
        config=config, layout=layout, page_nbytes=page_nbytes, device=device, num_pages=max(num_pages, 1)
    )
    transfer, residuals, remarks = measure_transfers(shape, effort.transfer_s, on_progress)
    measured = msgspec.structs.replace(
        profile.measured,
        residuals=(*profile.measured.residuals, *residuals),
        remarks=(*profile.measured.remarks, *remarks),
    )
    return msgspec.structs.replace(profile, measured=measured, transfer=transfer)


def changed_options(schedule: ScheduleOptions) -> dict[str, Any]:
    """What NodeKind has no field for, where it differs from the default."""
    return {
        one.name: getattr(schedule, one.name)
        for one in fields(schedule)
        if one.name not in NodeKind.__struct_fields__ and getattr(schedule, one.name) != one.default
    }


def measure_engine(
    config: NodeConfig, effort: MeasureLimits, on_progress: OnProgress = lambda what: None
) -> tuple[Profile, KVLayout, str]:
    """What one process measures by itself: a profile in which transfers take no time; the layout, the device.

    From then on this process has the switch interval of a node's. Raises ConfigError.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    on_progress("the model is loaded")
    engine = build_engine(config, lambda what, fraction: on_progress(what))
    config = replace(config, schedule=resolve_schedule(config.schedule, engine.pool.device))
    cache, chunk_tokens, layout = config.cache, config.schedule.chunk_tokens, engine.layout
    node = NodeKind(
        pool_tokens=engine.limits.max_total_num_tokens,
        page_size=layout.page_size,
        context_length=engine.limits.context_length,
        max_running_requests=engine.limits.max_running_requests,
        chunked_prefill_size=chunk_tokens,
        kv_bytes_per_token=layout.nbytes_per_token,
        disable_radix_cache=cache.disable_radix_cache,
        host_kv_tokens=engine.ledger.host.num_pages * layout.page_size,
        schedule=changed_options(config.schedule),
    )
    has_cache = not cache.disable_radix_cache
    tasks = tasks_of(engine.limits, chunk_tokens, layout.page_size, has_cache=has_cache, effort=effort)
    closing = contextlib.closing
    with closing(engine), closing(NodeLoop(config, engine)) as loop:
        machine, device = _machine(engine), str(engine.pool.device)
        forwards = measure_forwards(loop, tasks, effort, on_progress)
    costs, residuals = forwards.fit()
    remarks = remarks_of((*forwards.extends, *forwards.decodes, *forwards.hosts), residuals)
    measured = Measured(
        at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine=machine,
        model=config.model.model,
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "kernels": f"{engine.attention_backend}, {layout.numerics}",
        },
        residuals=residuals,
        remarks=tuple(remarks),
    )
    no_time = TransferCost(latency_s=0.0, bytes_s=MAX_BYTES_S)
    return Profile(measured=measured, node=node, forward=costs, transfer=no_time), layout, device


def _machine(engine: Engine) -> str:
    """The GPU, or the CPU and its cores."""
    device = engine.pool.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    num_cores = engine.cpu_cores.num_threads
    return f"{named[0] if named else platform.machine()}, {num_cores} core{'s' * (num_cores > 1)}"
