"""A model of which a prompt takes seconds to prefill, so that a test can act meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.modelzoo import IM_END_ID, make_model, random_prompt, reference_greedy, reference_greedy_batch

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 24, 4, 128
LONG = 360


@dataclass
class SlowModel:
    """The folder, and its references by prompt."""

    folder: Path
    _greedy: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _count: int = 0

    @classmethod
    def make(cls, folder: Path) -> SlowModel:
        return cls(
            make_model(
                folder,
                "llama",
                num_hidden_layers=NUM_LAYERS,
                num_attention_heads=NUM_KV_HEADS,
                num_key_value_heads=NUM_KV_HEADS,
                head_dim=HEAD_DIM,
                max_position_embeddings=2048,
            )
        )

    def fresh_prompt(self, length: int) -> list[int]:
        """One that no node has seen, not even its first tokens."""
        self._count += 1
        return [IM_END_ID + self._count, *random_prompt(length - 1, seed=self._count)]

    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Of prompts of one length, at once."""
        return reference_greedy_batch(self.folder, prompts, count)

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """By transformers."""
        known = self._greedy.get(tuple(ids), [])
        if len(known) < count:
            known = self._greedy[tuple(ids)] = reference_greedy(self.folder, ids, count)
        return known[:count]
