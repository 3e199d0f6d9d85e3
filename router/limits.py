"""Bounds on what one HTTP request may ask for, as the operator sets them."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Each is a flag of the router."""

    max_body_bytes: int
    max_batch_size: int

    def check_batch_size(self, num_sequences: int) -> None:
        """Refuse a request that stands for too many sequences."""
        if num_sequences > self.max_batch_size:
            raise RequestError(
                f"{num_sequences} sequences in one request; at most {self.max_batch_size} are taken"
            )
