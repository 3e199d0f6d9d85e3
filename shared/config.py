"""What a node was told on its command line: small frozen parts, one for each part of the node.

A field made by `flag` is a flag of the command line as well; `shared.cli` puts the flags together.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from shared import log
from shared.cpu_cores import CpuCores
from shared.flags import flag, fraction, whole


def _cores(text: str) -> CpuCores:
    try:
        return CpuCores.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _retract_interval(text: str) -> int:
    value = whole(0)(text)
    if value == 1:  # a request would be retracted before its one new token is known
        raise argparse.ArgumentTypeError("1 is not 0 (never) or at least 2")
    return value


DEFAULT_CONTROL_PORT = 8001
"""Of a router: where nodes that start by themselves announce themselves."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, on what."""

    model: str = flag(
        "builtin",
        "'builtin', a folder or a hub id",
        metavar="DIR_OR_HUB_ID",
        names=("--model", "--model-path"),
    )
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = flag(
        "auto",
        "of weights and KV; auto: as in the checkpoint",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    context_length: int | None = flag(
        None, "longest prompt plus output; None: as in the model", whole(1), "TOKENS"
    )
    cpu_cores: CpuCores | None = flag(
        None,
        "cores of forwards, one thread pinned to each, like 0-3,8; or any:N: N threads that are not pinned, at most "
        "one a core; None: every core that this process may use; a router shares its own out to the nodes that it "
        "starts",
        _cores,
        "LIST",
    )
    attention_backend: str = flag(
        "auto",
        "what computes attention, and with it the model: native (C++ for CPUs with AVX-512, in bfloat16, built at "
        "the first start) or torch; auto: native where it can be had",
        choices=("auto", "native", "torch"),
    )


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Size and shape of the KV pool, in tokens."""

    page_size: int = flag(16, "tokens in a KV page", whole(1, 1024), "TOKENS")
    max_total_tokens: int | None = flag(
        None, "size of the KV pool; None: from free memory", whole(1), "TOKENS"
    )
    mem_fraction_static: float = flag(
        0.8, "share of the device's memory for weights and KV", fraction(0.01, 0.99)
    )
    disable_radix_cache: bool = flag(False, "forget every prefix when its request ends")
    host_kv_tokens: int | None = flag(
        None,
        "decode nodes: host memory for the KV of retracted requests; 0: none; None: as large as the KV pool, at most "
        "4 GiB, and none on a CPU unless --retract-policy is host",
        whole(0),
        "TOKENS",
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Budgets of one scheduling decision, in tokens or requests."""

    chunked_prefill_size: int = flag(
        512, "longest part of a prompt computed in one forward", whole(1), "TOKENS"
    )
    max_prefill_tokens: int = flag(16384, "most prompt tokens in one forward", whole(1), "TOKENS")
    max_running_requests: int = flag(64, "requests that hold KV at the same time", whole(1, 65536), "N")
    schedule_policy: str = flag(
        "fcfs",
        "order of the waiting queue: first come, longest cached prefix, most wanted prefix, longest output, random, "
        "or most common routing key among the running",
    )
    enable_mixed_chunk: bool = flag(
        False,
        "decode nodes: a prompt that is prefilled there goes through the forward together with a decode step of all "
        "that run, so that it does not stall them",
    )
    random_seed: int = flag(0, "of --schedule-policy random", whole(0, (1 << 63) - 1), "SEED")
    in_batch_prefix_caching_deprioritize_threshold: int = flag(
        32,
        "a request waits while another computes at least so many tokens of a prefix that they share",
        whole(1),
        "TOKENS",
    )
    enable_priority_scheduling: bool = flag(
        False, "serve requests with a higher priority first; they may retract running ones with a lower"
    )
    schedule_low_priority_values_first: bool = flag(False, "a lower value of priority goes first")
    priority_scheduling_preemption_threshold: int = flag(
        10,
        "running requests whose priority is lower by more than this may be retracted for a waiting one",
        whole(0),
        "DIFFERENCE",
    )
    priority_aging_steps: int = flag(
        256,
        "forwards after which a request counts as one step of priority higher, under every policy, so that every "
        "request is served in the end; 0: never",
        whole(0),
        "STEPS",
    )
    schedule_conservativeness: float = flag(
        1.0,
        "share of future output that admission reserves room for; larger retracts less",
        fraction(0.0, 10.0),
    )
    num_reserved_decode_tokens: int = flag(
        32, "room kept for each running request before pages are reserved for an arrival", whole(0), "TOKENS"
    )
    disable_overlap_schedule: bool = flag(False, "plan a step only after the last one is committed")
    retract_policy: str = flag(
        "auto",
        "decode nodes: where a retracted request's KV goes: copied to host memory and back, dropped and prefilled "
        "again, or whichever is estimated to be faster",
        choices=("auto", "host", "recompute"),
    )
    retracted_wait_steps: int = flag(
        16,
        "decode nodes: once a retracted request has waited for so many forwards, it comes before every arrival",
        whole(0),
        "STEPS",
    )
    grammar_backend: str = flag(
        "xgrammar",
        "what follows json_schema, regex and ebnf; none: such requests are refused",
        choices=("xgrammar", "none"),
    )
    grammar_compile_timeout_s: float = flag(
        30.0, "a grammar that takes longer to compile fails its request", fraction(0.1, 3600)
    )
    enable_jump_forward: bool = flag(
        False,
        "append text that a grammar forces at once, instead of token by token: faster, but it is spelled in the "
        "tokenizer's way, not in the tokens that the model prefers; for all nodes of a fleet, or for none",
    )
    debug_checks: bool = flag(False, "check what each forward reads against what was launched before")
    retract_every: int = flag(
        0, "test knob: force a retraction every so many decode steps; 0: never", _retract_interval, "STEPS"
    )


_seconds = fraction(0.5, 3600)
_long_seconds = fraction(0.1, 86400)


@dataclass(frozen=True, kw_only=True)
class NetOptions:
    """Where the node listens and whom it talks to."""

    host: str = flag("127.0.0.1", "interface of the control socket and of KV links")
    port: int = flag(0, "control port; 0: a free one", whole(0, 65535))
    advertise_host: str | None = flag(
        None, "name under which others reach this node; None: --host", metavar="HOST"
    )
    node_id: str = flag("", "name of this node; empty: made from role, host and port")
    routers: tuple[str, ...] = flag(
        (), "router to join; may repeat", metavar="HOST[:PORT]", names=("--router",), repeats=True
    )
    exit_with_parent: bool = flag(False, "stop when standard input closes")
    fleet_key: str | None = flag(None, "shared secret of the fleet; needed beyond loopback", metavar="FILE")
    insecure: bool = flag(False, "listen beyond loopback without --fleet-key")
    router_timeout_s: float = flag(10.0, "silence after which a router's requests are given up", _seconds)


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """How KV pages move. Durations are seconds of the node's clock, except those of gloo and NCCL themselves."""

    backend: str = flag(
        "auto",
        "how pages travel: shm (memory that processes of one host share), gloo (host memory and sockets) or nccl "
        "(between GPUs); auto: shm where both nodes are on one host and compute on its CPUs, else gloo",
        names=("--kv-transfer",),
        choices=("auto", "gloo", "shm", "nccl"),
    )

    # staging: one ring per link
    slot_nbytes: int = flag(
        4 << 20, "size of a staging slot", whole(4096, 1 << 30), "BYTES", names=("--kv-slot-bytes",)
    )
    """Payload of one chunk at most; the 64-byte header comes on top."""
    num_slots: int = flag(4, "staging slots of a link", whole(1, 64), "N", names=("--kv-slots",))
    """Chunks in flight on one link."""

    # one transfer
    ready_timeout_s: float = flag(600.0, "how long a prompt waits for its decode node's pages", _long_seconds)
    """The backpressure: a prefill node waits so long for the decode node to reserve pages."""
    connect_timeout_s: float = 10.0
    """A decode node waits this long for the prefill node to connect before it gives a reservation up."""
    offer_timeout_s: float = flag(
        600.0, "how long reserved pages wait for the next pages of their prompt to be computed", _long_seconds
    )
    """The time of a prompt in the prefill node's queue, and of one chunk in its forward."""
    transfer_timeout_s: float = flag(
        30.0, "longest time without progress while computed pages are on their way", _long_seconds
    )
    """A decode node waits this long for the next chunk of pages that were offered, while any are on their way."""
    lease_s: float = flag(
        15.0, "pages held for a decode node that says nothing are released after this", _seconds
    )
    """Of pages handed off; the decode node renews the lease three times as often."""

    # messages out of their time
    park_s: float = 30.0
    """A message whose key is not open yet is kept this long, then answered with CancelTransfer."""
    max_parked: int = 4096
    """Keys parked at most; the oldest goes first."""
    tombstone_s: float = 120.0
    max_tombstones: int = 65536

    # peers
    ping_s: float = 1.0
    peer_timeout_s: float = flag(5.0, "silence after which the other end of a pair counts as dead", _seconds)
    """Its link and transfers fail then."""
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
    log_level: str = flag("info", "least severe event that is logged", choices=log.LEVELS)
    profile_dir: str = flag(
        "baton-profiles", "where /start_profile has nodes write their traces", metavar="DIR"
    )
