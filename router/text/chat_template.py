"""Renders chat messages as a prompt with the model's own jinja template, as transformers' apply_chat_template.

The model's template works on what clients send, in jinja's immutable sandbox. Clients send no templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import msgspec
import tokenizers
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.tokenizer import MARK, ControlTokens
from shared.errors import ConfigError, ModelError, RequestError

_SEARCHES = re.compile("r?(find|index|partition|split)|(starts|ends)with|replace|remove(prefix|suffix)|count")
"""Methods of texts whose first argument is looked for in the text."""

_OF_THE_MESSAGES = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError),
    *(RecursionError, TypeError, ValueError),
)
"""Errors of a render. A template computes with the client's messages, so each of them is about the messages."""


_TAG = "CONTINUE_FINAL_MESSAGE_TAG "

Message = Mapping[str, Any]


class ChatTemplate:
    """Compiled templates, and the special tokens that templates name (`bos_token`, `eos_token`, ...).

    `sources` is by name. A model may have one of the name "tool_use", which then serves requests with tools. The
    strings of `added_tokens` in a client's values get a MARK, so that they stay text.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        origin: str,
        added_tokens: Collection[tokenizers.AddedToken] = (),
    ) -> None:
        self.sources = tuple(sources.values())
        self._special_tokens = dict(special_tokens)
        self._control_tokens = ControlTokens(added_tokens, sources.values())
        self._environment = _sandbox()
        self._knows_developer = any("developer" in source for source in sources.values())
        try:
            self._compiled = {name: self._compile(source) for name, source in sources.items()}
        except jinja2.TemplateError as e:
            raise ConfigError(f"{origin}: the chat template cannot be compiled: {e}") from e

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] = MappingProxyType({}),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt with MARKs, up to where the model continues. Raises RequestError if the template refuses it.

        The parameters are the template's variables, and any other `variables`. As in transformers, tools and
        documents that are absent are None.
        """
        known = [self._with_known_role(message) for message in messages]
        if continue_final_message:
            known[-1] = {**known[-1], "content": f"{known[-1].get('content') or ''}{_TAG}"}
        sent = {**variables, "messages": known, "tools": tools, "documents": documents}
        own = {**self._special_tokens, "add_generation_prompt": add_generation_prompt}
        with_tools = tools is not None and "tool_use" in self._compiled
        template = self._compiled["tool_use" if with_tools else "default"]
        text = self._fill(template, sent, own)
        return _up_to_tag(text) if continue_final_message else text

    def _compile(self, source: str) -> jinja2.Template:
        """The compiled template, which finds what it looks for in marked texts. Raises jinja2.TemplateError."""
        tree = self._environment.parse(source)
        for constant in _searched(tree):
            constant.value = self._control_tokens.mark_whole(constant.value)
        return self._environment.from_string(tree)

    def _fill(self, template: jinja2.Template, sent: Mapping[str, object], own: Mapping[str, object]) -> str:
        """The text, where what a client `sent` has MARKs. The server's `own` variables win over those."""
        try:
            return template.render({**self._control_tokens.mark(sent), **own})
        except _OF_THE_MESSAGES as e:
            why = str(e).replace(MARK, "")
            raise RequestError(f"the chat template refused the messages: {why}", param="messages") from e

    def _with_known_role(self, message: Message) -> dict[str, Any]:
        """`developer` becomes `system` where the templates have no `developer`: they would drop such a message."""
        role = message.get("role")
        return (
            {**message, "role": "system"}
            if role == "developer" and not self._knows_developer
            else {**message}
        )


def load_chat_template(
    folder: Path, override: Path | None, added_tokens: Collection[tokenizers.AddedToken] = ()
) -> ChatTemplate | None:
    """The template of a model folder with these `added_tokens`, or of `override`; None when there is none.

    As in transformers, chat_template.jinja is preferred to the `chat_template` of tokenizer_config.json.
    """
    tokenizer_config = _tokenizer_config(folder)
    special_tokens = {
        name: text
        for name, value in tokenizer_config.items()
        if name.endswith("_token") and (text := _special_token(value)) is not None
    }
    origin = override or folder / "chat_template.jinja"
    if override is not None:
        sources = {"default": _read(override)}
    elif origin.is_file():
        others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        sources = {other.stem: _read(other) for other in others} | {"default": _read(origin)}
    else:
        origin = folder / "tokenizer_config.json"
        sources = _named_sources(tokenizer_config.get("chat_template"))
    if "default" not in sources:
        return None
    return ChatTemplate(sources, special_tokens, origin=str(origin), added_tokens=added_tokens)


def own_template(folder: Path) -> dict[str, Any] | None:
    """The `response_template` of a model folder, by which transformers reads answers; None when there is none."""
    template = _tokenizer_config(folder).get("response_template")
    return template if isinstance(template, dict) else None


def _up_to_tag(text: str) -> str:
    """The prompt up to the end of the last message, which the tag marks. Templates may trim the tag's space."""
    at = text.rfind(_TAG.strip())
    if at < 0:
        raise RequestError(
            "continue_final_message: the chat template does not show the last message's content as it is",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()


def _special_token(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named_sources(value: object) -> dict[str, str]:
    """`chat_template` of a tokenizer_config.json: one source, or a list of {"name", "template"}."""
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return {str(name): source for name, source in named.items() if isinstance(source, str)}


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as e:
        raise ModelError(f"{path}: {e}") from e


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"chat template {path} cannot be read: {e}") from e


# ---------------------------------------------------------------------------------------- the sandbox
def _searched(tree: nodes.Template) -> Iterator[nodes.Const]:
    """The texts in `'</think>' in content`, `content.split('</think>')` and the like."""
    sought = [test.args for test in tree.find_all(nodes.Test)]
    sought += [found.args[:1] for found in tree.find_all(nodes.Filter) if found.name == "replace"]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and _SEARCHES.fullmatch(call.node.attr):
            sought.append(call.args[:1])
    for part in (*tree.find_all(nodes.Compare), *map(nodes.List, sought)):
        yield from (constant for constant in part.find_all(nodes.Const) if isinstance(constant.value, str))


def _sandbox() -> ImmutableSandboxedEnvironment:
    """The sandbox, with transformers' additions."""
    extensions = [_GenerationBlock, jinja2.ext.loopcontrols]
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.filters["tojson"] = _tojson
    sandbox.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return sandbox


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
