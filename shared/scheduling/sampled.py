"""What one forward sampled, as values on the host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry for each sequence that sampled, in the order of the batch."""

    token_ids: list[int]
