"""`router plan --measure`: the command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner import require_packages
from planner.profile import Profile
from shared import cli
from shared.errors import ConfigError
from shared.flags import FlagParser

if TYPE_CHECKING:
    from rich.console import Console

PROG = "router plan --measure"


def make_parser() -> FlagParser:
    """The flags of a node, since those decide what is measured, and --out."""
    parser = cli.make_parser(
        PROG,
        "Measure on this machine, in about a minute, what a node with these flags costs, and write the profile "
        "that router plan reads. Give the flags with which your nodes serve.",
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=Path("profile.json"), metavar="FILE", help="where to write it"
    )
    cli.add_net_flags(parser, 0)
    cli.add_node_flags(parser)
    cli.add_fleet_flags(parser)
    cli.add_log_flags(parser)
    parser.set_defaults(log_level="warning")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the profile, say what makes it doubtful. Returns 0, 2 for a ConfigError, 130 for a signal."""
    parser = make_parser()
    args = parser.parse_args(argv)
    config = cli.node_config(parser, argv)
    try:
        require_packages()
        if not args.out.resolve().parent.is_dir():
            raise ConfigError(f"--out {args.out}: there is no folder {args.out.resolve().parent}")
        # What takes long to import: --help and a wrong flag do not wait for it.
        from rich.console import Console

        from planner.measure.phases import measure

        console = Console(stderr=True)
        with console.status("") as status:
            profile = measure(config, on_progress=status.update)
        profile.save(args.out)
    except (ConfigError, OSError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROG}: stopped, without a profile", file=sys.stderr)
        return 130
    show(profile, console)
    console.print(f"Written to {args.out}.", highlight=False)
    return 0


def show(profile: Profile, console: Console) -> None:
    """The costs in words, the worst residuals, and the remarks."""
    from rich.table import Table

    forward, node, transfer = profile.forward, profile.node, profile.transfer
    chunk = node.chunked_prefill_size
    table = Table(title=f"{profile.measured.model} on {profile.measured.machine}", show_header=False)
    table.add_row(f"prompt of {chunk} tokens", f"{1e3 * forward.extend_s([(0, chunk)]):.3g} ms")
    table.add_row(
        "decode step of 16 requests over 1000 tokens each", f"{1e3 * forward.decode_s(16, 16_000):.3g} ms"
    )
    table.add_row("transfer", f"{1e3 * transfer.latency_s:.3g} ms and {transfer.bytes_s / 1e9:.3g} GB/s")
    table.add_row("KV pool", f"{node.pool_tokens} tokens of {node.kv_bytes_per_token} bytes")
    worst = max(profile.measured.residuals, key=lambda one: abs(one.error))
    table.add_row("fit", f"off by {worst.error:+.0%} at most ({worst.what})")
    console.print(table)
    for remark in profile.measured.remarks:
        console.print(f"Note: {remark}", style="yellow", highlight=False)
