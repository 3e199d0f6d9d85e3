"""Jinja as transformers gives it to chat templates, bounded: templates come from hubs, their input from clients.

Nothing reaches outside (an immutable sandbox), and a render ends: every lookup and call checks the time, every piece
of output the size.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one render may take."""

    time_s: float = 5.0
    chars: int = 16 << 20


class SandboxedTemplates:
    """Compiles and renders."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._environment = _Environment()

    def compile(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateError."""
        return self._environment.from_string(source)

    def render(self, template: jinja2.Template, variables: Mapping[str, object]) -> str:
        """Raises RequestError when the template objects or takes too much."""
        pieces: list[str] = []
        num_chars = 0
        self._environment.deadline.at = time.monotonic() + self._limits.time_s
        try:
            for piece in template.generate(variables):
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
            # A template indexes and adds up what the client sent, so any of these is about the messages.
            raise RequestError(f"the chat template refused the messages: {e}", param="messages") from e
        return "".join(pieces)


class _TooSlow(Exception):
    """Not a TemplateError: no template catches it, and its message is ours."""


class _Deadline(threading.local):
    """Of the render that runs in this thread."""

    at = float("inf")


class _Environment(ImmutableSandboxedEnvironment):
    """A loop that writes nothing still looks something up: there the time is checked too."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        self.deadline = _Deadline()
        self.filters["tojson"] = _tojson
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
        )

    def check_time(self) -> None:
        """Raises _TooSlow."""
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
        """A call in a template. The names of the base class: a template may pass `self=`."""
        __self.check_time()
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, by which templates mark what the model writes, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (jinja declares it as an attribute of instances)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict` without the class, whose methods would change what they are given."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """See dict.fromkeys."""
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace`, where no name begins with an underscore, as those that Python's insides hide behind."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name in the namespace
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no name {name!r}")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
