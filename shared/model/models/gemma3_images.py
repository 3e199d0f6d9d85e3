"""Gemma 3 of text and images (4B, 12B, 27B; arXiv 2503.19786), of which the text model is served."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from shared.model.models import gemma3


class Gemma3TextFields(gemma3.Gemma3Fields, kw_only=True):
    """Keys of `text_config`."""

    prefix: ClassVar[str] = "language_model."

    def __post_init__(self) -> None:
        """Raise ValueError as the text model does, and for an lm_head of its own, which no published model has."""
        gemma3.Gemma3Fields.__post_init__(self)
        if not self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings: is false, and only tied embeddings are supported")


FAMILY = replace(
    gemma3.FAMILY,
    architecture="Gemma3ForConditionalGeneration",
    fields=Gemma3TextFields,
    has_text_config=True,
)
