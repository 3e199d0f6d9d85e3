"""The flags that prefill-node, decode-node and router --local have in common; SGLang's names where it has them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shared import log
from shared.config import (
    CacheOptions,
    ModelOptions,
    NetOptions,
    NodeConfig,
    ScheduleOptions,
    TransferOptions,
)
from shared.cpu_cores import CpuCores


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser whose help shows every default."""
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )


def whole(minimum: int, maximum: int = 1 << 40):  # type: ignore[no-untyped-def]
    """An argparse type: an int within bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} is not between {minimum} and {maximum}")
        return value

    return parse


def fraction(minimum: float, maximum: float):  # type: ignore[no-untyped-def]
    """An argparse type: a float within bounds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} is not between {minimum} and {maximum}")
        return value

    return parse


def cores(text: str) -> CpuCores:
    """An argparse type: see `CpuCores.parse`."""
    try:
        return CpuCores.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def retract_interval(text: str) -> int:
    """An argparse type: 0, or at least 2; at 1 a request would be retracted before its one new token is known."""
    value: int = whole(0)(text)
    if value == 1:
        raise argparse.ArgumentTypeError("1 is not 0 (never) or at least 2")
    return value


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    """Add --log-level."""
    parser.add_argument(
        "--log-level", default="info", choices=log.LEVELS, help="least severe event that is logged"
    )


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say who may join: the same on routers and nodes."""
    group = parser.add_argument_group("security")
    group.add_argument(
        "--fleet-key", metavar="FILE", help="shared secret of the fleet; needed beyond loopback"
    )
    group.add_argument("--insecure", action="store_true", help="listen beyond loopback without --fleet-key")


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a node that `router --local` hands to the nodes it starts."""
    _node_actions(parser)


def node_argv(args: argparse.Namespace) -> list[str]:
    """The node flags in `args` that differ from their defaults, as a command line."""
    argv: list[str] = []
    for action in _node_actions(argparse.ArgumentParser()):
        value = getattr(args, action.dest)
        if value == action.default:
            continue
        argv.append(action.option_strings[0])
        if action.nargs != 0:
            argv.append(str(value))
    return argv


