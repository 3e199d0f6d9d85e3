"""Calls of tools that a grammar guarantees: those that `tool_choice` forces, and strict ones.

Where XGrammar knows the syntax in which the model's family writes calls, the grammar is that syntax, and
`router.text.reply_parser` reads the answer (`EnforcedCalls`). Elsewhere the answer is the JSON of one call
(`ForcedCall`). Reasoning before it is free in either case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from router.http.wording import wrong
from router.request.sampling import AskedGrammar
from router.text.reply_parser import CallDelta, JsonCall, ReplyDelta, ReplyFormat, ReplyReader, ReplyRegions
from shared.grammar.schema_keywords import LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS, SINGLE_SCHEMAS
from shared.protocol.sampling_params import CallGrammar, Grammar

Reasoning = Literal["", "open", "free"]
"""Before a call: none, the rest of what the prompt ends in, or as the model likes."""
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class ForcedCall:
    """The answer is one call: of the function `name`, or of the one that the text names if `name` is None."""

    name: str | None
    grammar: AskedGrammar
    finish_reason: Literal["stop", "tool_calls"]
    before: ReplyRegions | None = None
    """The reasoning before the call, if there may be any."""

    @classmethod
    def named(cls, name: str, parameters: Mapping[str, Any] | None, where: str) -> ForcedCall:
        """A call whose text is the arguments of this function. `where` is the path of `parameters` in the request.

        Raises RequestError where the parameters allow no object.
        """
        grammar = _json_grammar(where, of_objects(parameters, where))
        return cls(name=name, grammar=grammar, finish_reason="stop")

    @classmethod
    def any_of(
        cls,
        functions: Mapping[str, Mapping[str, Any] | None],
        where: str,
        allowed: Collection[str] | None = None,
    ) -> ForcedCall:
        """A call of one of these functions (or of the `allowed`), whose text is `{"name": ..., "arguments": {...}}`.

        `where` is the path of the tools in the request. Raises RequestError where parameters allow no object.
        """
        calls, parameters = [], {}
        for at, (name, schema) in enumerate(functions.items()):
            if allowed is not None and name not in allowed:
                continue
            field = f"{where}[{at}].function.parameters"  # a node's error names the place of a schema
            place = f"#/$defs/{field}"
            parameters[field] = _moved(of_objects(schema, field), place)
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
        grammar = _json_grammar(where, {"anyOf": calls, "$defs": parameters})
        return cls(name=None, grammar=grammar, finish_reason="tool_calls")

    def grammar_behind(self, reasoning: Reasoning, form: ReplyFormat | None) -> AskedGrammar:
        """The grammar of the whole answer of a model of this form."""
        around = _around(form)
        if not reasoning and not around.get("frame"):
            return self.grammar
        schema = msgspec.json.decode(self.grammar.grammar.text)
        return _asked(self.grammar.field, CallGrammar(schema=schema, reasoning=reasoning, **around))

    def reader(self) -> ForcedReader:
        """A reader for one answer."""
        return ForcedReader(self)


@dataclass(frozen=True, kw_only=True)
class EnforcedCalls:
    """Calls in the syntax of the model, if the answer has any; `field` is that of the request which asks for it."""

    calls: CallGrammar
    field: str
    is_named: bool

    @property
    def grammar(self) -> AskedGrammar:
        """The grammar of an answer without reasoning."""
        return self.grammar_behind("", None)

    def grammar_behind(self, reasoning: Reasoning, form: ReplyFormat | None) -> AskedGrammar:
        """The grammar of the whole answer of a model of this form."""
        return _asked(self.field, msgspec.structs.replace(self.calls, reasoning=reasoning, **_around(form)))


class ForcedReader:
    """Reads an answer that is one call."""

    def __init__(self, call: ForcedCall) -> None:
        self.finish_reason = call.finish_reason
        self._name = call.name
        self._has_name = call.name is not None
        self.num_tokens = 0
        self.is_content: list[bool] = []
        self._before = call.before.reader() if call.before is not None else None
        self._call = JsonCall(0, None)

    def feed(self, texts: Sequence[str], end: str | None = None, *, is_cut: bool = False) -> ReplyDelta:
        """The texts of more tokens. Text that ends before the name of the function says nothing."""
        self.num_tokens += len(texts)
        self.is_content += [False] * len(texts)
        if self._before is None:
            said = ReplyDelta(content="".join(texts) + (end or ""))
        else:
            said = self._before.feed(texts, end, is_cut=is_cut)
        return ReplyDelta(said.reasoning, calls=tuple(self._read(said.content, is_last=end is not None)))

    @property
    def num_reasoning_tokens(self) -> int:
        """Of those so far."""
        return self._before.num_reasoning_tokens if self._before is not None else 0

    def _read(self, text: str, *, is_last: bool) -> Iterator[CallDelta]:
        if not self._has_name:
            yield from self._call.feed(text)
            if is_last:
                yield from self._call.end()
        elif text or (self._name and self._before is None):  # the text is the arguments
            name, self._name = self._name, None
            yield CallDelta(0, text, name)


Reader = ReplyReader | ForcedReader
"""Reads the text of one sequence as it comes."""


def _around(form: ReplyFormat | None) -> dict[str, Any]:
    """What models of this form write around reasoning and an answer in JSON."""
    names = ("think", "behind_reasoning", "frame")
    return {} if form is None else {name: getattr(form, name) for name in names}


def _json_grammar(field: str, schema: Mapping[str, Any]) -> AskedGrammar:
    return AskedGrammar(field, Grammar("json_schema", msgspec.json.encode(schema).decode()))


def _asked(field: str, calls: CallGrammar) -> AskedGrammar:
    return AskedGrammar(field, Grammar("calls", msgspec.json.encode(calls).decode()))


def of_objects(parameters: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
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
