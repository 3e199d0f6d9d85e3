"""What every engine is asked: prompts as token ids, outputs of a fixed length."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_ID = 300
"""Ids below are special tokens and bytes."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`num_prompts` prompts at once, of which the first `shared_tokens` tokens are the same."""

    name: str
    num_prompts: int
    shared_tokens: int = 0
    own_tokens: int
    output_tokens: int

    @property
    def num_outputs(self) -> int:
        """Output tokens of all prompts."""
        return self.num_prompts * self.output_tokens

    @property
    def prompt_tokens(self) -> int:
        """Of one prompt."""
        return self.shared_tokens + self.own_tokens

    def prompts(self, round_: int, vocab_size: int) -> list[list[int]]:
        """Token ids, the same for every engine. No prefix of another round or workload is in them."""
        rng = random.Random(f"{self.name} {round_}")

        def drawn(length: int) -> list[int]:
            return [rng.randrange(FIRST_ID, vocab_size) for _ in range(length)]

        shared = drawn(self.shared_tokens)
        return [shared + drawn(self.own_tokens) for _ in range(self.num_prompts)]


SINGLE = "single"
WORKLOADS = (
    Workload(name=SINGLE, num_prompts=1, own_tokens=512, output_tokens=128),
    Workload(name="batch", num_prompts=32, own_tokens=256, output_tokens=128),
    Workload(name="batch-16", num_prompts=16, own_tokens=256, output_tokens=128),
    Workload(name="prompt", num_prompts=1, own_tokens=2048, output_tokens=1),
    Workload(name="shared", num_prompts=16, shared_tokens=1024, own_tokens=64, output_tokens=32),
)
WARM_UP = (
    Workload(name="warm one", num_prompts=1, own_tokens=600, output_tokens=8),
    Workload(name="warm four", num_prompts=4, own_tokens=64, output_tokens=8),
)
