"""The sampling fields of a request, native and OpenAI names alike, checked and split between node and router."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from router.fields import Fields, shown
from router.grammars import grammar_field, in_terms_of, read_grammar
from shared.errors import RequestError
from shared.protocol.logprobs import LogprobParams
from shared.protocol.sampling_params import (
    MAX_BIASED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_SEED,
    SamplingParams,
    TokenBias,
)

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
_MAX_STOP_IDS = 1024
_MAX_TOKENS = 2**31 - 1
_ANY_COUNT = 10**30
# Below this, dividing logits by the temperature overflows; the most likely token is what was meant.
_SMALLEST_TEMPERATURE = 1e-6
_LATER = "not supported yet"

_FEATURES_TO_COME: Mapping[str, Sequence[object]] = {
    "stop_regex": ("", []),
    "structural_tag": (),
    "custom_params": ({},),
    # vLLM's names for grammars: ignored, they would give an answer that looks constrained.
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What a client asked for. `params` goes to the nodes; the rest is done here, where the text is."""

    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    grammar_field: str | None = None
    """Where in the request the grammar was."""

    def judged(self, wanted: LogprobParams | None) -> Sampling:
        """The same, with the logprobs that are `wanted`."""
        return replace(self, params=msgspec.structs.replace(self.params, logprobs=wanted))

    def choice(self, index: int) -> SamplingParams:
        """The node's part for choice `index` of n: the seeds of choices follow each other."""
        return msgspec.structs.replace(self.params, seed=(self.params.seed + index) & MAX_SEED)

    def in_terms_of_request(self, error: RequestError) -> RequestError:
        """A node's error, naming the field that the client used."""
        if self.params.grammar is None or self.grammar_field is None:
            return error
        return in_terms_of(self.grammar_field, self.params.grammar.kind, error)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What an API calls the fields whose names differ, and its default length."""

    max_new_tokens: Sequence[str]
    min_new_tokens: str
    seed: str
    default_max_new_tokens: int
    has_response_format: bool = False


NATIVE = Dialect(
    max_new_tokens=("max_new_tokens",),
    min_new_tokens="min_new_tokens",
    seed="sampling_seed",
    default_max_new_tokens=128,
)


def read_sampling(fields: Fields, dialect: Dialect, vocab_size: int) -> Sampling:
    """Check every field. A missing seed is drawn here, so that whichever node samples, samples the same."""
    fields.refuse(_FEATURES_TO_COME, _LATER)
    temperature = fields.number("temperature", 1.0, low=0.0, high=1e6)
    max_new_tokens = _max_new_tokens(fields, dialect)
    min_new_tokens = fields.integer(dialect.min_new_tokens, 0, low=0, high=_ANY_COUNT)
    if min_new_tokens > max_new_tokens:
        raise fields.wrong(dialect.min_new_tokens, f"at most the maximum of new tokens, {max_new_tokens}")
    seed = fields.optional_integer(dialect.seed, low=-MAX_SEED - 1, high=MAX_SEED)
    grammar = read_grammar(fields, with_response_format=dialect.has_response_format)
    # Whether spaces go between special tokens only mattered to slow tokenizers; both values are served alike.
    fields.boolean("spaces_between_special_tokens", True)
    return Sampling(
        params=SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            temperature=0.0 if temperature < _SMALLEST_TEMPERATURE else temperature,
            top_p=fields.number("top_p", 1.0, low=0.0, high=1.0, above_low=True),
            top_k=_top_k(fields),
            min_p=fields.number("min_p", 0.0, low=0.0, high=1.0),
            stop_token_ids=fields.integers(
                "stop_token_ids", low=0, high=vocab_size - 1, max_count=_MAX_STOP_IDS
            ),
            ignore_eos=fields.boolean("ignore_eos", False),
            frequency_penalty=fields.number("frequency_penalty", 0.0, low=-MAX_PENALTY, high=MAX_PENALTY),
            presence_penalty=fields.number("presence_penalty", 0.0, low=-MAX_PENALTY, high=MAX_PENALTY),
            repetition_penalty=fields.number(
                "repetition_penalty", 1.0, low=0.0, high=MAX_PENALTY, above_low=True
            ),
            logit_bias=_logit_bias(fields, vocab_size),
            grammar=grammar,
            seed=secrets.randbelow(MAX_SEED) if seed is None else seed & MAX_SEED,
        ),
        n=fields.integer("n", 1, low=1, high=MAX_CHOICES),
        stop=fields.strings("stop", max_count=MAX_STOPS, max_chars=MAX_STOP_CHARS),
        no_stop_trim=fields.boolean("no_stop_trim", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        grammar_field=None if grammar is None else grammar_field(fields, grammar),
    )


def _max_new_tokens(fields: Fields, dialect: Dialect) -> int:
    for name in dialect.max_new_tokens:
        asked = fields.optional_integer(name, low=0, high=_ANY_COUNT)
        if asked is not None:
            return min(asked, _MAX_TOKENS)  # clipped to context and pool where it is dispatched
    return dialect.default_max_new_tokens


def _top_k(fields: Fields) -> int:
    top_k = fields.integer("top_k", -1, low=-1, high=_ANY_COUNT)
    if top_k == 0:
        raise fields.wrong("top_k", "-1 (all tokens) or at least 1")
    return min(top_k, _MAX_TOKENS)


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[TokenBias, ...]:
    """An object from token ids, which JSON has as strings, to what is added to their logits; in order of ids."""
    value = fields.raw("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise fields.wrong("logit_bias", "an object that maps token ids to numbers")
    if len(value) > MAX_BIASED_TOKENS:
        raise fields.wrong("logit_bias", f"an object of at most {MAX_BIASED_TOKENS} token ids")
    ids = {key: int(key) for key in value if key.isascii() and key.isdigit() and len(key) < 20}
    outside = next((key for key in value if ids.get(key, vocab_size) >= vocab_size), None)
    if outside is not None:
        name = fields.name("logit_bias")
        raise RequestError(
            f"{name} must have token ids from 0 to {vocab_size - 1} as keys, not {shown(outside)}", param=name
        )
    biases = fields.nested("logit_bias")
    by_id = {
        token_id: biases.number(key, 0.0, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)
        for key, token_id in ids.items()
    }
    return tuple(TokenBias(token_id, bias) for token_id, bias in sorted(by_id.items()))


def check_batch_size(num_sequences: int, limit: int) -> None:
    """Refuse a request that stands for too many sequences."""
    if num_sequences > limit:
        raise RequestError(f"{num_sequences} sequences in one request; at most {limit} are taken")
