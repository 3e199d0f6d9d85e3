"""What the router loads of a model: its name, tokenizer, chat template and sizes, and not its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.text.chat_template import ChatTemplate, load_chat_template
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
    vocab_size: int
    context_length: int

    @classmethod
    def load(
        cls,
        model: str,
        path: Path,
        *,
        served_name: str | None,
        chat_template: Path | None,
        skip_tokenizer_init: bool = False,
    ) -> ServedModel:
        """Read a model folder's config, tokenizer and template. Raises ConfigError."""
        config = load_model_config(path)
        tokenizer = Tokenizer(None) if skip_tokenizer_init else Tokenizer.load(path)
        return cls(
            name=served_name or model,
            model=model,
            path=path,
            tokenizer=tokenizer,
            chat_template=load_chat_template(path, chat_template, tokenizer.added_tokens),
            vocab_size=config.vocab_size,
            context_length=config.context_length,
        )


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

    def name(self) -> str:
        """The model's name, empty before it is known."""
        return self._model.name if self._model else ""
