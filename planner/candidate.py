"""What a plan compares: a fleet of so many nodes of each role, and how its router sends requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A fleet that may serve the traffic. `num_prefill` is 0 where every node does both."""

    num_prefill: int
    num_decode: int
    enable_mixed_chunk: bool | None = None
    """None: as the profile says."""
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
        return f"{self.num_decode} together" + (", mixed chunks" if self.enable_mixed_chunk else "")

    @property
    def simplicity(self) -> tuple[bool, bool]:
        """A key to sort by: the smaller it is, the simpler the fleet is to run."""
        return self.splits, bool(self.enable_mixed_chunk)


def candidates(nodes: range) -> list[Candidate]:
    """Every split of so many nodes, and the same nodes together, with mixed chunks and without."""
    found: list[Candidate] = []
    for num in nodes:
        found += [
            Candidate(num_prefill=0, num_decode=num, enable_mixed_chunk=mixed) for mixed in (False, True)
        ]
        found += [Candidate(num_prefill=num_p, num_decode=num - num_p) for num_p in range(1, num)]
    return found
