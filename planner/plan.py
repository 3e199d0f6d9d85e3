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
from pathlib import Path

from planner import require_packages
from planner.traffic.reading import TraceFormat
from shared.cpu_cores import own_cores
from shared.errors import ConfigError
from shared.flags import FlagParser, fraction, whole

TRACE_FORMATS = tuple(map(str, TraceFormat))
MAX_NODES = 64


def main(argv: Sequence[str]) -> int:
    """Plan."""
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
    machines.add_argument("--profile", type=Path, required=True, metavar="FILE",
        help="of every node; --measure makes one")  # fmt: skip
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--trace", type=Path, metavar="FILE",
        help="of recorded requests, or the router's own log")  # fmt: skip
    traffic.add_argument("--trace-format", choices=TRACE_FORMATS, metavar="FORMAT",
        help=f"of the trace, if its first line does not tell: {', '.join(TRACE_FORMATS)}")  # fmt: skip
    traffic.add_argument("--rate", type=fraction(1e-4, 1e5), metavar="N",
        help="without a trace: requests a second")  # fmt: skip
    traffic.add_argument("--prompt", metavar="MEDIAN:P99",
        help="without a trace: tokens of prompts, also one length")  # fmt: skip
    traffic.add_argument("--output", metavar="MEDIAN:P99",
        help="without a trace: tokens of answers, in the same way")  # fmt: skip
    traffic.add_argument("--requests", type=whole(20, 1_000_000), default=800, metavar="N",
        help="that count for each candidate and rate, at most: of a longer trace, those that follow each other "
        "fastest (default: 800)")  # fmt: skip
    traffic.add_argument("--seed", type=whole(0, 1 << 32), default=0, metavar="SEED",
        help="of all that is drawn")  # fmt: skip
    aim = parser.add_argument_group("aim")
    milliseconds = fraction(0.01, 3_600_000)
    aim.add_argument("--slo-ttft-ms", type=milliseconds, required=True, metavar="MS",
        help="longest time to first token")  # fmt: skip
    aim.add_argument("--slo-itl-ms", type=milliseconds, required=True, metavar="MS",
        help="longest mean time between the tokens of a request")  # fmt: skip
    aim.add_argument("--good-share", type=fraction(0.01, 1), default=0.9, metavar="SHARE",
        help="of the requests that must meet both (default: 0.9)")  # fmt: skip
    aim.add_argument("--nodes", type=node_range, default=range(1, 5), metavar="1..8",
        help="how many nodes there may be (default: 1..4)")  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE",
        help="write the whole answer; - is stdout, in place of the table")  # fmt: skip
    output.add_argument("--html", type=Path, metavar="FILE",
        help="write a page of charts that needs no other file")  # fmt: skip
    output.add_argument("--jobs", type=whole(1, 1024), metavar="N",
        help="processes that simulate (default: one a core)")  # fmt: skip
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
    """What depends on several flags, on files and on packages."""
    require_packages()
    if args.html is not None and str(args.html) == args.json:
        raise ConfigError(f"{args.html}: --json and --html need a file each")
    for path in (args.html, None if args.json in (None, "-") else Path(args.json)):
        if path is not None:
            _write(path, b"", "ab")  # a plan takes minutes, after which it would be late to refuse


def _plan(args: Namespace) -> int:
    from rich.console import Console

    from planner.plan_answer import question_of, solve
    from planner.table import print_answer
    from planner.workers import WorkerDied

    num_jobs, console = (
        args.jobs or own_cores().num_threads,
        Console(stderr=True, highlight=False, soft_wrap=True),
    )
    try:
        answer = asyncio.run(solve(question_of(args), num_jobs, console))
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
        from planner.charts import html_of

        _write(args.html, html_of(answer))
    return 0


def _write(path: Path, text: bytes, mode: str = "wb") -> None:
    try:
        with path.open(mode) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
