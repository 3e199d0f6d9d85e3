"""Calls of tools that `tool_choice` forces. A grammar guarantees them.

The answer is constrained to the JSON of the call, so a forced call needs no parser of the model's own call syntax.
With `auto` the model itself decides whether to call a tool, in that syntax, which this server cannot parse.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from router.api.openai_answers import FunctionCall, ToolCall
from router.http.wording import wrong
from router.request.sampling import AskedGrammar, schema_grammar
from shared.grammar.schema_keywords import LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS, SINGLE_SCHEMAS

_ENVELOPE = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)')
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

    def reader(self) -> CallReader:
        """A reader for one answer."""
        return CallReader(self.name)


class CallReader:
    """Splits the text of an answer, as it comes, into the name of the function and its arguments."""

    def __init__(self, name: str | None) -> None:
        self.id = f"call_{uuid.uuid4().hex[:24]}"
        self.name = name
        self._has_envelope = name is None
        self._held = ""
        self._arguments = ""

    def whole(self, text: str) -> ToolCall | None:
        """The call in a whole text; None if the text ends before the function's name."""
        arguments = self.feed(text, last=True)
        if self.name is None:
            return None
        return ToolCall(id=self.id, function=FunctionCall(name=self.name, arguments=arguments))

    def feed(self, text: str, *, last: bool) -> str:
        """More text; returns what it adds to the arguments. `name` is set once it is known."""
        if not self._has_envelope:
            return text
        self._held += text
        if self.name is None:
            begun = _ENVELOPE.match(self._held)
            if begun is None:
                return ""
            self.name = json.loads(begun[1])
            self._held = self._held[begun.end() :]
        added = self._held
        body, brace, space = self._held.rpartition("}")
        if brace and not space.strip():  # the last brace may be the envelope's, so it is held back
            added = body
        self._held = self._held[len(added) :]
        self._arguments += added
        if last and self._held and not _is_json(self._arguments):  # the text was cut off within the arguments
            added, self._held = added + self._held, ""
        return added


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


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
