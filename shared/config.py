"""The configuration of a node: small frozen dataclasses, one for each part of the node.

A field that `flag` makes is also a flag of the command line. `shared.cli` adds the flags to a parser.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from shared import log
from shared.cpu_cores import CpuCores
from shared.errors import ConfigError
from shared.flags import flag, fraction, whole


def _cores(text: str) -> CpuCores:
    try:
        return CpuCores.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _retract_interval(text: str) -> int:
    value = whole(0)(text)
    if value == 1:  # it would retract a request before its one new token is known
        raise argparse.ArgumentTypeError("1 is not 0 (never) or at least 2")
    return value


DEFAULT_CONTROL_PORT = 8001
"""The control port of a router, where nodes join."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, and the device that it runs on."""

    model: str = flag(
        "builtin",
        "'builtin', a folder or a hub id",
        metavar="DIR_OR_HUB_ID",
        names=("--model", "--model-path"),
    )
    load_format: str = flag(
        "auto",
        "auto: the safetensors files of the model; dummy: random weights from --random-seed, for which a config.json "
        "is enough (without a tokenizer the router needs --skip-tokenizer-init)",
        choices=("auto", "dummy"),
    )
    quantization: str | None = flag(
        None,
        "quantize the weights while they are loaded: int8 or int4 (groups of 128 inputs; "
        "lm_head in int8), and activations to 8 bits; None: as the checkpoint is",
        choices=("int8", "int4"),
    )
    weight_only_quantization: bool = flag(
        False,
        "multiply quantized weights by activations of 16 bits; without it these become codes of 8 bits, which is "
        "faster; not for W8A8 checkpoints",
    )
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = flag(
        "auto",
        "of weights and KV; auto: as in the checkpoint",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    context_length: int | None = flag(
        None, "most tokens of prompt and output together; None: as in the model", whole(1), "TOKENS"
    )
    cpu_cores: CpuCores | None = flag(
        None,
        "cores of forwards, one thread pinned to each, like 0-3,8; or any:N: N threads that are not pinned, at most "
        "one per core; None: every core that this process may use; a router divides its cores among the nodes that "
        "it starts",
        _cores,
        "LIST",
    )
    attention_backend: str = flag(
        "auto",
        "what computes attention, and with it the model: triton (kernels for NVIDIA GPUs), native (C++ for CPUs with "
        "AVX2, in bfloat16, built at the first start) or torch; auto: triton or native where it is available",
        choices=("auto", "native", "torch", "triton"),
    )
    exact: bool = flag(
        False,
        "GPUs: the KV and logits of a token are the same bits from a decode step and from a prefill, in any batch; "
        "products are slower; native kernels for CPUs are always exact",
    )
    cuda_graph_max_bs: int = flag(
        256,
        "GPUs: decode steps of up to so many requests are replayed from CUDA graphs, as are extends of few tokens; "
        "at most --max-running-requests",
        whole(1, 4096),
        "N",
    )
    disable_cuda_graph: bool = flag(False, "GPUs: launch every kernel of every forward by itself")


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Size and shape of the KV pool, in tokens."""

    page_size: int = flag(16, "tokens in a KV page", whole(1, 1024), "TOKENS")
    kv_cache_dtype: str = flag(
        "auto",
        "type of KV pages: int8, or fp8 (e4m3, on GPUs that have it), keeps codes with a scale for each token and "
        "head, half the memory and half the bytes of a transfer; auto: the type of the engine (--dtype)",
        choices=("auto", "int8", "fp8"),
    )
    max_total_tokens: int | None = flag(
        None, "size of the KV pool; None: from free memory", whole(1), "TOKENS"
    )
    mem_fraction_static: float | None = flag(
        None,
        "share of a GPU's memory that this node may take in all: weights, activations, CUDA graphs and KV (vLLM's "
        "--gpu-memory-utilization); None: 0.9, divided equally among the nodes that start on the GPU together; on a "
        "CPU the share of free memory for KV, at most 2 GiB; None: 0.8",
        fraction(0.01, 0.99),
    )
    gpu_memory_timeout_s: float = flag(
        60.0,
        "how long a node that starts waits for GPU memory that another process still holds, before it takes less",
        fraction(0.0, 3600),
    )
    disable_radix_cache: bool = flag(False, "do not keep prefixes for later requests")
    host_kv_tokens: int | None = flag(
        None,
        "host memory for the KV of requests that a decode node retracts, which a prefill node has too unless "
        "--fixed-role; 0: none; None: as large as the KV pool, at most 4 GiB, and none on a CPU unless "
        "--retract-policy is host",
        whole(0),
        "TOKENS",
    )


CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS = 512, 2048
"""By default. Of 2048 tokens an H200 computes an 8B at 0.74 of its speed, of 512 at less, of 8192 no faster."""


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Budgets of one scheduling decision, in tokens or requests."""

    chunked_prefill_size: int | None = flag(
        None,
        "longest part of a prompt computed in one forward; None: 512 on a CPU, 2048 on a GPU",
        whole(1),
        "TOKENS",
    )
    short_prompt_share: float = flag(
        0.5,
        "beside a prompt of several chunks, prompts that fit into this share of the forward's tokens are computed",
        fraction(0.0, 0.5),
        "SHARE",
    )
    prefill_ahead_share: float = flag(
        0.25,
        "prefill nodes: prompts whose decode node has no room yet are computed ahead while there is nothing else to "
        "compute, and may fill this share of the KV pool; 0: never",
        fraction(0.0, 1.0),
        "SHARE",
    )
    max_prefill_tokens: int = flag(16384, "most prompt tokens in one forward", whole(1), "TOKENS")
    max_running_requests: int = flag(64, "requests that hold KV at the same time", whole(1, 65536), "N")
    schedule_policy: str = flag(
        "fcfs",
        "order of the waiting queue: first come first served, longest cached prefix, most wanted prefix, longest "
        "output, random, or the routing key that is most common among the running requests",
    )
    enable_mixed_chunk: bool = flag(
        False,
        "decode nodes: a prompt that is prefilled there shares its forwards with decode steps of all running "
        "requests, so that it does not stall them",
    )
    random_seed: int = flag(
        0, "seed of --schedule-policy random and of --load-format dummy", whole(0, (1 << 63) - 1), "SEED"
    )
    in_batch_prefix_caching_deprioritize_threshold: int = flag(
        32,
        "a request waits while another one computes a prefix that they share, of at least this length",
        whole(1),
        "TOKENS",
    )
    enable_priority_scheduling: bool = flag(
        False,
        "serve requests with a higher priority first; they may retract running requests of lower priority",
    )
    schedule_low_priority_values_first: bool = flag(False, "lower priority values are served first")
    priority_scheduling_preemption_threshold: int = flag(
        10,
        "running requests whose priority is lower by more than this may be retracted for a waiting one",
        whole(0),
        "DIFFERENCE",
    )
    priority_aging_steps: int = flag(
        256,
        "a waiting request gains one step of priority every so many forwards, under every policy, so that every "
        "request is served in the end; 0: never",
        whole(0),
        "STEPS",
    )
    schedule_conservativeness: float = flag(
        1.0,
        "scales the room that admission reserves for future output; a larger value retracts less",
        fraction(0.0, 10.0),
    )
    num_reserved_decode_tokens: int = flag(
        32, "room that is kept for each running request before an arrival gets pages", whole(0), "TOKENS"
    )
    disable_overlap_schedule: bool = flag(False, "plan a step only after the last one is committed")
    retract_policy: str = flag(
        "auto",
        "decode nodes: the KV of a retracted request is copied to host memory and back, or dropped and prefilled "
        "again; auto: whichever is estimated to be faster",
        choices=("auto", "host", "recompute"),
    )
    retracted_wait_steps: int = flag(
        16,
        "decode nodes: a retracted request that has waited for so many forwards comes before every arrival",
        whole(0),
        "STEPS",
    )
    grammar_backend: str = flag(
        "xgrammar",
        "library for json_schema, regex and ebnf; none: such requests are refused",
        choices=("xgrammar", "none"),
    )
    grammar_compile_timeout_s: float = flag(
        30.0, "a request fails when its grammar takes longer to compile", fraction(0.1, 3600)
    )
    enable_jump_forward: bool = flag(
        False,
        "append text that a grammar forces at once, instead of token by token: faster, but in the tokens of the "
        "tokenizer, not in those that the model prefers; for all nodes of a fleet, or for none",
    )
    debug_checks: bool = flag(
        False,
        "check that each forward reads the tokens that were sampled for it, and that no plan waits for the device",
    )
    retract_every: int = flag(
        0, "test knob: force a retraction every so many decode steps; 0: never", _retract_interval, "STEPS"
    )

    @property
    def chunk_tokens(self) -> int:
        """The longest part of a prompt in one forward. Options that no device has resolved are for a CPU."""
        return self.chunked_prefill_size or CPU_CHUNK_TOKENS


_seconds = fraction(0.5, 3600)
_long_seconds = fraction(0.1, 86400)


@dataclass(frozen=True, kw_only=True)
class NetOptions:
    """The addresses of a node, the routers that it joins, and security."""

    host: str = flag("127.0.0.1", "interface of the control socket and of KV links")
    port: int = flag(0, "control port; 0: a free one", whole(0, 65535))
    advertise_host: str | None = flag(
        None,
        "host name or address under which routers and nodes reach this node; None: --host",
        metavar="HOST",
    )
    node_id: str = flag("", "name of this node; empty: made from role, host and port")
    routers: tuple[str, ...] = flag(
        (), "router to join; may repeat", metavar="HOST[:PORT]", names=("--router",), repeats=True
    )
    exit_with_parent: bool = flag(False, "stop when standard input closes")
    fleet_key: tuple[str, ...] = flag(
        (),
        "shared secret of the fleet; needed beyond loopback; repeats while it is being replaced: the first is this "
        "process's own, and all are accepted",
        metavar="FILE",
        repeats=True,
    )
    insecure: bool = flag(False, "listen beyond loopback without --fleet-key")
    http_port: int | None = flag(
        None,
        "port of /live, /ready and /metrics, which need no key; 0: a free one; None: there is no such port",
        whole(0, 65535),
        "PORT",
    )
    http_host: str = flag("127.0.0.1", "interface of --http-port", metavar="HOST")
    drain_timeout_s: float = flag(
        30.0, "after SIGTERM, how long requests may take to leave for other nodes", _seconds
    )
    router_timeout_s: float = flag(10.0, "silence after which the requests of a router are aborted", _seconds)
    fixed_role: bool = flag(
        False,
        "keep the role that the node is started in: no router may change it, and a prefill node sets no host memory "
        "aside for requests that a decode node retracts",
    )


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """KV transfer. Durations are seconds of the node's clock, except those that gloo and NCCL measure."""

    backend: str = flag(
        "auto",
        "how pages travel: cuda-ipc (GPU memory that processes of one host share), shm (host memory that they "
        "share), nccl (between GPUs) or gloo (host memory and sockets); auto: the first of these that both nodes can "
        "use and over which pages arrive; tcp: one port, for networks that are not trusted",
        names=("--kv-transfer",),
        choices=("auto", "cuda-ipc", "shm", "nccl", "gloo", "tcp"),
    )
    kv_port: int = flag(
        0, "with --kv-transfer tcp: where this node takes pages in; 0: any free port", whole(0, 65535), "PORT"
    )
    kv_tls: bool = flag(
        False,
        "with --kv-transfer tcp: mutual TLS 1.3, with nodes that have this flag too; certificates that the processes "
        "make for themselves are told over control connections, so it needs --fleet-key",
    )
    allow_mixed_numerics: bool = flag(
        False,
        "take KV pages of nodes whose kernels, instruction set or type differ: a stream may then part from what it "
        "would have been on one node where two tokens are nearly tied",
    )

    # staging: one ring per link
    slot_nbytes: int | None = flag(
        None,
        "size of a staging slot; None: 4 MiB, or 128 MiB where KV pages are on a GPU",
        whole(4096, 1 << 30),
        "BYTES",
        names=("--kv-slot-bytes",),
    )
    """Most bytes of pages in one chunk."""
    num_slots: int = flag(4, "staging slots of a link", whole(1, 64), "N", names=("--kv-slots",))
    """Most chunks in flight on one link."""

    # one transfer
    ready_timeout_s: float = flag(600.0, "how long a prompt waits for its decode node's pages", _long_seconds)
    """Backpressure: a prefill node waits this long for the decode node to reserve pages."""
    connect_timeout_s: float = 10.0
    """A receiving node frees reserved pages when the sending node has not connected for this long."""
    offer_timeout_s: float = flag(
        600.0, "how long reserved pages wait for the next pages of their prompt to be computed", _long_seconds
    )
    """Bounds the time of a prompt in the queue of the prefill node, and the time of one chunk in its forward."""
    transfer_timeout_s: float = flag(
        30.0, "longest time without progress while computed pages are on their way", _long_seconds
    )
    """A receiving node waits this long for the next chunk, while offered pages are on their way."""
    lease_s: float = flag(
        15.0,
        "a prefill node frees the pages of a transfer when the decode node is silent for this long",
        _seconds,
    )
    """The lease of pages that are handed off. The receiving node renews it three times as often."""

    # messages that arrive too early or too late
    park_s: float = 30.0
    """A message is parked this long until its key is opened, then answered with CancelTransfer."""
    max_parked: int = 4096
    """Most parked keys. The oldest one is dropped first."""
    tombstone_s: float = 120.0
    max_tombstones: int = 65536

    # peers
    ping_s: float = 1.0
    peer_timeout_s: float = flag(5.0, "silence after which a peer counts as dead", _seconds)
    """The link to a dead peer and its transfers fail."""
    forget_peer_s: float = 120.0
    """A receiving node forgets a sending node that is silent for this long. If it is alive, it says hello again."""
    rebuild_min_s: float = 0.1
    rebuild_max_s: float = 5.0
    """A dead link is built again after a pause, which doubles from rebuild_min_s to rebuild_max_s."""
    hello_retry_s: float = 15.0
    """A sending node that is connected, and has had no link for this long, says hello again."""

    # links
    bind_host: str = "127.0.0.1"
    """The interface of data connections, which the node binds and advertises."""
    op_timeout_s: float = 3.0
    """A send or receive that takes longer kills its link."""
    build_timeout_s: float = 10.0
    nccl_max_ctas: int = 4
    """Most thread blocks of one NCCL transfer. They are taken from the kernels of the model."""

    def check(self, *, has_fleet_key: bool) -> None:
        """Raise ConfigError for a flag that would have no effect, or that lacks another one."""
        if self.backend != "tcp" and (self.kv_tls or self.kv_port):
            raise ConfigError(
                f"--kv-port and --kv-tls are for --kv-transfer tcp, and it is {self.backend}: "
                "no other transport has one port or is encrypted"
            )
        if self.kv_tls and not has_fleet_key:
            raise ConfigError(
                "--kv-tls: certificates are told over the control connections, which are open to anyone: give every "
                "process the same --fleet-key FILE"
            )


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """The configuration of a node process."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    net: NetOptions = field(default_factory=NetOptions)
    transfer: TransferOptions = field(default_factory=TransferOptions)
    log_level: str = flag("info", "least severe event that is logged", choices=log.LEVELS)
    profile_dir: str = flag("baton-profiles", "folder of the traces of /start_profile", metavar="DIR")
