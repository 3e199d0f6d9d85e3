"""What one forward sampled, as values on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.protocol.logprobs import Logprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each sequence that sampled, in the order of the batch.

    `logprobs` of those of them that ask for it, by their place among the tokens; `input_logprobs` of the prompt
    tokens that the forward computed, by the sequence's place in the batch.
    """

    token_ids: list[int]
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    input_logprobs: dict[int, Logprobs] = field(default_factory=dict)
