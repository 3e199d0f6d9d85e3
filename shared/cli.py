"""The flags that prefill-node, decode-node and router --local share. Flags that SGLang has too are named as there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shared.config import (
    CacheOptions,
    ModelOptions,
    NetOptions,
    NodeConfig,
    ScheduleOptions,
    TransferOptions,
)
from shared.errors import ConfigError
from shared.flags import FlagParser, add_flags, argv_of, options_of
from shared.scheduling.schedule_policy import POLICIES

_OF_ROUTERS = ("router_timeout_s", "fixed_role")


def make_parser(prog: str, description: str) -> FlagParser:
    """Make a parser whose help shows the defaults. It accepts no abbreviations."""
    return FlagParser(
        prog=prog,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    """Add --log-level."""
    add_flags(parser, "logging", NodeConfig, "log_level")


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Add the security flags, which routers and nodes share."""
    add_flags(parser, "security", NetOptions, "fleet_key", "insecure")


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Add the node flags that `router --local` passes to the nodes it starts."""
    add_flags(parser, "model", ModelOptions)
    add_flags(parser, "KV cache", CacheOptions)
    add_flags(parser, "scheduling", ScheduleOptions, choices={"schedule_policy": tuple(POLICIES)})
    add_flags(parser, "KV transfer", TransferOptions)
    add_flags(parser, "routers", NetOptions, *_OF_ROUTERS)
    add_flags(parser, "profiling", NodeConfig, "profile_dir")


def node_argv(args: argparse.Namespace) -> list[str]:
    """Return the flags of `add_node_flags` in `args` that differ from their defaults, as a command line."""
    whole_parts = (ModelOptions, CacheOptions, ScheduleOptions, TransferOptions)
    argv = [word for options in whole_parts for word in argv_of(options, args)]
    return [*argv, *argv_of(NetOptions, args, *_OF_ROUTERS), *argv_of(NodeConfig, args, "profile_dir")]


def add_net_flags(parser: argparse.ArgumentParser, default_port: int) -> None:
    """Add the flags that only a node that is started by hand needs."""
    by_hand = ("host", "port", "advertise_host", "node_id", "routers", "exit_with_parent", "drain_timeout_s")
    add_flags(parser, "network", NetOptions, *by_hand, "http_port", "http_host")
    parser.set_defaults(port=default_port)


def node_config(parser: FlagParser, argv: Sequence[str] | None) -> NodeConfig:
    """Parse a node's flags. Those that exclude each other end the process, as a wrong one does."""
    config = options_of(NodeConfig, parser.parse_args(argv))
    try:
        config.transfer.check(has_fleet_key=bool(config.net.fleet_key))
    except ConfigError as error:
        parser.error(str(error))
    return config
