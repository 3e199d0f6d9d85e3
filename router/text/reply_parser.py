"""Reads an answer as its model writes it: reasoning, text, and calls of tools, piece by piece as the text comes.

    text ──▶ transformers' ResponseParser ──regions──▶ ReplyReader ──▶ ReplyDelta(reasoning, content, calls)

What begins and ends a region is data: `reply_formats.json` has a family of models an entry, in the terms of
transformers' `response_template`. Where a call's body is JSON, its arguments are told as they come; where it is tags,
when the call ends. However the text is cut into pieces, what is told of it adds up to the same.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import regex

from shared.errors import ConfigError

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

THINK = ("<think>", "</think>")
NO_PARSER = "none"
_FORMATS = Path(__file__).with_name("reply_formats.json")
OWN = "response_template"
"""The name of the form that a checkpoint describes itself."""
_REGIONS = {"reasoning_content": "reasoning", "thinking": "reasoning", "tool_calls": "call"}
"""Regions by the names that templates give to their fields."""
_TAIL_CHARS = 64
_TEXT = {"content": "text", "content_args": {"strip": False}}


class ReplyFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the models of a family write calls. They are found by the strings that their chat templates have."""

    aliases: tuple[str, ...]
    found_by: tuple[str, ...]
    call: dict[str, Any]
    """The region of a call, as a field of a response template."""
    dropped: tuple[str, ...] = ()
    """What stands around calls and says nothing, and a regular expression of more of it."""
    dropped_pattern: str | None = None
    is_framed: bool = False
    """Whether the dropped strings stand around all text, also where there are no tools."""
    think: tuple[str, str] = THINK
    """What begins and ends reasoning, and a regular expression of a call that may end it too."""
    behind_reasoning: str = ""
    """What comes between reasoning and a call that is enforced, if it is not space."""
    frame: str = ""
    """What comes before such a call."""
    think_cut_by: str | None = None
    close_behind: str | None = None
    """A regular expression of what is before the end of a call. Elsewhere its `close` is part of the arguments."""
    closed_by: str | None = None
    """How the end of a call ends, where it is no literal."""
    list: str | None = None
    """The parser of transformers whose result is a list of calls, where the body of a call region is one."""
    name: str | None = None
    """A regular expression of what comes before the arguments, with the function's `name`, where the body of a call
    is not `{"name": .., "arguments": ..}`."""
    begins: str = ""
    """The first characters of all that begins or ends a region, if there are such: text without them goes past the
    parser."""
    grammar: str = ""
    """XGrammar's name of the family, if it has one: then a grammar can enforce calls in this syntax."""

    own: dict[str, Any] | None = None
    """The fields of the `response_template` that the checkpoint has, by the names of regions."""

    @classmethod
    def of_checkpoint(cls, template: Mapping[str, Any]) -> ReplyFormat:
        """The form that a checkpoint's `response_template` describes. Raises ConfigError."""
        try:
            fields = {_REGIONS.get(name, name): dict(field) for name, field in template["fields"].items()}
            for field in fields.values():
                if field.get("content") == "json":  # one that is none is text, and no failure
                    field["content_args"] = {**field.get("content_args", {}), "allow_non_json": True}
            opening = fields.get("reasoning", {}).get("open", THINK[0])
            think = (opening if isinstance(opening, str) else opening[0], THINK[1])
            form = cls(aliases=(), found_by=(), call=fields.get("call", {}), think=think, own=fields)
            ReplyRegions(form=form, has_calls=True, reasons=True, in_reasoning=False).reader()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the response_template of tokenizer_config.json cannot be read: {error}"
            ) from error
        return form

    @property
    def is_json(self) -> bool:
        """Whether the arguments of a call are JSON, which can be told piece by piece."""
        return "transform" not in self.call and self.list is None and self.own is None

    @property
    def strings(self) -> tuple[str, ...]:
        """That are written around calls."""
        return (*self.found_by, *self.dropped)

    @property
    def around(self) -> dict[str, Any]:
        """What is dropped, as a field of a response template."""
        dropped = "|".join((*map(regex.escape, self.dropped), *filter(None, [self.dropped_pattern])))
        return {"around": {"open_pattern": dropped, "close_pattern": "", "repeats": True}} if dropped else {}

    @property
    def calls(self) -> dict[str, Any]:
        """Its calls, as a field of a response template."""
        call = {"repeats": True, **({} if "transform" in self.call else _TEXT), **self.call}
        if self.close_behind is not None:
            call["close_pattern"] = f"(?<={self.close_behind}){regex.escape(call.pop('close'))}"
        return {"call": call}

    @property
    def reasoning(self) -> dict[str, Any]:
        """Its reasoning, as a field of a response template."""
        return _reasoning(self.think, self.think_cut_by)

    @property
    def last(self) -> str | None:
        """The last characters of a call that is complete."""
        return self.closed_by or self.call.get("close")


