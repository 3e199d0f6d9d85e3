"""`router plan`: its flags, and where the answer goes.

Exit code 0 with an answer, whatever it says; 2 for a wrong flag or file; 1 if a process that simulated ended; 130
after Ctrl-C. Progress is on stderr.
"""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from planner.candidate import MAX_NODES
from planner.traffic.formats import TraceFormat
from planner.words import HOW_TO_INSTALL
from shared.cpu_cores import own_cores
from shared.errors import ConfigError
from shared.flags import FlagParser, fraction, whole

TRACE_FORMATS = tuple(map(str, TraceFormat))


def main(argv: Sequence[str]) -> int:
    """Plan, or compare."""
    args = build_parser().parse_args(argv)
    try:
        _check(args)
        return _plan(args)
    except ConfigError as error:
        print(f"router plan: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("router plan: stopped, without an answer", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has closed it, so nothing may be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> FlagParser:
    """The flags of `router plan`."""
    parser = FlagParser(
        prog="router plan",
        description="Whether prefill and decode of your traffic should be split, and with how many nodes of each: "
        "the schedulers that serve, simulated on a measured profile, which --measure makes "
        "(router plan --measure --help).",
        allow_abbrev=False,
    )
    machines = parser.add_argument_group("machines")
    price = fraction(1e-6, 1e9)
    for role, words in (
        ("", "every node"),
        ("prefill-", "a prefill node, where they differ"),
        ("decode-", "a decode node, where they differ"),
    ):
        machines.add_argument(f"--{role}profile", type=Path, metavar="FILE", help=f"of {words}")
        machines.add_argument(f"--{role}price", type=price, metavar="PRICE",
            help=f"for an hour of {words}; also gives goodput a unit of the price")  # fmt: skip
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--trace", type=Path, metavar="FILE", help="of recorded requests, or the router's own log"
    )
    traffic.add_argument("--trace-format", choices=TRACE_FORMATS, metavar="FORMAT",
        help=f"of the trace, if its first line does not tell: {', '.join(TRACE_FORMATS)}")  # fmt: skip
    traffic.add_argument(
        "--rate", type=fraction(1e-4, 1e5), metavar="N", help="without a trace: requests a second"
    )
    traffic.add_argument("--prompt", metavar="MEDIAN:P99",
        help="without a trace: tokens of prompts, also LOWEST..HIGHEST or one length")  # fmt: skip
    traffic.add_argument(
        "--output", metavar="MEDIAN:P99", help="without a trace: tokens of answers, in the same way"
    )
    traffic.add_argument("--requests", type=whole(20, 1_000_000), default=800, metavar="N",
        help="that count for each candidate and rate, at most: of a longer trace, windows that are drawn from all "
        "of it (default: 800)")  # fmt: skip
    traffic.add_argument(
        "--seed", type=whole(0, 1 << 32), default=0, metavar="SEED", help="of all that is drawn"
    )
    aim = parser.add_argument_group("aim")
    milliseconds = fraction(0.01, 3_600_000)
    aim.add_argument(
        "--slo-ttft-ms", type=milliseconds, required=True, metavar="MS", help="longest time to first token"
    )
    aim.add_argument("--slo-itl-ms", type=milliseconds, required=True, metavar="MS",
        help="longest mean time between the tokens of a request")  # fmt: skip
    aim.add_argument("--good-share", type=fraction(0.01, 1), default=0.9, metavar="SHARE",
        help="of the requests that must meet both (default: 0.9)")  # fmt: skip
    aim.add_argument("--nodes", type=node_range, default=range(1, 5), metavar="1..8",
        help="how many nodes there may be (default: 1..4)")  # fmt: skip
    policies = parser.add_argument_group("policies as experiments, in place of a plan")
    policies.add_argument("--compare", nargs="+", metavar="FLAG=VALUE,VALUE",
        help="of one fleet, every combination of values of schedule-policy, prefill-policy, decode-policy, "
        "chunked-prefill-size, local-prefill-tokens and enable-mixed-chunk=off,on; the first values are the "
        "base")  # fmt: skip
    policies.add_argument("--fleet", metavar="2P3D", help="that is compared; 5 are five nodes that do both")
    policies.add_argument("--seeds", type=whole(1, 100), default=3, metavar="N",
        help="runs of each, which differ in what is drawn (default: 3)")  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", metavar="FILE", help="write the whole answer; - is stdout, in place of the table"
    )
    output.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page of charts that needs no other file"
    )
    output.add_argument(
        "--jobs", type=whole(1, 1024), metavar="N", help="processes that simulate (default: one a core)"
    )
    return parser


def node_range(text: str) -> range:
    """An argparse type: `1..8`, or `4`."""
    least, dots, most = text.partition("..")
    numbers = (least, most if dots else least)
    if all(number.isdecimal() for number in numbers) and 1 <= int(numbers[0]) <= int(numbers[1]) <= MAX_NODES:
        return range(int(numbers[0]), int(numbers[1]) + 1)
    raise ArgumentTypeError(
        f"it is 1..8 or 4, with numbers from 1 to {MAX_NODES}, the smaller first; not {text!r}"
    )


def _check(args: Namespace) -> None:
    """What depends on several flags."""
    for what in ("profile", "price"):
        one, prefill, decode = (getattr(args, f"{role}{what}") for role in ("", "prefill_", "decode_"))
        if one is not None and (prefill is not None or decode is not None):
            raise ConfigError(
                f"--{what} is that of every node; --prefill-{what} and --decode-{what} replace it"
            )
        if (prefill is None) is not (decode is None):
            raise ConfigError(f"--prefill-{what} and --decode-{what} belong together")
    if args.profile is not None and args.prefill_price is not None:
        raise ConfigError(
            "--prefill-price and --decode-price are of two kinds of nodes, which need --prefill-profile and "
            "--decode-profile; --price is that of every node"
        )
    if args.profile is None and args.prefill_profile is None:
        raise ConfigError(
            "it needs --profile, or --prefill-profile and --decode-profile; --measure makes one"
        )
    if (args.compare is None) is not (args.fleet is None):
        raise ConfigError(
            "--compare and --fleet belong together: --compare schedule-policy=fcfs,lpm --fleet 2P2D"
        )
    paths = [path for path in (args.html, None if args.json in (None, "-") else Path(args.json)) if path]
    for path in paths:
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist")
        if path.is_dir():
            raise ConfigError(f"{path}: it is a folder")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise ConfigError(f"{path}: it may not be written")
    if args.html is not None and find_spec("matplotlib") is None:
        raise ConfigError(f"--html: matplotlib is missing: {HOW_TO_INSTALL}")
    if len(set(map(Path.absolute, paths))) < len(paths):
        raise ConfigError(f"{args.html}: --json and --html need a file each")


def _plan(args: Namespace) -> int:
    from rich.console import Console

    from planner.plan_answer import question_of, solve
    from planner.plan_workers import WorkerDied
    from planner.table import print_answer

    num_jobs = args.jobs or own_cores().num_threads
    try:
        answer = asyncio.run(
            solve(question_of(args), num_jobs, Console(stderr=True, highlight=False, soft_wrap=True))
        )
    except WorkerDied as error:
        print(f"router plan: error: {error}", file=sys.stderr)
        return 1
    if args.json == "-":
        sys.stdout.buffer.write(answer.to_json())
        sys.stdout.flush()
    else:
        print_answer(answer)
        if args.json is not None:
            _write(Path(args.json), answer.to_json())
    if args.html is not None:
        from planner.charts import write_html

        write_html(answer, args.html)
    return 0


def _write(path: Path, text: bytes) -> None:
    try:
        path.write_bytes(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
