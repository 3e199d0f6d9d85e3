"""The grammar of an answer that calls tools in the syntax of its model: XGrammar's structural tags for its family.

Only `xgrammar_backend` imports this file.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import xgrammar
from xgrammar.structural_tag import (
    AnyTextFormat,
    ConstStringFormat,
    Format,
    OptionalFormat,
    RegexFormat,
    SequenceFormat,
    TagFormat,
    TagsWithSeparatorFormat,
    TriggeredTagsFormat,
)

from shared.errors import RequestError
from shared.grammar.schema_keywords import check_keywords
from shared.protocol.sampling_params import CallGrammar

_SEPARATORS = {"llama": "; "}
"""Between two calls, where it is no line break."""
_IN_TAGS = ("qwen_3_coder", "glm_4_7", "minimax")
"""Families whose arguments are tags, not JSON."""


def written_around(calls: CallGrammar) -> str:
    """What the models of a family write around a call, in a text of any form."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    tag = xgrammar.get_model_structural_tag(calls.family, [tool], "required", "disabled")
    return f"{calls.written}{tag}"


def structural_tag(calls: CallGrammar, max_whitespace: int) -> xgrammar.StructuralTag:
    """The tag of an answer that calls tools. Raises RequestError for a schema that cannot be enforced."""
    tail = _tags(calls, max_whitespace)
    if calls.frame:
        tail = SequenceFormat(elements=[ConstStringFormat(value=calls.frame), tail])
    if not calls.reasoning:
        return xgrammar.StructuralTag(format=tail)
    begin, end = calls.think
    free = AnyTextFormat(excludes=[begin, end])
    thought = TagFormat(begin=begin if calls.reasoning == "free" else "", content=free, end=end)
    behind = calls.behind_reasoning
    follows = ConstStringFormat(value=behind) if behind else RegexFormat(pattern=r"[ \n]{0,4}")
    prefix: Format = SequenceFormat(elements=[thought, follows])
    if calls.reasoning == "free":
        prefix = OptionalFormat(content=prefix)
    return xgrammar.StructuralTag(format=SequenceFormat(elements=[prefix, tail]))


def _tags(calls: CallGrammar, max_whitespace: int) -> Format:
    tools: list[Any] = []
    for tool in calls.tools:
        function = tool["function"]
        what = f"calls: the parameters of {function['name']!r}"
        checked = json.loads(_checked(function["parameters"], what, in_tags=calls.family in _IN_TAGS))
        tools.append({"type": "function", "function": {**function, "parameters": checked}})
    tag = xgrammar.get_model_structural_tag(
        calls.family,
        tools,
        calls.choice,
        "disabled",
        max_whitespace_cnt=max_whitespace,
        parallel_tool_calls=calls.parallel,
    ).format
    if calls.choice == "auto" or not isinstance(tag, TriggeredTagsFormat):
        return tag
    # Calls alone: behind one, a weak model would go on with text until max_tokens.
    separator = _SEPARATORS.get(calls.family, "\n")
    return TagsWithSeparatorFormat(
        tags=tag.tags, separator=separator, at_least_one=True, stop_after_first=not calls.parallel
    )


def _checked(schema: object, what: str, *, in_tags: bool) -> str:
    text = msgspec.json.encode(schema).decode()
    try:
        return check_keywords(text, in_tags=in_tags)
    except RequestError as error:
        raise RequestError(f"{what}: {error.message.removeprefix('json_schema: ')}", param="calls") from None
