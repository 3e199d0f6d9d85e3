"""Renders chat messages as a prompt with the model's own jinja template, as transformers' apply_chat_template."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import tokenizers

from router.text.control_tokens import ControlTokens
from router.text.template_sandbox import Limits, SandboxedTemplates
from router.text.text_workers import TextWorkers
from shared.errors import ConfigError, ModelError, RequestError

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chat:
    """The variables of a template. As in transformers, tools and documents that are absent are None."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None = None
    documents: Sequence[Mapping[str, object]] | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def num_chars(self) -> int:
        """An estimate of the prompt's length in characters."""
        return len(msgspec.json.encode((self.messages, self.tools, self.documents)))


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
        limits: Limits | None = None,
    ) -> None:
        self.sources = tuple(sources.values())
        self._special_tokens = dict(special_tokens)
        self._sandbox = SandboxedTemplates(limits or Limits(), ControlTokens(added_tokens, sources.values()))
        self._knows_developer = any("developer" in source for source in sources.values())
        try:
            self._compiled = {name: self._sandbox.compile(source) for name, source in sources.items()}
        except jinja2.TemplateError as e:
            raise ConfigError(f"{origin}: the chat template cannot be compiled: {e}") from e

    async def render(self, chat: Chat, workers: TextWorkers) -> str:
        """The prompt with MARKs, up to where the model continues. Raises RequestError if the template refuses it."""
        return await workers.run(chat.num_chars(), lambda: self.render_now(chat))

    def render_now(self, chat: Chat) -> str:
        """Render in the calling thread. `Limits` bounds time and size."""
        messages = [self._with_known_role(message) for message in chat.messages]
        if chat.continue_final_message:
            messages[-1] = {**messages[-1], "content": f"{messages[-1].get('content') or ''}{_TAG}"}
        sent = {
            **chat.variables,
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
        }
        own = {**self._special_tokens, "add_generation_prompt": chat.add_generation_prompt}
        with_tools = chat.tools is not None and "tool_use" in self._compiled
        template = self._compiled["tool_use" if with_tools else "default"]
        text = self._sandbox.render(template, sent, own)
        return _up_to_tag(text) if chat.continue_final_message else text

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