@dataclass(frozen=True, kw_only=True)
class ReplyRegions:
    """What is read of the answers to one request of a model whose family has this `form`, if it is of one.

    `tools` are those of the request, by whose schemas arguments in tags are typed. The prompt may end in reasoning.
    """

    form: ReplyFormat | None
    has_calls: bool
    reasons: bool
    in_reasoning: bool
    tools: Sequence[dict[str, Any]] = ()
    is_one_call: bool = False
    """Calls behind the first are left out."""
    is_named: bool = False
    """The client chose the function, so a call is how the answer stops."""

    @property
    def think(self) -> tuple[str, str]:
        """What begins and ends reasoning."""
        return self.form.think if self.form is not None else THINK

    def reader(self) -> ReplyReader:
        """A reader for one answer."""
        return ReplyReader(self)

    @cached_property
    def template(self) -> ResponseTemplate:
        """As transformers' parser takes it."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        form = self.form
        if form is not None and form.own is not None:
            left_out = {"call": not self.has_calls, "reasoning": not self.reasons}
            fields = {
                name: {**field, "repeats": True} for name, field in form.own.items() if not left_out.get(name)
            }
            return load_response_template({"start_anchor": "\0", "fields": fields})
        fields = {
            "content": {"repeats": True, **_TEXT},
            **((form.reasoning if form is not None else _reasoning(THINK)) if self.reasons else {}),
            **(form.around if form is not None and (self.has_calls or form.is_framed) else {}),
            **(form.calls if form is not None and self.has_calls else {}),
        }
        return load_response_template({"start_anchor": "\0", "fields": fields})


def _reasoning(think: tuple[str, str], cut_by: str | None = None) -> dict[str, Any]:
    close = {"close": think[1]}
    if cut_by is not None:
        close = {"close_pattern": f"{regex.escape(think[1])}|(?={cut_by})"}
    return {"reasoning": {"open": think[0], **close, "repeats": True, **_TEXT}}


@cache
def reply_formats() -> Mapping[str, ReplyFormat]:
    """All families, by their names."""
    return msgspec.json.decode(_FORMATS.read_bytes(), type=dict[str, ReplyFormat])


def find_family(sources: Collection[str]) -> str:
    """The family whose strings are all in these chat templates; of several, the one that names most of them."""
    text, formats = "\0".join(sources), reply_formats()
    found = [name for name, one in formats.items() if all(part in text for part in one.found_by)]
    return max(found, key=lambda name: len(formats[name].found_by), default=NO_PARSER)


def family_of(name: str) -> str:
    """The family of a name as SGLang or vLLM has it. Raises ConfigError."""
    names = {alias: own for own, one in reply_formats().items() for alias in (own, *one.aliases)}
    if name not in (NO_PARSER, *names):
        raise ConfigError(f"--tool-call-parser {name}: it is one of {NO_PARSER}, {', '.join(names)}")
    return names.get(name, NO_PARSER)


def enforced_form(form: ReplyFormat | None) -> ReplyFormat:
    """The form of calls that a grammar enforces: the model's own, or hermes' where XGrammar does not know that."""
    hermes = reply_formats()["hermes"]
    if form is None or form.grammar:
        return form or hermes
    names = ("dropped", "dropped_pattern", "is_framed", "think", "behind_reasoning", "frame")
    around = {name: getattr(form, name) for name in names}
    begins = "".join(sorted({*hermes.begins, *(tag[0] for tag in form.think)}))
    return msgspec.structs.replace(hermes, **around, begins=begins)


class CallDelta(msgspec.Struct, frozen=True):
    """More of the call `index`. Its name comes once, with the first piece."""

    index: int
    arguments: str
    name: str | None = None


class ReplyDelta(msgspec.Struct, frozen=True):
    """What a piece of text adds to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass
