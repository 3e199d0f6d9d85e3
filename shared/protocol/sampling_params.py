"""What a node needs to know to sample one request. Stop strings and text options stay on the router."""

from __future__ import annotations

import msgspec

MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling of one sequence; names and defaults are SGLang's.

    `seed` is always set by the router, so that a sample is a pure function of (seed, output position, logits).
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken: temperature 0, or only one token to choose from."""
        return self.temperature == 0.0 or self.top_k == 1
