"""What a node needs to know to sample one request. Stop strings and text options stay on the router."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shared.protocol.logprobs import LogprobParams

MAX_SEED = 2**63 - 1
MAX_PENALTY = 2.0
"""Frequency and presence penalty lie in [-2, 2], the repetition penalty in (0, 2], as in SGLang."""
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_GRAMMAR_CHARS = 65_536


class TokenBias(msgspec.Struct, frozen=True, array_like=True):
    """Added to the logit of `token_id`."""

    token_id: int
    bias: float


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the output has to match, from its first token to its end. Two with the same text are the same."""

    kind: Literal["json_schema", "regex", "ebnf", "calls"]
    text: str


class CallGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a Grammar of the kind "calls", as JSON: an answer that calls tools, behind reasoning that is free.

    Calls have the syntax of a `family`, by XGrammar's name.
    """

    family: str
    tools: list[dict[str, Any]]
    """As in a chat. The arguments of a `strict` one keep to its schema."""
    choice: Literal["auto", "required"] = "required"
    parallel: bool = True
    """Whether there may be several calls."""
    reasoning: Literal["", "open", "free"] = ""
    """None, as the prompt ends in it, or as the model likes."""
    think: tuple[str, str] = ("<think>", "</think>")
    """What begins and ends reasoning."""
    behind_reasoning: str = ""
    """What follows it; some space where it is empty."""
    frame: str = ""
    """What comes before a call."""

    @property
    def written(self) -> str:
        """What models write around calls, without what a client has sent."""
        return f"{self.think}{self.behind_reasoning}{self.frame}"


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
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[TokenBias, ...] = ()
    logprobs: LogprobParams | None = None
    grammar: Grammar | None = None

    @property
    def has_penalties(self) -> bool:
        """True when a sample depends on the tokens before it by more than the model."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken: temperature 0, or only one token to choose from."""
        return self.temperature == 0.0 or self.top_k == 1
