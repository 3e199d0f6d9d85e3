"""What a node was told on its command line: small frozen parts, one for each part of the node."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, on what."""

    model: str = "builtin"
    device: str = "auto"
    dtype: str = "auto"
    context_length: int | None = None
    cpu_threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Size and shape of the KV pool, in tokens."""

    page_size: int = 16
    max_total_tokens: int | None = None
    mem_fraction_static: float = 0.8
    disable_radix_cache: bool = False


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Budgets of one scheduling decision, in tokens or requests."""

    chunked_prefill_size: int = 512
    max_prefill_tokens: int = 16384
    max_running_requests: int = 64
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    num_reserved_decode_tokens: int = 32
    disable_overlap_schedule: bool = False
    retract_every: int = 0
    """Test knob: retract a request every so many decode steps; 0 is never."""


@dataclass(frozen=True, kw_only=True)
class NetOptions:
    """Where the node listens and whom it talks to."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str | None = None
    node_id: str = ""
    routers: tuple[str, ...] = ()
    fleet_key: str | None = None
    insecure: bool = False
    exit_with_parent: bool = False


@dataclass(frozen=True, kw_only=True)
class TransferLimits:
    """Deadlines and sizes of KV transfer."""

    kv_transfer: str = "gloo"
    slot_bytes: int = 4 << 20
    num_slots: int = 4
    ready_timeout_s: float = 120.0
    first_offer_timeout_s: float = 600.0
    transfer_timeout_s: float = 30.0
    lease_s: float = 15.0
    peer_timeout_s: float = 5.0
    router_timeout_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Everything a node process was told."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    net: NetOptions = field(default_factory=NetOptions)
    transfer: TransferLimits = field(default_factory=TransferLimits)
    log_level: str = "info"
