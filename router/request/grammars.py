"""The fields that constrain an output. What they mean is checked by the nodes, which compile them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from router.http.body import Body, OneOf
from router.http.limits import HttpLimits
from router.http.wording import wrong
from shared.errors import RequestError
from shared.protocol.sampling_params import MAX_GRAMMAR_CHARS, Grammar

_ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')

GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]
JsonSchema = Annotated[
    str | dict[str, Any] | None,
    OneOf("a JSON schema, as an object or as a string", {"str": GrammarText, "dict": dict[str, Any]}),
]


class NamedSchema(Body):
    """`response_format.json_schema`."""

    name: Annotated[str | None, Field(max_length=256, description="Has no effect.")] = None
    description: Annotated[str | None, Field(max_length=65_536, description="Has no effect.")] = None
    strict: Annotated[bool, Field(description="Has no effect: a schema is always kept to.")] = True
    json_schema: Annotated[JsonSchema, Field(alias="schema", description="The JSON schema.")] = None


class ResponseFormat(Body):
    """OpenAI's way of asking for JSON."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        Field(description="Anything, some JSON object, or what `json_schema` describes."),
    ]
    json_schema: Annotated[
        NamedSchema | None, Field(description="The schema, where `type` is json_schema.")
    ] = None


@dataclass(frozen=True)
class AskedGrammar:
    """A grammar, and where in the request it was."""

    field: str
    grammar: Grammar


def text_grammar(field: str, kind: Literal["regex", "ebnf"], text: str | None) -> AskedGrammar | None:
    """A regular expression or a grammar in EBNF."""
    return None if text is None else AskedGrammar(field, Grammar(kind, text))


def schema_grammar(field: str, schema: str | dict[str, Any] | None) -> AskedGrammar | None:
    """A JSON schema."""
    if schema is None:
        return None
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return AskedGrammar(field, Grammar("json_schema", text))


def format_grammar(field: str, asked: ResponseFormat | None) -> AskedGrammar | None:
    """What OpenAI's `response_format` asks for."""
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return AskedGrammar(field, _ANY_OBJECT)
    field = f"{field}.json_schema.schema"
    found = schema_grammar(field, asked.json_schema.json_schema if asked.json_schema else None)
    if found is None:
        raise wrong(field, "a JSON schema", None)
    return found


def only_grammar(asked: Iterable[AskedGrammar | None], limits: HttpLimits) -> AskedGrammar | None:
    """The one that was given. Raises RequestError for two, and for one that is too long."""
    found = [grammar for grammar in asked if grammar is not None]
    if len(found) > 1:
        raise RequestError(f"{found[0].field} and {found[1].field} exclude each other", param=found[1].field)
    if not found:
        return None
    limits.check_grammar(found[0].field, found[0].grammar.text)
    return found[0]


def in_terms_of(field: str, kind: str, error: RequestError) -> RequestError:
    """A node's error about its grammar, which it knows by its kind, with the client's `field` in its place."""
    if error.param != kind:
        return error
    message = f"{field}: {error.message.removeprefix(f'{kind}: ')}"
    return RequestError(message, status=error.status, param=field, code=error.code)
