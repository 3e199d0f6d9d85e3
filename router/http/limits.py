"""The operator's bounds on one HTTP request. MAX_... are the largest values of the flags, and bounds of the types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.http.wording import wrong
from shared.errors import RequestError, maximum_context
from shared.flags import flag, whole
from shared.protocol.logprobs import MAX_TOP_LOGPROBS
from shared.protocol.sampling_params import MAX_GRAMMAR_CHARS

MAX_BATCH_SIZE = 65_536
MAX_CHOICES = 1024
MAX_STOPS = 1024


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

    def check_batch_size(self, field: str, num_sequences: int) -> None:
        """Refuse a request whose `field` asks for too many sequences, which are prompts times their n."""
        if num_sequences > self.max_batch_size:
            raise RequestError(
                f"{num_sequences} sequences in one request; at most {self.max_batch_size} are taken "
                "(--max-batch-size)",
                param=field,
            )

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

    def check_n(self, field: str, n: int) -> None:
        """Refuse too many answers to one prompt."""
        if n > self.max_n:
            raise wrong(field, f"at most {self.max_n} (--max-n)", n)

    def check_stops(self, field: str, stops: Sequence[str]) -> None:
        """Refuse too many stop strings or patterns."""
        if len(stops) > self.max_stops:
            raise wrong(field, f"a list of at most {self.max_stops} (--max-stops)", stops)

    def check_top_logprobs(self, field: str, top_num: int) -> None:
        """Refuse too many of the likeliest tokens."""
        if top_num > self.max_logprobs:
            raise wrong(field, f"at most {self.max_logprobs} (--max-logprobs)", top_num)

    def check_grammar(self, field: str, text: str) -> None:
        """Refuse a grammar that would take too long to compile."""
        if len(text) > self.max_grammar_chars:
            raise RequestError(
                f"{field} must be at most {self.max_grammar_chars} characters long (--max-grammar-chars), "
                f"not {len(text)}",
                param=field,
            )
