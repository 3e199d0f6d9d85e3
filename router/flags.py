"""The flags of `router`, and the configuration that they make. What serves is not imported here: --help is quick."""

from __future__ import annotations

import argparse
import functools
import json
import re
from dataclasses import replace

from router.config import (
    ConnectionOptions,
    DispatchOptions,
    FleetOptions,
    HttpLimits,
    HttpOptions,
    RouterConfig,
)
from router.dispatch.placement import POLICIES
from router.topology import LocalTopology, parse_address, parse_local
from shared import cli
from shared.config import DEFAULT_CONTROL_PORT
from shared.errors import ConfigError
from shared.flags import add_flags, options_of
from shared.model.files import BUILTIN_MODEL
from shared.protocol.messages import Role

_HTTP_FLAGS = (
    *("host", "port", "router_workers", "prometheus_port"),
    *("log_requests", "otlp_traces_endpoint", "served_model_name", "chat_template", "skip_tokenizer_init"),
    *("tool_call_parser", "reasoning_parser"),
)


def build_parser() -> argparse.ArgumentParser:
    """All flags: the router's own, and those that it hands to the nodes it starts."""
    parser = cli.make_parser("router", "Serve a model: start nodes on this machine, or join running ones.")
    parser.epilog = "`router plan` tells whether splitting helps your traffic, and with how many nodes."
    _add_topology_flags(parser)
    http = add_flags(parser, "HTTP", HttpOptions, *_HTTP_FLAGS)
    http.add_argument("--allowed-origins", type=origins, action="append", default=[], metavar="ORIGIN",
        help="pages that browsers let in: https://HOST[:PORT], a JSON list of those, or *; may repeat")  # fmt: skip
    add_flags(parser, "limits of one request", HttpLimits)
    _add_key_flags(parser)
    add_flags(parser, "HTTP connections", ConnectionOptions)
    policies = tuple(POLICIES)
    choices = {"prefill_policy": policies, "decode_policy": policies}
    add_flags(parser, "dispatch", DispatchOptions, choices=choices)
    cli.add_fleet_flags(parser)
    cli.add_log_flags(parser)
    cli.add_node_flags(parser)
    parser.set_defaults(model=None)
    return parser


def router_config(args: argparse.Namespace) -> RouterConfig:
    """The configuration from parsed flags. Raises ConfigError for flags that exclude each other."""
    from router.http.api_keys import keys_from_environment

    join = (*((Role.PREFILL, address) for address in args.prefill), *((Role.DECODE, a) for a in args.decode))
    if (join or args.discovery) and args.local is not None:
        raise ConfigError(
            "--local starts nodes; --prefill, --decode and --discovery join running ones: give one or the other"
        )
    local = LocalTopology(0, 0) if join or args.discovery else args.local or LocalTopology(1, 1)
    starts_nodes = bool(local.node_ids())
    if not starts_nodes and (stray := [flag for flag in _node_flags(args) if flag.startswith("--")]):
        raise ConfigError(
            f"{', '.join(stray)}: only for nodes that --local starts; give it to the nodes themselves"
        )
    return RouterConfig(
        model=args.model or (BUILTIN_MODEL if starts_nodes else None),
        fleet=FleetOptions(
            local=local,
            join=join,
            discovery=tuple(args.discovery),
            control_host=args.control_host,
            control_port=_control_port(args, starts_nodes),
            fleet_key=tuple(args.fleet_key),
            insecure=args.insecure,
            node_argv=_node_argv(args) if starts_nodes else (),
            cpu_cores=args.cpu_cores,
        ),
        http=replace(
            options_of(HttpOptions, args),
            api_keys=(*args.api_key, *keys_from_environment("BATON_API_KEYS")),
            admin_api_keys=(*args.admin_api_key, *keys_from_environment("BATON_ADMIN_API_KEYS")),
            allowed_origins=tuple(dict.fromkeys(o for some in args.allowed_origins for o in some)),
        ),
        connections=options_of(ConnectionOptions, args),
        dispatch=options_of(DispatchOptions, args),
        log_level=args.log_level,
    )


def origins(text: str) -> tuple[str, ...]:
    """An argparse type: one origin, or a JSON list of them, as in vLLM."""
    given = json.loads(text) if text.startswith("[") else [text]
    for origin in given:
        if not isinstance(origin, str) or not re.fullmatch(r"\*|https?://[^/\s]+", origin):
            raise argparse.ArgumentTypeError(f"{origin!r} is not like https://HOST[:PORT], and not *")
    return tuple(given)


def _control_port(args: argparse.Namespace, starts_nodes: bool) -> int:
    """Nodes on this machine are told the port, so that it can be any, and several routers have room here."""
    if args.control_port is not None:
        return int(args.control_port)
    return 0 if starts_nodes else DEFAULT_CONTROL_PORT


def _node_flags(args: argparse.Namespace, **changed: object) -> list[str]:
    return cli.node_argv(argparse.Namespace(**{**vars(args), "model": BUILTIN_MODEL, **changed}))


def _node_argv(args: argparse.Namespace) -> tuple[str, ...]:
    model = ["--model", args.model] if args.model else []
    fleet_key = [word for path in args.fleet_key for word in ("--fleet-key", path)]
    return (
        *_node_flags(args, cpu_cores=None),  # each node gets its share of them
        *model,
        *fleet_key,
        "--log-level",
        args.log_level,
    )


def _add_topology_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which nodes")
    group.add_argument(
        "--local",
        type=parse_local,
        metavar="2P1D",
        help="start this many prefill and decode nodes here (None: 1P1D, unless nodes are joined); "
        "0P1D is one node that does both, 'none' waits for nodes that join by themselves",
    )
    for role in Role:
        group.add_argument(
            f"--{role}",
            action="append",
            default=[],
            type=functools.partial(parse_address, role),
            metavar="HOST[:PORT]",
            help=f"join a running {role} node; may repeat",
        )
    add_flags(parser, "discovery of nodes", FleetOptions, "discovery")
    add_flags(parser, "control port", FleetOptions, "control_host", "control_port")


def _add_key_flags(parser: argparse.ArgumentParser) -> None:
    """Other users of this machine can see its command lines: files and the environment are the better places."""
    title = "API keys (also $BATON_API_KEYS, $BATON_ADMIN_API_KEYS: KEY,KEY)"
    group = add_flags(
        parser, title, HttpOptions, "api_key_file", "admin_api_key_file", "share_cache_across_api_keys"
    )
    for flag, what in (
        ("--api-key", "clients must send one of these as a bearer token, except to /health"),
        ("--admin-api-key", "routes that change the service need one of these instead"),
    ):
        group.add_argument(
            flag, action="extend", nargs="+", default=[], metavar="KEY", help=f"{what}; may repeat"
        )
