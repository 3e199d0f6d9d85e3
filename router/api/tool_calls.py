"""Calls of tools that `tool_choice` forces. A grammar guarantees them.

The answer is constrained to the JSON of the call, so a forced call needs no parser of the model's own call syntax.
With `auto` the model itself decides whether to call a tool, in that syntax, which `router.text.reply_parser` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from router.http.wording import wrong
from router.request.sampling import AskedGrammar, schema_grammar
from router.text.reply_parser import CallDelta, JsonCall, ReplyDelta
from shared.grammar.schema_keywords import LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS, SINGLE_SCHEMAS

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class ForcedCall:
    """The answer is one call: of the function `name`, or of the one that the text names if `name` is None."""

    name: str | None
    grammar: AskedGrammar | None
    finish_reason: Literal["stop", "tool_calls"]

    @classmethod
    def named(cls, name: str, parameters: Mapping[str, Any] | None, where: str) -> ForcedCall:
        """A call whose text is the arguments of this function. `where` is the path of `parameters` in the request.

        Raises RequestError where the parameters allow no object.
        """
        grammar = schema_grammar(where, _of_objects(parameters, where))
        return cls(name=name, grammar=grammar, finish_reason="stop")

    @classmethod
    def any_of(cls, functions: Mapping[str, Mapping[str, Any] | None], where: str) -> ForcedCall:
        """A call of one of these functions, whose text is `{"name": ..., "arguments": {...}}`.

        `where` is the path of the tools in the request. Raises RequestError where parameters allow no object.
        """
        calls, parameters = [], {}
        for at, (name, schema) in enumerate(functions.items()):
            field = f"{where}[{at}].function.parameters"  # a node's error names the place of a schema
            place = f"#/$defs/{field}"
            parameters[field] = _moved(_of_objects(schema, field), place)
            for base in ("$id", "id"):  # of the references, which are changed
                parameters[field].pop(base, None)
            properties = {"name": {"const": name}, "arguments": {"$ref": place}}
            calls.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        grammar = schema_grammar(where, {"anyOf": calls, "$defs": parameters})
        return cls(name=None, grammar=grammar, finish_reason="tool_calls")

    def reader(self) -> ForcedReader:
        """A reader for one answer."""
        return ForcedReader(self)


class ForcedReader:
    """Reads an answer that is one call."""

    def __init__(self, call: ForcedCall) -> None:
        self.finish_reason = call.finish_reason
        self._name = call.name
        self._has_name = call.name is not None
        self._call = JsonCall(0, None)

    def feed(self, text: str, *, last: bool = False) -> ReplyDelta:
        """More text. One that ends before the function's name is only what the grammar puts before it."""
        if self._has_name:  # the text is the arguments
            name, self._name = self._name, None
            return ReplyDelta(calls=(CallDelta(0, text, name),) if text or name else ())
        calls = [*self._call.feed(text), *(self._call.end() if last else ())]
        return ReplyDelta(calls=tuple(calls))


def _of_objects(parameters: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """The schema at `where`, of objects alone. Where it has `$ref`, `anyOf` or values, nodes check the type."""
    parameters = parameters or _NO_ARGUMENTS
    types = parameters.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise wrong(f"{where}.type", "'object', since arguments are an object", types)
    return {**parameters, "type": "object"}


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to itself changed for its new `place` in another schema."""
    if not isinstance(schema, dict):
        return schema
    moved = dict(schema)
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[keyword] = place + value[1:]
        elif keyword in MAPS_OF_SCHEMAS and isinstance(value, dict):
            moved[keyword] = {name: _moved(child, place) for name, child in value.items()}
        elif keyword in LISTS_OF_SCHEMAS and isinstance(value, list):
            moved[keyword] = [_moved(child, place) for child in value]
        elif keyword in (*SINGLE_SCHEMAS, "propertyNames"):
            moved[keyword] = _moved(value, place)
    return moved
