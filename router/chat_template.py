"""Chat messages to a prompt, by the model's own jinja template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ConfigError, ModelError, RequestError


class ChatTemplate:
    """A compiled template and the special tokens that templates name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: str) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as e:
            raise ConfigError(f"{origin}: the chat template cannot be compiled: {e}") from e

    def render(self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]) -> str:
        """The prompt, up to where the assistant begins. Raises RequestError when the template objects."""
        names = {**self._special_tokens, **variables, "messages": messages, "add_generation_prompt": True}
        try:
            return self._template.render(names)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, OverflowError, RecursionError) as e:
            # A template indexes and adds up what the client sent, so any of these is about the messages.
            raise RequestError(f"the chat template refused the messages: {e}", param="messages") from e


def load_chat_template(folder: Path, override: Path | None) -> ChatTemplate | None:
    """The template of a model folder, or of `override`; None when there is none.

    As in transformers, chat_template.jinja goes before the `chat_template` of tokenizer_config.json.
    """
    tokenizer_config = _tokenizer_config(folder)
    special_tokens = {
        name: text
        for name, value in tokenizer_config.items()
        if name.endswith("_token") and (text := _special_token(value)) is not None
    }
    for path in (override, folder / "chat_template.jinja"):
        if path is not None and (path is override or path.is_file()):
            return ChatTemplate(_read(path), special_tokens, origin=str(path))
    source = _default_template(tokenizer_config.get("chat_template"))
    if source is None:
        return None
    return ChatTemplate(source, special_tokens, origin=str(folder / "tokenizer_config.json"))


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives to templates; nothing that reaches outside."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: object, **options: Any) -> str:
    # jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _special_token(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _default_template(value: object) -> str | None:
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


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
