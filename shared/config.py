"""What a node was told on its command line: small frozen parts, one for each part of the node."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.cpu_cores import CpuCores


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, on what."""

    model: str = "builtin"
    device: str = "auto"
    dtype: str = "auto"
    context_length: int | None = None
    cpu_cores: CpuCores | None = None
    """Of one forward; None: `own_cores`."""
    cpu_kernels: str = "auto"
    """What computes the model on a CPU: see `engine.backends`."""


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Size and shape of the KV pool, in tokens."""

    page_size: int = 16
    max_total_tokens: int | None = None
    mem_fraction_static: float = 0.8
    disable_radix_cache: bool = False
    host_kv_tokens: int | None = None
    """Of the host memory that keeps the KV of retracted requests; None: chosen by `resolve_num_host_pages`."""


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Budgets of one scheduling decision, in tokens or requests."""

    chunked_prefill_size: int = 512
    max_prefill_tokens: int = 16384
    max_running_requests: int = 64
    schedule_policy: str = "fcfs"
    enable_mixed_chunk: bool = False
    """On decode nodes: a step of the running requests is part of the forward that prefills a prompt there."""
    random_seed: int = 0
    """Of the policy `random`."""
    in_batch_prefix_deprioritize_threshold: int = 32
    """A request waits while another computes at least so many tokens of a prefix that they share."""
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    """A waiting request may retract running ones whose priority is lower by more than this."""
    priority_aging_steps: int = 256
    """A request's priority rises by one for every so many forwards since its arrival; 0 is never."""
    schedule_conservativeness: float = 1.0
    num_reserved_decode_tokens: int = 32
    disable_overlap_schedule: bool = False
    grammar_backend: str = "xgrammar"
    grammar_compile_timeout_s: float = 30.0
    """A grammar that takes longer to compile fails its request."""
    enable_jump_forward: bool = False
    """Text that a grammar forces is appended at once, in the tokenizer's spelling: see `scheduling.jump_forward`."""
    debug_checks: bool = False
    """Check what each forward reads against what was launched before; on in tests."""
    retract_policy: str = "auto"
    """What becomes of the KV of a decode node's retracted request: see `scheduling.retraction`."""
    retracted_wait_steps: int = 16
    """Arrivals pass a retracted request until it has waited for so many turns of the decode node's loop."""
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
    router_timeout_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """How KV pages move. Durations are seconds of the node's clock, except those of gloo and NCCL themselves."""

    backend: str = "auto"
    """What a node offers to its peers: `shm` between processes of one host, `gloo` through host memory and sockets,
    `nccl` between GPUs; `auto`: shm and gloo, whichever is best for each peer."""

    # staging: one ring per link
    slot_nbytes: int = 4 << 20
    """Payload of one chunk at most; the 64-byte header comes on top."""
    num_slots: int = 4
    """Chunks in flight on one link."""

    # one transfer
    ready_timeout_s: float = 600.0
    """A prefill node waits this long for the decode node to reserve pages: this is the backpressure."""
    connect_timeout_s: float = 10.0
    """A decode node waits this long for the prefill node to connect before it gives a reservation up."""
    offer_timeout_s: float = 600.0
    """A decode node waits this long for the next pages to be computed: the time of a prompt in the prefill node's
    queue, and of one chunk in its forward."""
    transfer_timeout_s: float = 30.0
    """A decode node waits this long for the next chunk of pages that were offered, while any are on their way."""
    lease_s: float = 15.0
    """Pages handed off are held this long without a LeaseRenew; the decode node renews three times as often."""

    # messages out of their time
    park_s: float = 30.0
    """A message whose key is not open yet is kept this long, then answered with CancelTransfer."""
    max_parked: int = 4096
    """Keys parked at most; the oldest goes first."""
    tombstone_s: float = 120.0
    max_tombstones: int = 65536

    # peers
    ping_s: float = 1.0
    peer_timeout_s: float = 5.0
    """A peer that answers no ping for so long is silent: its link and transfers fail."""
    forget_peer_s: float = 120.0
    """A decode node forgets a prefill node that was silent for so long; if it lives, it says hello again."""
    rebuild_min_s: float = 0.1
    rebuild_max_s: float = 5.0
    """The next incarnation of a dead link is built after a pause that doubles between these two."""
    hello_retry_s: float = 15.0
    """A prefill node that is connected and has had no link for so long says hello again."""

    # links
    bind_host: str = "127.0.0.1"
    """The interface that data connections bind and advertise."""
    op_timeout_s: float = 3.0
    """A send or receive that takes longer kills its link."""
    build_timeout_s: float = 10.0
    nccl_max_ctas: int = 4
    """Thread blocks that one NCCL transfer may take from the kernels of the model."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Everything a node process was told."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    net: NetOptions = field(default_factory=NetOptions)
    transfer: TransferOptions = field(default_factory=TransferOptions)
    log_level: str = "info"
    profile_dir: str = "baton-profiles"
    """Where /start_profile has traces written."""