class _Told:
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)


class ReplyReader:
    """Reads one answer."""

    def __init__(self, regions: ReplyRegions) -> None:
        # Half a second, which a model that needs it takes when it is loaded.
        from transformers.utils.chat_parsing import ResponseParser

        in_reasoning = regions.reasons and regions.in_reasoning
        self._format = regions.form if regions.has_calls else None
        self._new_parser = partial(ResponseParser, regions.template, tools=[*regions.tools])
        self._parser = self._new_parser(prefix=regions.think[0] if in_reasoning else "")
        self._call: JsonCall | None = None
        self._raw: list[str] = []
        """The text of a call that is not complete."""
        self._region = "reasoning" if in_reasoning else "content"
        self._held = {"reasoning": "", "content": ""}
        """Space that is told only when text of the same region follows."""
        self._is_fresh = {"reasoning": True, "content": in_reasoning}
        """Behind another region, in which space at the beginning says nothing."""
        self.num_calls = 0
        """That are complete, or were cut off."""
        self.num_reasoning_tokens = 0
        self.num_tokens = 0
        self.is_content: list[bool] = []
        """Of each token, whether its text is content; of those that may begin a tag it is not yet known."""
        self._is_one_call = regions.is_one_call
        self._is_cut = False
        self._tail = ""
        self._begins = frozenset(regions.form.begins if regions.form is not None else THINK[0][0])
        self._is_clear = False
        """Whether all text so far is told, and the parser is in a region of text."""
        self._is_named = regions.is_named

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """Of an answer that has ended by itself."""
        return "tool_calls" if self.num_calls and not self._is_named else "stop"

    def feed(self, texts: Sequence[str], end: str | None = None, *, is_cut: bool = False) -> ReplyDelta:
        """The texts of more tokens; with the `end` of the answer, the text that comes behind the last token.

        Of a call in JSON that is cut off by a length, its arguments are told as far as they came. Of one in tags,
        whose arguments come at once, nothing is told.
        """
        if end is None and len(texts) == 1 and self._is_more_content(texts[0]):  # most tokens are
            self.num_tokens += 1
            self._decide(is_content=True)
            return ReplyDelta(content=texts[0])
        told = _Told()
        for text in texts:
            before, num_told = self._region, len(told.content)
            if self._is_clear and self._begins.isdisjoint(text):
                self._tell(before, text, told)
            else:
                self._tail = (self._tail + text)[-_TAIL_CHARS:]
                self._take(self._events(text), told, text)
            self.num_tokens += 1
            if len(told.content) > num_told:
                self._decide(is_content=True)
            elif {before, self._region} != {"content"}:
                num_decided = self._decide(is_content=False)
                self.num_reasoning_tokens += num_decided * ("reasoning" in (before, self._region))
        if end is not None:
            self._tail += end
            self._take(self._events(end), told)
            self._is_cut = is_cut
            self._take(self._events(None), told)
            if self._region == "content" and not self.num_calls:
                told.content.append(self._held["content"])
            self._decide(is_content=True)
        calls = [call for call in told.calls if not (self._is_one_call and call.index)]
        return ReplyDelta("".join(told.reasoning), "".join(told.content), tuple(_joined(calls)))

    def _events(self, text: str | None) -> Sequence[Mapping[str, Any]]:
        """What the parser reads in more text; None: in the end of the answer.

        A model may write integers of 5000 digits, 2000 levels or control characters, and a client may send tools
        whose schemas are none. Where the parser fails at the end of a region, that ends without a value.
        """
        try:
            return self._parser.finalize()[1] if text is None else self._parser.feed(text)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            self._parser = self._new_parser(prefix="")
            return [
                {"type": "region_chunk", "field": self._region, "text": text or ""},
                {"type": "region_close", "field": self._region, "value": None},
            ]

    def _is_more_content(self, text: str) -> bool:
        """Whether all of the text is content, and is told as it is."""
        return (
            self._is_clear
            and self._region == "content"
            and not self._is_fresh["content"]
            and not self._held["content"]
            and bool(text)
            and not text[-1].isspace()
            and self._begins.isdisjoint(text)
        )

    def _decide(self, *, is_content: bool) -> int:
        """Decide about the tokens that are not yet decided, and return their number."""
        num_decided = self.num_tokens - len(self.is_content)
        self.is_content += [is_content] * num_decided
        return num_decided

    def _take(self, events: Sequence[Mapping[str, Any]], told: _Told, text: str = "") -> None:
        last = events[-1] if events else {}
        is_told = last.get("type") == "region_chunk" and last["field"] in self._held
        is_plain = bool(text) and bool(self._begins) and self._begins.isdisjoint(text)
        self._is_clear = is_plain and is_told and last["text"] == text  # else a part of it may be held
        for event in events:
            region, kind = event["field"], event["type"]
            if kind == "region_open":
                self._open(region)
            elif kind == "region_chunk" and region in self._held:
                self._tell(region, event["text"], told)
            elif kind == "region_chunk" and region == "call":
                self._raw.append(event["text"])
                if self._call is not None:
                    told.calls += self._call.feed(event["text"])
            elif kind == "region_close" and region != "content":
                if region == "call":
                    self._close_call(event["value"], told)
                self._open("content")

    def _open(self, region: str) -> None:
        if "reasoning" in (region, self._region) and region != self._region:
            self._held = dict.fromkeys(self._held, "")
            self._is_fresh = dict.fromkeys(self._is_fresh, True)
        self._region = region
        if region == "call" and self._format is not None and self._format.is_json:
            self._call = JsonCall(self.num_calls, self._format.name)

    def _tell(self, region: str, text: str, told: _Told) -> None:
        text = self._held[region] + text
        if self._is_fresh[region]:
            text = text.lstrip()
        said = text.rstrip()
        self._held[region] = text[len(said) :]
        if said:
            self._is_fresh[region] = False
            (told.reasoning if region == "reasoning" else told.content).append(said)

    def _close_call(self, value: Any, told: _Told) -> None:
        assert self._format is not None
        is_cut = self._is_cut and not self._tail.rstrip().endswith(self._format.last or "\0")
        if self._call is not None:
            told.calls += self._call.end()
            num_calls, self._call = self._call.num_begun, None
        else:
            functions = [] if is_cut else self._functions(value)
            num_calls = len(functions)
            for at, function in enumerate(functions, self.num_calls):
                arguments = json.dumps(function["arguments"], ensure_ascii=False)
                told.calls.append(CallDelta(at, arguments, function["name"]))
        self.num_calls += num_calls
        raw, self._raw = "".join(self._raw), []
        if not num_calls and raw.strip() and not is_cut and not self._format.is_framed:
            opening = self._format.call.get("open", "")
            self._region = "content"  # it is no call, so it is text
            self._tell("content", (opening if isinstance(opening, str) else "") + raw, told)

    def _functions(self, value: Any) -> list[dict[str, Any]]:
        """The calls in the value of a region that is complete; none where it is malformed."""
        from transformers.utils.chat_parsing.content_parsers import parse_content

        assert self._format is not None
        if self._format.list is None:
            calls = value if isinstance(value, list) else [value]
            functions = [call["function"] for call in calls if isinstance(call, dict) and "function" in call]
            functions = [
                one for one in functions if isinstance(one.get("arguments"), dict) and one.get("name")
            ]
            return functions if _is_json(functions) else []
        try:
            return list(parse_content(value.strip(), self._format.list, {}))
        except ValueError:
            return []


