"""What a plan compares: a fleet of so many nodes of each role, and how they schedule and route."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_POLICY = "ttft"
MAX_NODES = 64
"""Of the fleets of a plan."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A fleet that may serve the traffic. `num_prefill` is 0 where every node does both."""

    num_prefill: int
    num_decode: int
    enable_mixed_chunk: bool | None = None
    chunked_prefill_size: int | None = None
    schedule_policy: str | None = None
    """None of these three: that of the profile."""
    prefill_policy: str = DEFAULT_POLICY
    decode_policy: str = DEFAULT_POLICY
    local_prefill_tokens: int | None = None
    """None: by cost, which is `--local-prefill-tokens auto`."""

    @property
    def num_nodes(self) -> int:
        """Of both fleets."""
        return self.num_prefill + self.num_decode

    @property
    def splits(self) -> bool:
        """Whether prefill and decode have nodes of their own."""
        return self.num_prefill > 0

    @property
    def name(self) -> str:
        """`2P3D`, or `3 together` for nodes that do both."""
        if self.splits:
            return f"{self.num_prefill}P{self.num_decode}D"
        return f"{self.num_decode} together" + (", mixed chunks" if self.enable_mixed_chunk else "")
