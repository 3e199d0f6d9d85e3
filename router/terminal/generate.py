"""`router generate "prompt"`: stream one completion from a running router.

The text goes to standard output, everything else to standard error. Exit code 0 when it came to its end, 1 when not,
2 for a wrong flag, 130 after Ctrl-C, which aborts the request on its nodes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TextIO

import msgspec

from router.terminal.client import ClientError, RouterClient, add_client_flags, client_of, printable
from shared.flags import FlagParser, fraction, whole

_decoder = msgspec.json.Decoder()


@dataclass
class Told:
    """What the stream has said beside text. `finish` is why it ended, `choice` its latest event."""

    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    ends_line: bool = True
    finish: str = ""
    choice: dict[str, Any] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> str:
        """Another event; returns the text it adds."""
        num_tokens = (event.get("usage") or {}).get("completion_tokens", 0)
        if num_tokens > self.num_tokens:
            self.num_tokens, self.last_token = num_tokens, time.monotonic()
            self.first_token = self.first_token or self.last_token
        if not event["choices"]:
            return ""
        self.choice = event["choices"][0]
        self.finish = self.choice.get("finish_reason") or self.finish
        text = self.choice.get("text") or (self.choice.get("delta") or {}).get("content") or ""
        if text:
            self.ends_line = text.endswith("\n")
        return text

    def summary(self) -> str:
        """Tokens, rate and time to the first one, in a line."""
        if self.first_token is None or self.last_token is None:
            return "no tokens"
        spent = self.last_token - self.first_token
        rate = f", {(self.num_tokens - 1) / spent:.0f} tokens/s" if self.num_tokens > 1 and spent > 0 else ""
        ttft_ms = 1000 * (self.first_token - self.started)
        return f"{self.num_tokens} tokens{rate}, first after {ttft_ms:.0f} ms, ended by {self.finish}"


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    args = build_parser().parse_args(argv)
    told = Told()
    try:
        client = client_of(args)
        prompt = _read_stdin() if args.prompt == "-" else args.prompt
        stream(client, args, prompt, told, sys.stdout)
    except ClientError as e:
        _break_line(told)
        print(f"router generate: error: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has enough; nothing may be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        _break_line(told)
        print("aborted", file=sys.stderr)
        return 130
    _break_line(told)
    if args.timeline:
        show_timeline(told)
    if sys.stderr.isatty():
        print(told.summary(), file=sys.stderr)
    return 0


def stream(client: RouterClient, args: argparse.Namespace, prompt: str, told: Told, out: TextIO) -> None:
    """Send the request and write its text as it comes. Raises ClientError."""
    path, body = request_of(args, prompt)
    for_people = out.isatty()
    with closing(client.events(path, body)) as payloads:
        for payload in payloads:
            text = told.take(_decoder.decode(payload))
            out.write(printable(text) if for_people else text)
            out.flush()


def request_of(args: argparse.Namespace, prompt: str) -> tuple[str, dict[str, object]]:
    """The route and the body. What was not given is left to the router's defaults."""
    body: dict[str, object] = {
        "max_tokens": args.max_new_tokens,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_timeline": args.timeline,
    }
    for name in ("temperature", "top_p", "seed", "stop"):
        if getattr(args, name) is not None:
            body[name] = getattr(args, name)
    if not args.chat:
        return "/v1/completions", {**body, "prompt": prompt}
    system = [{"role": "system", "content": args.system}] if args.system else []
    return "/v1/chat/completions", {**body, "messages": [*system, {"role": "user", "content": prompt}]}


def show_timeline(told: Told) -> None:
    """The stages on both nodes, to standard error."""
    from rich.console import Console  # only who asks for the table waits for rich

    from router.terminal.stages import stage_table

    stages = [(stamp["role"], stamp["stage"], stamp["time"]) for stamp in told.choice.get("timeline", [])]
    moved = told.choice.get("kv_pages_transferred", 0), told.choice.get("kv_bytes_transferred", 0)
    Console(stderr=True).print(stage_table(stages, *moved))


def build_parser() -> argparse.ArgumentParser:
    """Its flags; sampling parameters have the names of the native API."""
    parser = FlagParser(
        prog="router generate", description="Stream one completion from a running router.", allow_abbrev=False
    )
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    add_client_flags(parser)
    parser.add_argument("--chat", action="store_true", help="the prompt is a message to a chat model")
    parser.add_argument("--system", metavar="TEXT", help="system prompt, with --chat")
    parser.add_argument(
        "--max-new-tokens", type=whole(1), default=128, metavar="TOKENS", help="most output tokens (128)"
    )
    parser.add_argument("--temperature", type=fraction(0, 100), help="0 is greedy (the router's default)")
    parser.add_argument("--top-p", type=fraction(0, 1), help="nucleus sampling (the router's default)")
    parser.add_argument("--seed", type=whole(0, (1 << 63) - 1), help="makes sampling repeatable (random)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may repeat")
    parser.add_argument("--timeline", action="store_true", help="show where its time went")
    return parser


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as e:
        raise ClientError(f"the prompt is not valid text: {e}") from None


def _break_line(told: Told) -> None:
    """What comes next, a prompt or another program's output, begins on a line of its own."""
    if not told.ends_line:
        print(flush=True)
