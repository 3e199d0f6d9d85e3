"""`router top`: the live state of a running router in a terminal, every second. q or Ctrl-C ends it.

Without a terminal, or with --once, it prints one snapshot. Exit code 0, or 1 if no router answers.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from router.api.live_feed import NO_BOTTLENECK, PERCENTILES, LiveEvent, NodeNow, Sample
from router.terminal.client import ClientError, RouterClient, printable
from shared.flags import FlagParser

KEY_VARIABLE = "BATON_API_KEY"

_TIMEOUT_S = 10.0
_KEY_WAIT_S = 0.2
_RETRY_S = 1.0
_PLAIN_WIDTH = 140
_FINAL_STATUSES = (401, 403, 404)
_STYLES = dict.fromkeys(("live", "ok"), "green") | dict.fromkeys(
    ("gone", "refused", "unavailable", "stopping"), "bold red"
)

_decoder = msgspec.json.Decoder(LiveEvent)


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    args = build_parser().parse_args(argv)
    client = RouterClient(args.url, args.api_key or os.environ.get(KEY_VARIABLE))
    try:
        if args.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
            console.print(live_view(_decode(client, client.get("/live/state", _TIMEOUT_S)), client.url))
        else:
            watch(client)
    except ClientError as e:
        print(f"router top: error: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of the output has closed it, so nothing may be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def build_parser() -> FlagParser:
    """The flags of `router top`."""
    parser = FlagParser(
        prog="router top", description="Show the live state of a running router.", allow_abbrev=False
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the router serves")
    parser.add_argument("--api-key", metavar="KEY",
        help=f"if the router asks for one; other users see it in `ps`, but not ${KEY_VARIABLE}")  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print one snapshot and end")
    return parser


def watch(client: RouterClient) -> None:
    """Show the router until q or Ctrl-C, also across its restarts. Raises ClientError if the router refuses."""
    follower = Follower(client)
    follower.start()
    with _keys() as pressed, Live(screen=True, auto_refresh=False) as live:
        while follower.refusal is None and not pressed("qQ"):
            event, trouble = follower.latest, follower.trouble
            shown = Text(f"{trouble}; trying again. q ends.", "yellow")
            live.update(live_view(event, client.url, trouble) if event is not None else shown, refresh=True)
    if follower.refusal is not None:
        raise follower.refusal


class Follower(threading.Thread):
    """Follows a router's live feed. The thread replaces each attribute as a whole, so that others can read it."""

    def __init__(self, client: RouterClient) -> None:
        super().__init__(name="live feed", daemon=True)
        self._client = client
        self.latest: LiveEvent | None = None
        self.trouble = "connecting"
        self.refusal: ClientError | None = None
        """The refusal of the router, after which the thread does not try again."""

    def run(self) -> None:
        """Follow until the process ends or the router refuses."""
        while True:
            try:
                for payload in self._client.events("/live", silence_s=_TIMEOUT_S):
                    self.latest, self.trouble = _decode(self._client, payload), ""
            except ClientError as e:
                self.trouble = str(e)
                if e.status in _FINAL_STATUSES:
                    self.refusal = e
                    return
            time.sleep(_RETRY_S)


def live_view(event: LiveEvent, url: str, trouble: str = "") -> RenderableType:
    """The screen. With `trouble`, the event is old, and the screen says so."""
    router = event.router
    title = Text.assemble(
        ("Baton ", "bold"),
        printable(router.model) or "no model yet",
        "  ",
        (router.status, _STYLES.get(router.status, "yellow")),
        f"  router {router.worker}" if router.worker is not None else "",
        (f"  up {_duration(router.uptime_s)}  {printable(url)}", "dim"),
    )
    parts: list[RenderableType] = [title]
    if trouble:
        parts.append(Text(f"{printable(trouble)}; trying again, this is the last that was heard", "bold red"))
    elif router.reason:
        parts.append(Text(printable(router.reason), "yellow"))
    if event.verdict:
        parts.append(Text(printable(event.verdict), "dim" if event.verdict == NO_BOTTLENECK else "yellow"))
    if event.advice:
        parts.append(Text(f"plan: {printable(event.advice)}", "dim"))
    if event.samples:
        parts += [Text(), _traffic(event.samples[-1], router.percentile_window_s)]
    parts += [Text(), _nodes(event.nodes)]
    for node in event.nodes:
        if node.reason:
            parts.append(Text(f"{_name(node)}: {printable(node.reason)}", _STYLES.get(node.state, "yellow")))
    return Group(*parts)


def _traffic(now: Sample, window_s: float) -> Table:
    table = Table.grid(padding=(0, 2))
    shares = [f"p{100 * share:g}" for share in PERCENTILES]
    none = ["–"] * len(PERCENTILES)
    for row in (
        ("streaming", str(now.num_running_reqs), "", f"last {window_s:g} s", *shares),
        ("waiting", str(now.num_queue_reqs), "", "first token", *map(_duration, now.ttft_s or ()), *none),
        ("tokens/s", _number(now.tokens_per_s), "", "inter-token", *map(_duration, now.itl_s or ()), *none),
        (
            "KV transfer",
            f"{_bytes(now.decode.kv_bytes_per_s)}/s",
            "",
            "refused/s",
            _number(now.rejected_per_s),
        ),
    ):
        table.add_row(*row[: 4 + len(PERCENTILES)])
    return table


def _nodes(nodes: Sequence[NodeNow]) -> RenderableType:
    if not nodes:
        return Text("no nodes yet", "dim")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("node", "role", "state"):
        table.add_column(title, no_wrap=True)
    for title in (
        "pairing",
        "waiting",
        "transfer",
        "running",
        "held/cached/free",
        "tokens/s",
        "KV/s",
        "links",
    ):
        table.add_column(title, justify="right")
    for node in nodes:
        state = node.state if node.loaded is None else f"{node.state} {100 * node.loaded:.0f}%"
        table.add_row(_name(node), node.role, Text(state, _STYLES.get(node.state, "yellow")), *_load(node))
    return Group(table, *(_links(node) for node in nodes if node.links_words))


def _links(node: NodeNow) -> Text:
    words = printable(" · ".join(node.links_words))
    return Text(f"{_name(node)} links: {words}", "dim", no_wrap=True, overflow="ellipsis")


def _load(node: NodeNow) -> Sequence[str]:
    if not node.num_pages:
        return ()  # no Pong has come yet
    is_prefill = node.role == "prefill"
    return (
        str(node.num_bootstrapping_reqs),
        str(node.num_queue_reqs),
        str(node.num_transferring_reqs),
        str(node.num_running_reqs),
        f"{node.num_held_pages}/{node.num_cached_pages}/{node.num_free_pages}",
        f"{_number(node.prompt_tokens_per_s)} in" if is_prefill else f"{_number(node.tokens_per_s)} out",
        f"{_bytes(node.kv_bytes_per_s)}/s",
        " ".join(f"{number} {transport}" for transport, number in node.links.items()) or "0",
    )


def _name(node: NodeNow) -> str:
    return printable(node.node_id or node.address)


def _number(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 10 else f"{value:,.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.{0 if seconds >= 0.1 else 1}f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _decode(client: RouterClient, payload: bytes) -> LiveEvent:
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as e:
        raise ClientError(f"{client.url} is no router, or another version of Baton: {e}") from e


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[str], bool]]:
    """A function that waits a moment and returns whether one of some keys was pressed."""
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
