"""The fields that constrain an output. What they mean is checked by the nodes, which compile them."""

from __future__ import annotations

import msgspec

from router.fields import Fields
from shared.errors import RequestError
from shared.protocol.sampling_params import MAX_GRAMMAR_CHARS, Grammar

_ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')


def read_grammar(fields: Fields, *, with_response_format: bool) -> Grammar | None:
    """What the output has to match: `json_schema`, `regex`, `ebnf`, or OpenAI's `response_format`; one of them."""
    found: dict[str, Grammar] = {}
    if fields.raw("json_schema") is not None:
        found["json_schema"] = _schema(fields, "json_schema")
    regex = fields.string("regex", max_chars=MAX_GRAMMAR_CHARS)
    if regex is not None:
        found["regex"] = Grammar("regex", regex)
    ebnf = fields.string("ebnf", max_chars=MAX_GRAMMAR_CHARS)
    if ebnf is not None:
        found["ebnf"] = Grammar("ebnf", ebnf)
    wanted = _response_format(fields) if with_response_format else None
    if wanted is not None:
        found["response_format"] = wanted
    if len(found) > 1:
        first, second = list(found)[:2]
        raise RequestError(
            f"{fields.name(first)} and {fields.name(second)} exclude each other", param=fields.name(second)
        )
    return next(iter(found.values()), None)


def grammar_field(fields: Fields, grammar: Grammar) -> str:
    """What the client calls the field that `read_grammar` found `grammar` in."""
    if fields.raw(grammar.kind) is not None:
        return fields.name(grammar.kind)
    asked = fields.nested("response_format")
    if asked.raw("json_schema") is None:
        return fields.name("response_format")
    return asked.nested("json_schema").name("schema")


def in_terms_of(field: str, kind: str, error: RequestError) -> RequestError:
    """A node's error about its grammar, which it knows by its kind, with the client's `field` in its place."""
    if error.param != kind:
        return error
    message = f"{field}: {error.message.removeprefix(f'{kind}: ')}"
    return RequestError(message, status=error.status, param=field, code=error.code)


def _response_format(fields: Fields) -> Grammar | None:
    if fields.raw("response_format") is None:
        return None
    asked = fields.nested("response_format")
    match asked.raw("type"):
        case "text":
            return None
        case "json_object":
            return _ANY_OBJECT
        case "json_schema":
            return _schema(asked.nested("json_schema"), "schema")
    raise asked.wrong("type", "text, json_object or json_schema")


def _schema(fields: Fields, field: str) -> Grammar:
    value = fields.raw(field)
    if isinstance(value, dict):
        text = msgspec.json.encode(value).decode()
        if len(text) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"{fields.name(field)} must be at most {MAX_GRAMMAR_CHARS} characters of JSON, not {len(text)}",
                param=fields.name(field),
            )
        return Grammar("json_schema", text)
    found = fields.string(field, max_chars=MAX_GRAMMAR_CHARS)
    if found is None:
        raise fields.wrong(field, "a JSON schema")
    return Grammar("json_schema", found)