def _joined(calls: Sequence[CallDelta]) -> Iterator[CallDelta]:
    """One piece of each call."""
    for index, pieces in itertools.groupby(calls, lambda call: call.index):
        first, *more = pieces
        yield CallDelta(index, first.arguments + "".join(piece.arguments for piece in more), first.name)


def _is_json(value: object) -> bool:
    """Whether JSON has such a value: not infinity, NaN, half of a character, or too many levels."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (RecursionError, ValueError):
        return False
    return True


_JSON_HEAD = regex.compile(
    r"""\s*\{\s*(?:"(?!name")\w+"\s*:\s*"[^"\\]*"\s*,\s*)*
    "name"\s*:\s*"(?P<name>(?:[^"\\\0-\x1f]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})){1,256}+)"\s*,\s*
    "(?:arguments|parameters)"\s*:\s*(?=[{\[])""",
    regex.VERBOSE,
)
"""What comes before the arguments of a call in JSON, as all models write it."""
_MAX_HEAD_CHARS = 2048
"""A longer beginning is none: it would be searched again with each piece of text."""


class JsonCall:
    """One region of JSON: `{"name": .., "arguments": {..}}`, or the arguments behind a name, or a list of calls.

    Arguments behind the name are told as they come. A list of calls, and a call of another form, is told at its end.
    """

    def __init__(self, index: int, name: str | None) -> None:
        self.num_begun = 0
        """Calls of which something was told."""
        self._index = index
        self._head = regex.compile(name) if name else None
        self._texts: list[str] = []
        """Of a call whose name is not known."""
        self._num_chars = 0
        self._name: str | None = None
        self._arguments = _ValueScan()

    def feed(self, text: str) -> Iterator[CallDelta]:
        """What more text adds."""
        if self._name is None:
            is_long = self._num_chars >= _MAX_HEAD_CHARS
            self._texts.append(text)
            self._num_chars += len(text)
            if is_long:
                return
            so_far = "".join(self._texts)
            is_json = self._head is None or so_far[:_TAIL_CHARS].lstrip().startswith(("[", "{"))
            pattern = _JSON_HEAD if self._head is None or is_json else self._head
            head = pattern.match(so_far, endpos=_MAX_HEAD_CHARS)
            if head is None:
                return
            name = next(name for name in head.groupdict().values() if name)
            self._name = json.loads(f'"{name}"') if is_json else name.strip()
            text = so_far[head.end() :]
        more = self._arguments.feed(text)
        if more:
            yield self._delta(more)

    def end(self) -> Iterator[CallDelta]:
        """What the end of the region adds."""
        if self.num_begun:
            return
        if self._name is not None:
            yield self._delta("{}")  # a call without arguments
        else:
            yield from self._whole()

    def _delta(self, arguments: str) -> CallDelta:
        name = None if self.num_begun else self._name
        self.num_begun = 1
        return CallDelta(self._index, arguments, name)

    def _whole(self) -> Iterator[CallDelta]:
        """The calls of a region that is complete, and that could not be told piece by piece."""
        try:
            value = json.loads("".join(self._texts))
        except (ValueError, RecursionError):
            return
        calls = value if isinstance(value, list) else [value]
        if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
            return
        if not _is_json(calls):
            return
        for at, call in enumerate(calls):
            arguments = call.get("arguments", call.get("parameters")) or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            self.num_begun = at + 1
            yield CallDelta(self._index + at, text, call["name"])


class _ValueScan:
    """Finds the beginning and the end of an object or an array, as its JSON comes."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = self._has_ended = False

    def feed(self, text: str) -> str:
        """The part of more text that is in the value."""
        inside = []
        for char in text:
            if self._has_ended:
                break
            if self._is_in_string:
                self._is_in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._is_in_string = self._depth > 0
            elif char in "{[":
                self._depth += 1
            elif char in "}]" and self._depth:
                self._depth -= 1
                self._has_ended = not self._depth
            if self._depth or self._has_ended:
                inside.append(char)
        return "".join(inside)
