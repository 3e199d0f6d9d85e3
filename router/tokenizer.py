"""Text to token ids and back: the model's tokenizer.json by the `tokenizers` library, no torch and no network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tokenizers

from router.detokenizer import Detokenizer, make_detokenizer
from router.vocabulary import Vocabulary
from shared.errors import ModelError

# Below this many characters, encoding takes less time than the way to another thread and back is worth
# (2 cores, 0.6 us a character: about a millisecond).
_INLINE_CHARS = 2000


class Tokenizer:
    """A model's tokenizer. Long texts are encoded in a worker thread, where tokenizers lets the GIL go."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer)
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a model folder's tokenizer.json. Raises ModelError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path}: missing; a model folder needs a tokenizer in this format")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as e:  # the library raises a bare Exception for whatever it cannot parse
            raise ModelError(f"{path}: {e}") from e

    def close(self) -> None:
        """Let the worker threads end."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text. `add_special_tokens` as the tokenizer's own post-processor does."""
        if sum(map(len, texts)) <= _INLINE_CHARS:
            return self._encode(texts, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, self._encode, texts, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """All ids at once."""
        return self._vocabulary.decode(token_ids, skip_special_tokens)

    def special_text(self, token_id: int) -> str:
        """The text of a special token by itself; empty for all others."""
        return self._vocabulary.special_text(token_id)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; see Vocabulary."""
        return self._vocabulary.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself; see Vocabulary."""
        return self._vocabulary.token_bytes(token_id)

    def detokenizer(self, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A fresh incremental detokenizer for one sequence, which follows `prompt_ids`."""
        return make_detokenizer(
            self._vocabulary, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids
        )

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self._tokenizer.encode(t, add_special_tokens=add_special_tokens).ids for t in texts]
