"""`router top`: the live state of a running router in a terminal, renewed every second. q or Ctrl-C ends it.

Without a terminal, or with --once, one snapshot is printed. Exit code 0, or 1 when there is none to print.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from router.api.live_feed import LiveEvent
from router.terminal.client import ClientError, RouterClient, add_client_flags, client_of, printable
from router.terminal.live_view import live_view
from router.terminal.watcher import Watcher
from shared.flags import FlagParser

_SNAPSHOT_TIMEOUT_S = 10.0
_KEY_WAIT_S = 0.2
_PLAIN_WIDTH = 140


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    args = build_parser().parse_args(argv)
    try:
        client = client_of(args)
        if args.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            print_snapshot(client)
        else:
            watch(client)
    except ClientError as e:
        print(f"router top: error: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has enough; nothing may be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Its flags."""
    parser = FlagParser(
        prog="router top", description="Show the live state of a running router.", allow_abbrev=False
    )
    add_client_flags(parser)
    parser.add_argument("--once", action="store_true", help="print one snapshot and end")
    return parser


def print_snapshot(client: RouterClient) -> None:
    """One look, plain where standard output is no terminal. Raises ClientError."""
    try:
        event = msgspec.json.decode(client.get("/live/state", _SNAPSHOT_TIMEOUT_S), type=LiveEvent)
    except msgspec.DecodeError as e:
        raise ClientError(f"{client.url} is no router, or another version of Baton: {e}") from e
    console = (
        Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_PLAIN_WIDTH)
    )
    console.print(live_view(event, event.samples, client.url))


def watch(client: RouterClient) -> None:
    """Until q or Ctrl-C; survives the router going away. Raises Refused when it never can be watched."""
    watcher = Watcher(client)
    watcher.start()
    try:
        with _keys() as pressed, Live(screen=True, auto_refresh=False) as live:
            while watcher.refusal is None and not pressed("qQ"):
                if watcher.news.is_set():
                    watcher.news.clear()
                    live.update(_screen(watcher, client.url), refresh=True)
    finally:
        watcher.stop()
    if watcher.refusal is not None:
        raise watcher.refusal


def _screen(watcher: Watcher, url: str) -> RenderableType:
    if watcher.latest is None:
        return Text(f"{printable(watcher.trouble)}; trying again. q ends.", "yellow")
    return live_view(watcher.latest, watcher.samples, url, watcher.trouble)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[str], bool]]:
    """A function that waits a moment and says whether one of some keys was pressed."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(keys: str) -> bool:
        ready, _, _ = select.select([fd], [], [], _KEY_WAIT_S)
        return bool(ready) and os.read(fd, 1).decode("latin-1") in keys

    tty.setcbreak(fd)
    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