def _node_actions(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    model, cache, schedule = ModelOptions(), CacheOptions(), ScheduleOptions()
    net, transfer = NetOptions(), TransferOptions()
    actions: list[argparse.Action] = []

    group = parser.add_argument_group("model")
    add = group.add_argument
    actions += [
        add(
            "--model",
            "--model-path",
            default=model.model,
            metavar="DIR_OR_HUB_ID",
            help="'builtin', a folder or a hub id",
        ),
        add("--device", default=model.device, help="auto, cpu, cuda or cuda:N"),
        add(
            "--dtype",
            default=model.dtype,
            choices=("auto", "float32", "bfloat16", "float16"),
            help="of weights and KV; auto: as in the checkpoint",
        ),
        add(
            "--context-length",
            type=whole(1),
            metavar="TOKENS",
            help="longest prompt plus output; None: as in the model",
        ),
        add(
            "--cpu-cores",
            type=cores,
            metavar="LIST",
            help="cores of forwards, one thread pinned to each, like 0-3,8; or any:N: N threads that are not pinned, "
            "at most one a core; None: every core that this process may use; a router shares its own out to the "
            "nodes that it starts",
        ),
        add(
            "--cpu-kernels",
            default=model.cpu_kernels,
            choices=("auto", "native", "torch"),
            help="what computes the model on a CPU: kernels in C++, built at the first start, for bfloat16 with "
            "AVX-512, or torch; auto: native where it can be had",
        ),
    ]
    add = parser.add_argument_group("KV cache").add_argument
    actions += [
        add(
            "--page-size",
            type=whole(1, 1024),
            default=cache.page_size,
            metavar="TOKENS",
            help="tokens in a KV page",
        ),
        add(
            "--max-total-tokens",
            type=whole(1),
            metavar="TOKENS",
            help="size of the KV pool; None: from free memory",
        ),
        add(
            "--mem-fraction-static",
            type=fraction(0.01, 0.99),
            default=cache.mem_fraction_static,
            help="share of the device's memory for weights and KV",
        ),
        add("--disable-radix-cache", action="store_true", help="forget every prefix when its request ends"),
        add(
            "--host-kv-tokens",
            type=whole(0),
            metavar="TOKENS",
            help="decode nodes: host memory for the KV of retracted requests; 0: none; None: as large as the KV "
            "pool, at most 4 GiB, and none on a CPU unless --retract-policy is host",
        ),
    ]
    add = parser.add_argument_group("scheduling").add_argument
    actions += [
        add(
            "--chunked-prefill-size",
            type=whole(1),
            default=schedule.chunked_prefill_size,
            metavar="TOKENS",
            help="longest part of a prompt computed in one forward",
        ),
        add(
            "--max-prefill-tokens",
            type=whole(1),
            default=schedule.max_prefill_tokens,
            metavar="TOKENS",
            help="most prompt tokens in one forward",
        ),
        add(
            "--max-running-requests",
            type=whole(1, 65536),
            default=schedule.max_running_requests,
            metavar="N",
            help="requests that hold KV at the same time",
        ),
        add(
            "--schedule-policy",
            default=schedule.schedule_policy,
            choices=("fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key"),
            help="order of the waiting queue: first come, longest cached prefix, most wanted prefix, longest "
            "output, random, or most common routing key among the running",
        ),
        add(
            "--enable-mixed-chunk",
            action="store_true",
            help="decode nodes: a prompt that is prefilled there goes through the forward together with a decode "
            "step of all that run, so that it does not stall them",
        ),
        add(
            "--random-seed",
            type=whole(0, (1 << 63) - 1),
            default=schedule.random_seed,
            metavar="SEED",
            help="of --schedule-policy random",
        ),
        add(
            "--in-batch-prefix-caching-deprioritize-threshold",
            dest="in_batch_prefix_deprioritize_threshold",
            type=whole(1),
            default=schedule.in_batch_prefix_deprioritize_threshold,
            metavar="TOKENS",
            help="a request waits while another computes at least so many tokens of a prefix that they share",
        ),
        add(
            "--enable-priority-scheduling",
            action="store_true",
            help="serve requests with a higher priority first; they may retract running ones with a lower",
        ),
        add(
            "--schedule-low-priority-values-first",
            action="store_true",
            help="a lower value of priority goes first",
        ),
        add(
            "--priority-scheduling-preemption-threshold",
            type=whole(0),
            default=schedule.priority_scheduling_preemption_threshold,
            metavar="DIFFERENCE",
            help="running requests whose priority is lower by more than this may be retracted for a waiting one",
        ),
        add(
            "--priority-aging-steps",
            type=whole(0),
            default=schedule.priority_aging_steps,
            metavar="STEPS",
            help="forwards after which a request counts as one step of priority higher, under every policy, so "
            "that nobody starves; 0: never",
        ),
        add(
            "--schedule-conservativeness",
            type=fraction(0.0, 10.0),
            default=schedule.schedule_conservativeness,
            help="share of future output that admission reserves room for; larger retracts less",
        ),
        add(
            "--num-reserved-decode-tokens",
            type=whole(0),
            default=schedule.num_reserved_decode_tokens,
            metavar="TOKENS",
            help="room kept for each running request before pages are reserved for an arrival",
        ),
        add(
            "--disable-overlap-schedule",
            action="store_true",
            help="plan a step only after the last one is committed",
        ),
        add(
            "--retract-policy",
            default=schedule.retract_policy,
            choices=("auto", "host", "recompute"),
            help="decode nodes: where a retracted request's KV goes: copied to host memory and back, dropped and "
            "prefilled again, or whichever is estimated to be faster",
        ),
        add(
            "--retracted-wait-steps",
            type=whole(0),
            default=schedule.retracted_wait_steps,
            metavar="STEPS",
            help="decode nodes: once a retracted request has waited so many steps, it comes before every arrival",
        ),
        add(
            "--grammar-backend",
            default=schedule.grammar_backend,
            choices=("xgrammar", "none"),
            help="what follows json_schema, regex and ebnf; none: such requests are refused",
        ),
        add(
            "--grammar-compile-timeout-s",
            type=fraction(0.1, 3600),
            default=schedule.grammar_compile_timeout_s,
            help="a grammar that takes longer to compile fails its request",
        ),
        add(
            "--enable-jump-forward",
            action="store_true",
            help="append text that a grammar forces at once, instead of token by token: faster, but it is spelled in "
            "the tokenizer's way, not in the tokens that the model prefers; for all nodes of a fleet, or for none",
        ),
        add(
            "--debug-checks",
            action="store_true",
            help="check what each forward reads against what was launched before",
        ),
        add(
            "--retract-every",
            type=retract_interval,
            default=schedule.retract_every,
            metavar="STEPS",
            help="test knob: force a retraction every so many decode steps; 0: never",
        ),
    ]
    add = parser.add_argument_group("KV transfer").add_argument
    actions += [
        add(
            "--kv-transfer",
            default=transfer.backend,
            choices=("auto", "gloo", "shm", "nccl"),
            help="how pages travel: shm (memory that processes of one host share), gloo (host memory and sockets) or "
            "nccl (between GPUs); auto: shm where both nodes are on one host and compute on its CPUs, else gloo",
        ),
        add(
            "--kv-slot-bytes",
            type=whole(4096, 1 << 30),
            default=transfer.slot_nbytes,
            metavar="BYTES",
            help="size of a staging slot",
        ),
        add(
            "--kv-slots",
            type=whole(1, 64),
            default=transfer.num_slots,
            metavar="N",
            help="staging slots of a link",
        ),
        add(
            "--ready-timeout-s",
            type=fraction(0.1, 86400),
            default=transfer.ready_timeout_s,
            help="how long a prompt waits for its decode node's pages",
        ),
        add(
            "--offer-timeout-s",
            type=fraction(0.1, 86400),
            default=transfer.offer_timeout_s,
            help="how long reserved pages wait for the next pages of their prompt to be computed",
        ),
        add(
            "--transfer-timeout-s",
            type=fraction(0.1, 86400),
            default=transfer.transfer_timeout_s,
            help="longest time without progress while computed pages are on their way",
        ),
        add(
            "--lease-s",
            type=fraction(0.5, 3600),
            default=transfer.lease_s,
            help="pages held for a decode node that says nothing are released after this",
        ),
        add(
            "--peer-timeout-s",
            type=fraction(0.5, 3600),
            default=transfer.peer_timeout_s,
            help="silence after which the other end of a pair counts as dead",
        ),
        add(
            "--router-timeout-s",
            type=fraction(0.5, 3600),
            default=net.router_timeout_s,
            help="silence after which a router's requests are given up",
        ),
    ]
    add = parser.add_argument_group("profiling").add_argument
    actions += [
        add(
            "--profile-dir",
            default=NodeConfig().profile_dir,
            metavar="DIR",
            help="where /start_profile has nodes write their traces",
        ),
    ]
    return actions


def add_net_flags(parser: argparse.ArgumentParser, default_port: int) -> None:
    """Add the flags that only a node started by hand needs."""
    net = NetOptions()
    add = parser.add_argument_group("network").add_argument
    add("--host", default=net.host, help="interface of the control socket and of KV links")
    add("--port", type=whole(0, 65535), default=default_port, help="control port; 0: a free one")
    add("--advertise-host", metavar="HOST", help="name under which others reach this node; None: --host")
    add("--node-id", default=net.node_id, help="name of this node; empty: made from role, host and port")
    add("--router", action="append", default=[], metavar="HOST[:PORT]", help="router to join; may repeat")
    add("--exit-with-parent", action="store_true", help="stop when standard input closes")


def node_config(args: argparse.Namespace) -> NodeConfig:
    """The node's configuration from parsed flags."""
    return NodeConfig(
        model=ModelOptions(
            model=args.model,
            device=args.device,
            dtype=args.dtype,
            context_length=args.context_length,
            cpu_cores=args.cpu_cores,
            cpu_kernels=args.cpu_kernels,
        ),
        cache=CacheOptions(
            page_size=args.page_size,
            max_total_tokens=args.max_total_tokens,
            mem_fraction_static=args.mem_fraction_static,
            disable_radix_cache=args.disable_radix_cache,
            host_kv_tokens=args.host_kv_tokens,
        ),
        schedule=ScheduleOptions(
            chunked_prefill_size=args.chunked_prefill_size,
            max_prefill_tokens=args.max_prefill_tokens,
            max_running_requests=args.max_running_requests,
            schedule_policy=args.schedule_policy,
            enable_mixed_chunk=args.enable_mixed_chunk,
            random_seed=args.random_seed,
            in_batch_prefix_deprioritize_threshold=args.in_batch_prefix_deprioritize_threshold,
            enable_priority_scheduling=args.enable_priority_scheduling,
            schedule_low_priority_values_first=args.schedule_low_priority_values_first,
            priority_scheduling_preemption_threshold=args.priority_scheduling_preemption_threshold,
            priority_aging_steps=args.priority_aging_steps,
            schedule_conservativeness=args.schedule_conservativeness,
            num_reserved_decode_tokens=args.num_reserved_decode_tokens,
            disable_overlap_schedule=args.disable_overlap_schedule,
            grammar_backend=args.grammar_backend,
            grammar_compile_timeout_s=args.grammar_compile_timeout_s,
            enable_jump_forward=args.enable_jump_forward,
            debug_checks=args.debug_checks,
            retract_policy=args.retract_policy,
            retracted_wait_steps=args.retracted_wait_steps,
            retract_every=args.retract_every,
        ),
        net=NetOptions(
            host=args.host,
            port=args.port,
            advertise_host=args.advertise_host,
            node_id=args.node_id,
            routers=tuple(args.router),
            fleet_key=args.fleet_key,
            insecure=args.insecure,
            exit_with_parent=args.exit_with_parent,
            router_timeout_s=args.router_timeout_s,
        ),
        transfer=TransferOptions(
            backend=args.kv_transfer,
            slot_nbytes=args.kv_slot_bytes,
            num_slots=args.kv_slots,
            ready_timeout_s=args.ready_timeout_s,
            offer_timeout_s=args.offer_timeout_s,
            transfer_timeout_s=args.transfer_timeout_s,
            lease_s=args.lease_s,
            peer_timeout_s=args.peer_timeout_s,
        ),
        log_level=args.log_level,
        profile_dir=args.profile_dir,
    )
