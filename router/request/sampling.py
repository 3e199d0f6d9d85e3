"""The sampling fields of both dialects, and what becomes of them: SamplingParams for nodes, AnswerOptions here."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, WithJsonSchema

from router.http.body import NOT_YET, Body, OneOf, about, one_or_more
from router.http.wording import shown, wrong
from router.request.fields import TokenIds
from router.request.prompt import AnswerOptions, check_token_ids
from shared.errors import RequestError
from shared.protocol.sampling_params import (
    MAX_BIASED_TOKENS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_SEED,
    Grammar,
    SamplingParams,
    TokenBias,
)

MAX_CHOICES = 128
"""The most answers to one prompt."""
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_REGEXES = 16
MAX_STOP_REGEX_CHARS = 256
"""A literal of so many takes 5 ms when it is first searched, which no timeout sees, and one of 1024 takes 0.3 s."""
_MAX_STOP_IDS = 1024
_MAX_TOKENS = 2**31 - 1
_ANY_COUNT = 10**30
# Dividing logits by a smaller temperature overflows, so a smaller one counts as 0: the most likely token.
_SMALLEST_TEMPERATURE = 1e-6

Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
NewTokens = Annotated[int, Field(ge=0, le=_ANY_COUNT)]
"""Clients ask for as many tokens as fit by any large number, which is clipped to context and pool."""
Seed = Annotated[
    int | None,
    about("Same seed, same sample; a random one by default.", ge=-MAX_SEED - 1, le=MAX_SEED),
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopPattern = Annotated[str, Field(min_length=1, max_length=MAX_STOP_REGEX_CHARS)]
BiasedTokenId = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,19}$"})]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]


GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]
JsonSchema = Annotated[
    str | dict[str, Any] | None,
    OneOf("a JSON schema, as an object or as a string", {"str": GrammarText, "dict": dict[str, Any]}),
]


@dataclass(frozen=True)
class AskedGrammar:
    """A grammar, and the field of the request that had it."""

    field: str
    grammar: Grammar


def _text_grammar(field: str, kind: Literal["regex", "ebnf"], text: str | None) -> AskedGrammar | None:
    """The grammar of a field that is a regular expression or EBNF; None if the field is absent."""
    return None if text is None else AskedGrammar(field, Grammar(kind, text))


def schema_grammar(field: str, schema: str | dict[str, Any] | None) -> AskedGrammar | None:
    """The grammar of a field that is a JSON schema; None if the field is absent."""
    if schema is None:
        return None
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return AskedGrammar(field, Grammar("json_schema", text))


class SamplingBody(Body):
    """The fields of both dialects. Where their names differ, the field has an alias."""

    min_new_tokens: NewTokens = about("Nothing ends it before.", 0)
    chosen_seed: Seed = Field(default=None, alias="seed")
    n: int = about("Answers to each prompt.", 1, ge=1, le=MAX_CHOICES)
    temperature: float = about("Divides the logits; 0 takes the most likely token.", 1.0, ge=0, le=1e6)
    top_p: float = about("Samples from the likeliest tokens that have this share.", 1.0, gt=0, le=1)
    top_k: int = about("Samples from this many of the likeliest tokens; -1: all.", -1, ge=-1, le=_ANY_COUNT)
    min_p: float = about("Drops tokens below this share of the likeliest one's.", 0.0, ge=0, le=1)
    frequency_penalty: Penalty = about("Taken off a logit for each time its token was generated.", 0.0)
    presence_penalty: Penalty = about("Taken off a logit once its token was generated.", 0.0)
    repetition_penalty: float = about(
        "Makes tokens of prompt and output less likely above 1.", 1.0, gt=0, le=MAX_PENALTY
    )
    logit_bias: dict[BiasedTokenId, Bias] | None = about(
        "From token ids to what is added to their logits.", None, max_length=MAX_BIASED_TOKENS
    )
    stop: Annotated[
        str | list[str] | None,
        one_or_more("a string or a list of strings", "str", StopString, MAX_STOPS),
    ] = about("The text ends before the first of these that comes.", None)
    stop_token_ids: TokenIds | None = about(
        "Token ids that end it, beside the model's.", None, max_length=_MAX_STOP_IDS
    )
    stop_regex: Annotated[
        str | list[str] | None,
        one_or_more("a pattern or a list of patterns", "str", StopPattern, MAX_STOP_REGEXES),
    ] = about(
        "And before the first match of one of these (`re`'s syntax), looked for after every token.", None
    )
    ignore_eos: bool = about("The model's own end tokens do not end it.", False)
    no_stop_trim: bool = about("What matched stays in the text.", False)
    skip_special_tokens: bool = about("Leaves them out of the text.", True)
    json_schema: JsonSchema = about("The text is JSON of this schema.", None)
    regex: GrammarText | None = about("The text matches this.", None)
    ebnf: GrammarText | None = about("The text matches this, from `root`.", None)
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("structural_tag", "custom_params", "guided_json", "guided_regex", "guided_choice"),
            *("guided_grammar", "guided_decoding", "structured_outputs", "use_beam_search"),
            *("prompt_logprobs", "allowed_token_ids", "bad_words", "logits_processors"),
            "truncate_prompt_tokens",
        ),
        NOT_YET,
    )


def read_sampling(
    body: SamplingBody,
    max_new_tokens: int,
    vocab_size: int,
    path: str = "",
    own_grammar: AskedGrammar | None = None,
) -> tuple[SamplingParams, AnswerOptions]:
    """What `body`, at `path` in the request, asks of the nodes and of the router.

    `own_grammar` is that of a field which only the dialect has. Raises RequestError for what types cannot check. A
    seed that is absent is drawn here, so that all nodes have the same.
    """
    at = f"{path}." if path else ""
    if body.min_new_tokens > max_new_tokens:
        name = type(body).model_fields["min_new_tokens"].alias or "min_new_tokens"
        raise wrong(at + name, f"at most the maximum of new tokens, {max_new_tokens}", body.min_new_tokens)
    if body.top_k == 0:
        raise wrong(f"{at}top_k", "-1 (all tokens) or at least 1", 0)
    stop_token_ids = body.stop_token_ids or []
    check_token_ids(f"{at}stop_token_ids", stop_token_ids, vocab_size)
    asked = _only_grammar(
        (
            schema_grammar(f"{at}json_schema", body.json_schema),
            _text_grammar(f"{at}regex", "regex", body.regex),
            _text_grammar(f"{at}ebnf", "ebnf", body.ebnf),
            own_grammar,
        )
    )
    params = SamplingParams(
        max_new_tokens=min(max_new_tokens, _MAX_TOKENS),
        min_new_tokens=min(body.min_new_tokens, _MAX_TOKENS),
        temperature=0.0 if body.temperature < _SMALLEST_TEMPERATURE else body.temperature,
        top_p=body.top_p,
        top_k=min(body.top_k, _MAX_TOKENS),
        min_p=body.min_p,
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=body.ignore_eos,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_biases(f"{at}logit_bias", body.logit_bias or {}, vocab_size),
        grammar=asked.grammar if asked else None,
        seed=_random_seed() if body.chosen_seed is None else body.chosen_seed & MAX_SEED,
    )
    return params, AnswerOptions(
        n=body.n,
        stop=_as_tuple(body.stop),
        stop_regex=_as_tuple(body.stop_regex),
        stop_regex_field=f"{at}stop_regex",
        no_stop_trim=body.no_stop_trim,
        skip_special_tokens=body.skip_special_tokens,
        grammar_field=asked.field if asked else None,
    )


def read_samplings(
    body: SamplingBody,
    max_new_tokens: int,
    num_prompts: int,
    vocab_size: int,
    path: str = "",
    own_grammar: AskedGrammar | None = None,
) -> list[tuple[SamplingParams, AnswerOptions]]:
    """What `body` asks for each of several prompts. It is checked once; an absent seed is drawn for each prompt."""
    params, options = read_sampling(body, max_new_tokens, vocab_size, path, own_grammar)
    if body.chosen_seed is not None:
        return [(params, options)] * num_prompts
    others = (msgspec.structs.replace(params, seed=_random_seed()) for _ in range(num_prompts - 1))
    return [(each, options) for each in (params, *others)]


def _only_grammar(asked: Iterable[AskedGrammar | None]) -> AskedGrammar | None:
    """The grammar that was given, if any. Raises RequestError for two grammars, and for one that is too long."""
    found = [grammar for grammar in asked if grammar is not None]
    if len(found) > 1:
        raise RequestError(f"{found[0].field} and {found[1].field} exclude each other", param=found[1].field)
    if not found:
        return None
    field, num_chars = found[0].field, len(found[0].grammar.text)
    if num_chars > MAX_GRAMMAR_CHARS:
        raise RequestError(f"{field}: {num_chars} characters; at most {MAX_GRAMMAR_CHARS}", param=field)
    return found[0]


def _random_seed() -> int:
    return secrets.randbelow(MAX_SEED)


def _as_tuple(one_or_more: str | list[str] | None) -> tuple[str, ...]:
    return (one_or_more,) if isinstance(one_or_more, str) else tuple(one_or_more or ())


def _biases(name: str, biases: Mapping[str, float], vocab_size: int) -> tuple[TokenBias, ...]:
    """The biases in order of token ids. Raises RequestError for a key that is not a token id of the model."""
    ids = {key: int(key) for key in biases if key.isascii() and key.isdigit() and len(key) < 20}
    outside = next((key for key in biases if ids.get(key, vocab_size) >= vocab_size), None)
    if outside is not None:
        raise RequestError(
            f"{name} must have token ids from 0 to {vocab_size - 1} as keys, not {shown(outside)}", param=name
        )
    by_id = {token_id: biases[key] for key, token_id in ids.items()}
    return tuple(TokenBias(token_id, bias) for token_id, bias in sorted(by_id.items()))
