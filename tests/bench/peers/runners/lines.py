"""How a runner talks to the bench: a JSON object a line, on what were its standard input and output.

in   {"prompts": [[ids]], "max_new_tokens": n}
out  {"ready": VERSION} once the model is loaded, then for each line that came in
     {"seconds": s, "first_token_s": [...], "end_s": [...], "output_ids": [[ids]]}, times from when it was read;
     `seconds` until the engine gave everything back

Runners are run by the Python of their engine's venv and import nothing but this module, the engine and the standard
library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO


@dataclass
class Answers:
    """What became of the prompts of one line, in their order; seconds from `started_at` on."""

    num_prompts: int
    started_at: float = field(default_factory=time.perf_counter)
    first_token_s: list[float] = field(init=False)
    end_s: list[float] = field(init=False)
    output_ids: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.first_token_s = [0.0] * self.num_prompts
        self.end_s = [0.0] * self.num_prompts
        self.output_ids = [[] for _ in range(self.num_prompts)]

    def add(self, index: int, token_ids: list[int]) -> None:
        """These tokens of a prompt are there now."""
        now = time.perf_counter() - self.started_at
        if not self.output_ids[index]:
            self.first_token_s[index] = now
        self.output_ids[index] += token_ids
        self.end_s[index] = now


def claim_output() -> TextIO:
    """Standard output for lines alone: whatever else prints goes to standard error, also in C++ and in children."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def serve(output: TextIO, version: str, generate: Callable[[list[list[int]], int], Answers]) -> None:
    """Answer lines until there are no more."""
    _write(output, {"ready": version})
    for line in sys.stdin:
        asked = json.loads(line)
        answers = generate(asked["prompts"], asked["max_new_tokens"])
        _write(
            output,
            {
                "seconds": time.perf_counter() - answers.started_at,
                "first_token_s": answers.first_token_s,
                "end_s": answers.end_s,
                "output_ids": answers.output_ids,
            },
        )


def _write(output: TextIO, message: Mapping[str, Any]) -> None:
    output.write(json.dumps(message) + "\n")
    output.flush()
