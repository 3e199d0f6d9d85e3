"""What the router loads of a model: its name, tokenizer, chat template and sizes, and not its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.config import HttpOptions
from router.text.chat_template import ChatTemplate, load_chat_template, own_template
from router.text.reply_parser import (
    NO_PARSER,
    OWN,
    THINK,
    ReplyFormat,
    ReplyRegions,
    family_of,
    find_family,
    reply_formats,
)
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError
from shared.model.config import load_model_config


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """`name` is the model's name for clients, `model` what the operator gave as --model, `path` its folder."""

    name: str
    model: str
    path: Path
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tool_call_parser: str
    """The family in whose way it writes calls of tools; NO_PARSER: not known, and then they are text."""
    form: ReplyFormat | None
    """How it writes them, and reasoning."""
    reasons: bool
    """Whether its answers may have reasoning between THINK."""
    vocab_size: int
    context_length: int

    @classmethod
    def load(cls, model: str, path: Path, options: HttpOptions) -> ServedModel:
        """Read a model folder's config, tokenizer and template. Raises ConfigError.

        Parsers are those of the families that the template names, unless `options` name them.
        """
        config = load_model_config(path)
        tokenizer = Tokenizer(None) if options.skip_tokenizer_init else Tokenizer.load(path)
        template = load_chat_template(path, options.chat_template, tokenizer.added_tokens)
        sources = template.sources if template is not None else ()
        tool_call_parser, reasoning_parser = options.tool_call_parser, options.reasoning_parser
        own = None if tool_call_parser else own_template(path)
        form: ReplyFormat | None
        if own is not None:
            form, tool_call_parser = ReplyFormat.of_checkpoint(own), OWN
        else:
            tool_call_parser = family_of(tool_call_parser) if tool_call_parser else find_family(sources)
            form = reply_formats().get(tool_call_parser)
        think = form.think if form is not None else THINK
        served = cls(
            name=options.served_model_name or model,
            model=model,
            path=path,
            tokenizer=tokenizer,
            chat_template=template,
            tool_call_parser=tool_call_parser,
            form=form,
            reasons=reasoning_parser != NO_PARSER
            if reasoning_parser
            else own is not None or any(tag.strip() in s for s in sources for tag in think),
            vocab_size=config.vocab_size,
            context_length=config.max_position_embeddings,
        )
        if served.form is not None or served.reasons:
            ReplyRegions(form=form, has_calls=True, reasons=served.reasons, in_reasoning=False).reader()
        return served

    @property
    def writes_special_tokens(self) -> bool:
        """Whether reasoning and calls can only be read where special tokens are text."""
        strings = (*self.form.strings, *self.form.think) if self.form is not None else THINK
        return any(token.special and token.content in strings for token in self.tokenizer.added_tokens)


class ModelSlot:
    """Holds the model once it is known. A router without --model serves the model of the first node that joins."""

    def __init__(self, model: ServedModel | None = None) -> None:
        self._model = model

    def fill(self, model: ServedModel) -> None:
        """From now on this model is served."""
        self._model = model

    @property
    def known(self) -> bool:
        """True once `get` succeeds."""
        return self._model is not None

    def get(self) -> ServedModel:
        """The model. Raises RequestError before it is known."""
        if self._model is None:
            raise RequestError(
                "no node has said yet which model it serves (/health has the reason)",
                status=503,
                code="starting",
            )
        return self._model

    def vocab_size(self) -> int:
        """The number of its token ids. Raises RequestError before it is known."""
        return self.get().vocab_size

    def name(self) -> str:
        """The model's name, empty before it is known."""
        return self._model.name if self._model else ""
