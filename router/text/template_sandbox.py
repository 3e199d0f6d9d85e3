"""Jinja as transformers gives it to chat templates, in an immutable sandbox, with bounds on time and size.

The model's template works on what clients send, so a template whose cost grows faster than the messages could hold a
thread. Each lookup, each call and each piece of output checks the time.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.control_tokens import MARK, ControlTokens
from shared.errors import RequestError

_SEARCHES = re.compile("r?(find|index|partition|split)|(starts|ends)with|replace|remove(prefix|suffix)|count")
"""Methods of texts whose first argument is looked for in the text."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of one render."""

    time_s: float = 5.0
    chars: int = 16 << 20


class SandboxedTemplates:
    """Compiles and renders templates."""

    def __init__(self, limits: Limits, control_tokens: ControlTokens) -> None:
        self._limits = limits
        self._control_tokens = control_tokens
        self._environment = _Environment()

    def compile(self, source: str) -> jinja2.Template:
        """The compiled template, which finds what it looks for in marked texts. Raises jinja2.TemplateError."""
        tree = self._environment.parse(source)
        for constant in _searched(tree):
            constant.value = self._control_tokens.mark_whole(constant.value)
        return self._environment.from_string(tree)

    def render(self, template: jinja2.Template, sent: Mapping[str, object], own: Mapping[str, object]) -> str:
        """The text, where what a client `sent` has MARKs. The server's `own` variables win over those.

        Raises RequestError when the template refuses the variables or exceeds a limit.
        """
        pieces: list[str] = []
        num_chars = 0
        self._environment.deadline.at = time.monotonic() + self._limits.time_s
        try:
            for piece in template.generate({**self._control_tokens.mark(sent), **own}):
                self._environment.check_time()
                num_chars += len(piece)
                if num_chars > self._limits.chars:
                    raise jinja2.TemplateError(f"the prompt is longer than {self._limits.chars} characters")
                pieces.append(piece)
        except _TooSlow:
            raise RequestError(
                f"the chat template did not finish within {self._limits.time_s:g} s", param="messages"
            ) from None
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as e:
            # A template computes with the client's messages, so each of these errors is about the messages.
            why = str(e).replace(MARK, "")
            raise RequestError(f"the chat template refused the messages: {why}", param="messages") from e
        return "".join(pieces)


def _searched(tree: nodes.Template) -> Iterator[nodes.Const]:
    """The texts in `'</think>' in content`, `content.split('</think>')` and the like."""
    sought = [test.args for test in tree.find_all(nodes.Test)]
    sought += [found.args[:1] for found in tree.find_all(nodes.Filter) if found.name == "replace"]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and _SEARCHES.fullmatch(call.node.attr):
            sought.append(call.args[:1])
    for part in (*tree.find_all(nodes.Compare), *map(nodes.List, sought)):
        yield from (constant for constant in part.find_all(nodes.Const) if isinstance(constant.value, str))


class _TooSlow(Exception):
    """The deadline has passed. It is no TemplateError, so jinja does not handle it."""


class _Deadline(threading.local):
    """The deadline of the render in this thread."""

    at = float("inf")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with transformers' additions. Lookups check the time, since a loop may write nothing."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        self.deadline = _Deadline()
        self.filters["tojson"] = _tojson
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def check_time(self) -> None:
        """Raise _TooSlow once the deadline has passed."""
        if time.monotonic() > self.deadline.at:
            raise _TooSlow

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute` in a template."""
        self.check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]` in a template."""
        self.check_time()
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call in a template. The parameters have the base class's names, since a template may pass `self=`."""
        __self.check_time()
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, which marks the model's part of a text for training. Its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja declares it as an attribute of instances)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which models are not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
