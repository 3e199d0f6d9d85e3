"""What a plan compares: a fleet of so many nodes of each role, and how its router sends requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_NODES = 64
"""Of the fleets of a plan."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A fleet that may serve the traffic. `num_prefill` is 0 where every node does both."""

    num_prefill: int
    num_decode: int
    enable_mixed_chunk: bool | None = None
    """None: as the profile says."""
    machine: str = ""
    """Of nodes that do both, where prefill and decode nodes have different profiles: prefill or decode."""
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
        """`2P3D`, or `3 together` for nodes that do both; unique among the candidates of a plan."""
        if self.splits:
            return f"{self.num_prefill}P{self.num_decode}D"
        mixed = ", mixed chunks" if self.enable_mixed_chunk else ""
        return f"{self.num_decode} together{mixed}" + (f" ({self.machine} machines)" if self.machine else "")

    @property
    def simplicity(self) -> tuple[bool, bool, str]:
        """A key to sort by: the smaller it is, the simpler the fleet is to run."""
        return self.splits, bool(self.enable_mixed_chunk), self.machine


def candidates(nodes: range, machines: Sequence[str]) -> list[Candidate]:
    """Every split of so many nodes, and the same machines together, with mixed chunks and without.

    `machines` are those on which nodes may do both: prefill and decode where these differ, else one without a name.
    """
    found: list[Candidate] = []
    for num in nodes:
        for machine in machines:
            for mixed in (False, True):
                together = Candidate(num_prefill=0, num_decode=num, enable_mixed_chunk=mixed, machine=machine)
                found.append(together)
        found += [Candidate(num_prefill=num_p, num_decode=num - num_p) for num_p in range(1, num)]
    return found
