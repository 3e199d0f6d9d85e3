"""Reads the log of a router with --log-requests; other lines are skipped. `router/api/request_log.py` writes it."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

from planner.traffic.arrival import Arrival, BadLine, whole_number
from router.api.prefix_hashes import HASH_NBYTES

_EVENT = re.compile(rb'^[^"]*?\brequest (request_id=.*)$')
"""No quote may stand before it: the values of other events that a client may choose are quoted."""
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)(?: |$)')


class RouterLog:
    """A line may have several prompts, and a prompt several answers. Every answer is one request of the trace."""

    def __init__(self) -> None:
        self.num_refused = 0
        self.keys: set[str] = set()
        self.block_tokens: int | None = None

    def __call__(self, line: bytes) -> Iterator[Arrival]:
        """Parse one line."""
        found = _EVENT.match(line)
        if found is None:
            return
        pairs = _FIELD.findall(found[1].decode("utf-8", "replace"))
        fields = {name: value.strip('"') for name, value in pairs}
        if "prompt_lens" not in fields:
            if "prompt_tokens" in fields and "arrived_ms" not in fields:
                raise BadLine(
                    "prompt_lens is missing: the router that wrote this log is older than its planner"
                )
            self.num_refused += fields.get("status") in ("429", "503") and "POST" in fields.get("route", "")
            return
        at_s = _arrival_time(fields)
        prompts = [whole_number("prompt_lens", text) for text in fields["prompt_lens"].split(";")]
        answers = [
            [whole_number("output_lens", text) for text in group.split(",")]
            for group in fields.get("output_lens", "").split(";")
        ]
        prefixes = fields["prefixes"].split(";") if "prefixes" in fields else [""] * len(prompts)
        if not len(prompts) == len(answers) == len(prefixes):
            raise BadLine(
                f"prompt_lens, output_lens and prefixes have {len(prompts)}, {len(answers)} and {len(prefixes)} "
                "entries, and must have one for each prompt"
            )
        if "prefixes" in fields:
            self._check_blocks(fields)
        for input_len, outputs, prefix in zip(prompts, answers, prefixes, strict=True):
            blocks = _prefix_blocks(prefix)
            for output_len in outputs:
                yield Arrival(at_s, input_len, output_len, blocks)

    def _check_blocks(self, fields: dict[str, str]) -> None:
        block_tokens = whole_number("prefix_tokens", fields.get("prefix_tokens", ""))
        if self.block_tokens not in (None, block_tokens) or block_tokens == 0:
            raise BadLine(f"prefix_tokens is {block_tokens}, and {self.block_tokens} in the lines before")
        self.block_tokens = block_tokens
        self.keys.add(fields.get("prefix_key", ""))


def _arrival_time(fields: dict[str, str]) -> float:
    text = fields.get("arrived_ms", "")
    if text.isascii() and text.isdigit() and len(text) < 16:
        return int(text) / 1e3
    raise BadLine(f"arrived_ms is {text[:40]!r}, and must be milliseconds since 1970")


def _prefix_blocks(text: str) -> tuple[bytes, ...]:
    try:
        packed = base64.b64decode(text, altchars=b"-_", validate=True)
    except ValueError:
        packed = b"?"
    if len(packed) % HASH_NBYTES:
        raise BadLine(f"prefixes has {text[:40]!r}, and must be base64 of {HASH_NBYTES} bytes for each hash")
    return tuple(packed[at : at + HASH_NBYTES] for at in range(0, len(packed), HASH_NBYTES))
