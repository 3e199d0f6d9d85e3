"""The operator's bounds on one HTTP request. MAX_... are the largest values of the flags, and bounds of the types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import RequestError, maximum_context
from shared.flags import flag, whole
from shared.protocol.logprobs import MAX_TOP_LOGPROBS
from shared.protocol.sampling_params import MAX_GRAMMAR_CHARS

MAX_BATCH_SIZE = 65_536
MAX_CHOICES = 1024
MAX_STOPS = 1024
_COUNTED = {
    "max_batch_size": "sequences in one request",
    "max_n": "answers to one prompt",
    "max_stops": "stops",
    "max_logprobs": "of the likeliest tokens",
    "max_grammar_chars": "characters",
}


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """The bounds, each a flag of the router."""

    max_body_bytes: int = flag(32 << 20, "size of the body", whole(1024), "BYTES")
    max_batch_size: int = flag(
        1024, "sequences: prompts, each as often as its n", whole(1, MAX_BATCH_SIZE), "N"
    )
    max_prompt_tokens: int | None = flag(
        None, "tokens of one prompt; None: what fits context and KV pool of the nodes", whole(1), "TOKENS"
    )
    max_n: int = flag(128, "answers to one prompt", whole(1, MAX_CHOICES), "N")
    max_stops: int = flag(64, "stop strings, and stop patterns", whole(0, MAX_STOPS), "N")
    max_logprobs: int = flag(
        MAX_TOP_LOGPROBS, "likeliest tokens told at each position", whole(0, MAX_TOP_LOGPROBS), "N"
    )
    max_grammar_chars: int = flag(
        MAX_GRAMMAR_CHARS,
        "size of a JSON schema, regular expression or EBNF",
        whole(1, MAX_GRAMMAR_CHARS),
        "CHARS",
    )

    def check(self, limit: str, field: str, number: int) -> None:
        """Refuse a `field` of a request with a number above this limit."""
        most = getattr(self, limit)
        if number > most:
            flag = f"--{limit.replace('_', '-')}"
            raise RequestError(f"{field}: {number} {_COUNTED[limit]}; at most {most} ({flag})", param=field)

    def check_prompt(self, input_ids: Sequence[int], where: str, field: str) -> None:
        """Refuse a prompt without tokens, or with too many. `where` names the prompt, and `field` its field."""
        if not input_ids:
            raise RequestError(f"{where} has no tokens", param=field)
        if self.max_prompt_tokens is not None and len(input_ids) > self.max_prompt_tokens:
            raise RequestError(
                f"{where} has {len(input_ids)} tokens; at most {self.max_prompt_tokens} are taken "
                f"(--max-prompt-tokens): {maximum_context(self.max_prompt_tokens)}",
                param=field,
                code="context_length_exceeded",
            )

    def most_prompt_tokens(self, context_length: int) -> int:
        """The most tokens of a prompt, for a model of this context length."""
        return min(context_length, self.max_prompt_tokens or context_length)
