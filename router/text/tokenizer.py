"""Encodes and decodes with the model's tokenizer.json and the `tokenizers` library, without torch or a network.

Threads work on texts that are too long for the event loop, so that streams continue meanwhile:

    up to INLINE_CHARS   on the event loop, since passing it to a thread would take longer
    up to MEDIUM_CHARS   on one thread, so that it does not wait for longer texts
    longer               on `num_long` threads; further work waits in their queue

A batch queues again after each of its items. Work that is cancelled, because its client has gone, leaves the queue.

A tokenizer makes a token of `<|im_end|>` wherever these characters stand. `ControlTokens` therefore puts MARK into
such strings of a client's values before a template is rendered, and `MarkedEncoder` encodes them as text.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from router.text.detokenizer import Detokenizer, Vocabulary, make_detokenizer
from shared.errors import ModelError, RequestError

S = TypeVar("S")
T = TypeVar("T")

INLINE_CHARS = 2000
"""A character takes about 1.3 us to encode (2 cores)."""
MEDIUM_CHARS = 32_768
_MAX_LONG_THREADS = 4


class TextWorkers:
    """Runs work that releases the GIL. Encoding and decoding do, and Python code does every few milliseconds."""

    def __init__(self, num_long: int | None = None) -> None:
        """`num_long` is by default half of the cores, and at most 4."""
        self.num_long = num_long or max(1, min(_MAX_LONG_THREADS, (os.cpu_count() or 1) // 2))
        self._medium = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(max_workers=self.num_long, thread_name_prefix="long-text")

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """The result of `work`, which takes about as long as encoding `num_chars` characters."""
        if num_chars <= INLINE_CHARS:
            return work()
        threads = self._medium if num_chars <= MEDIUM_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def run_each(
        self, items: Sequence[S], num_chars: Callable[[S], int], work: Callable[[S], T]
    ) -> list[T]:
        """The result of `work` on each item. The threads are chosen by the size of the whole batch."""
        total = sum(map(num_chars, items))
        return [await self.run(total, functools.partial(work, item)) for item in items]

    def close(self) -> None:
        """End the threads. Work that has not begun is dropped."""
        for threads in (self._medium, self._long):
            threads.shutdown(wait=False, cancel_futures=True)


# --------------------------------------------------- special tokens, and strings of a client that look like them
MARK = "\ud800"
"""It has no UTF-8, so no body, template or tokenizer has it."""


class ControlTokens:
    """The tokens that come from templates alone: special ones, and added ones that the templates' `sources` name."""

    def __init__(self, added: Iterable[tokenizers.AddedToken], sources: Iterable[str]) -> None:
        source = "".join(sources)
        self._strings = frozenset(
            t.content for t in added if t.content.strip() and (t.special or t.content in source)
        )
        self._pattern = _pattern(self._strings)

    def mark(self, value: Any) -> Any:
        """A client's `value` with MARK in each such string, and in a part of one at a text's end."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: _marked(found[0]), value)
        if isinstance(value, dict):
            return {self.mark(name): self.mark(item) for name, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list | tuple) else value

    def mark_whole(self, text: str) -> str:
        """`text`, which a template looks for in a client's values, with MARK in each such string."""
        return self._pattern.sub(lambda at: _marked(at[0]) if at[0] in self._strings else at[0], text)


class MarkedEncoder:
    """A tokenizer whose added tokens have names that no client can guess. It shares the tables of the original."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._renamed = tokenizers.Tokenizer(tokenizer.model)
        self._renamed.normalizer, self._renamed.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
        added = [(i, t) for i, t in sorted(tokenizer.get_added_tokens_decoder().items()) if t.content]
        self._only_tokens = [t.content for i, t in added if i in self._ids(t.content)]
        self._names = names = {t.content: secrets.token_hex(16) for _, t in added}
        self._pattern = _pattern(names)
        self._renamed.add_tokens(
            [
                tokenizers.AddedToken(names[t.content], lstrip=t.lstrip, rstrip=t.rstrip, normalized=False)
                for _, t in added
            ]
        )
        self._id_of = {self._renamed.token_to_id(names[t.content]): i for i, t in added}

    def encode(self, text: str) -> list[int]:
        """The ids of a text with MARKs. Raises RequestError for a marked string that can only be a token."""
        for string in self._only_tokens:
            if _marked(string) in text:
                why = f"the messages have {string!r}, which this model's tokenizer cannot write as text"
                raise RequestError(why, param="messages")
        named = self._pattern.sub(lambda found: self._names.get(found[0], found[0]), text)
        return [self._id_of.get(i, i) for i in self._ids(named.replace(MARK, ""))]

    def _ids(self, text: str) -> list[int]:
        return self._renamed.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _marked(string: str) -> str:
    return string[:1] + MARK + string[1:]


def _pattern(strings: Collection[str]) -> re.Pattern[str]:
    """Finds the longest of `strings` at a place, or a part of one at the end. Their number does not cost time."""
    return re.compile(f"(?:{_branches(strings) or '(?!)'})(?!{MARK})")


def _branches(strings: Iterable[str]) -> str:
    rests = defaultdict[str, list[str]](list)
    for string in strings:
        if string:
            rests[string[0]].append(string[1:])
    return "|".join(re.escape(first) + _rest(rest) for first, rest in rests.items())


def _rest(strings: Collection[str]) -> str:
    branches = _branches(strings)
    return f"(?:{branches}|\\Z){'?' if '' in strings else ''}" if branches else ""


# ---------------------------------------------------------------------------------------------- the tokenizer
_CHARS_A_TOKEN = 4
"""Decoding a token takes about as long as encoding this many characters."""


class Tokenizer:
    """A model's tokenizer. Long texts are encoded, and long lists of ids decoded, by `workers`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer | None) -> None:
        """None is for a router with --skip-tokenizer-init: no token has a text, and a text is refused."""
        self.has_text = tokenizer is not None
        """False where no token has a text."""
        tokenizer = tokenizer or tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._marked_encoder = MarkedEncoder(tokenizer)
        self.vocabulary = Vocabulary(tokenizer)
        self.workers = TextWorkers()
        self.max_token_chars = max(map(len, tokenizer.get_vocab()), default=1)
        """The length of the longest token. A byte-level token is written with a character for each byte."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a model folder's tokenizer.json. Raises ModelError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{path}: missing; a model folder needs a tokenizer in this format (--skip-tokenizer-init serves "
                "prompts of token ids without it)"
            )
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as e:  # the library raises a bare Exception for whatever it cannot parse
            raise ModelError(f"{path}: {e}") from e

    def close(self) -> None:
        """End the worker threads."""
        self.workers.close()

    @property
    def added_tokens(self) -> Collection[tokenizers.AddedToken]:
        """The tokens that a text has wherever it has their strings."""
        return self._tokenizer.get_added_tokens_decoder().values()

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text. With `add_special_tokens` the tokenizer's own post-processor adds them.

        Raises RequestError where there is no tokenizer.
        """
        self.require_text("a text", "token ids")
        return await self.workers.run_each(texts, len, lambda text: self._encode(text, add_special_tokens))

    async def decode(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """The text of each row of ids."""
        return await self.workers.run_each(
            rows, lambda row: len(row) * _CHARS_A_TOKEN, lambda row: self._decode(row, skip_special_tokens)
        )

    def require_text(self, what: str, instead: str) -> None:
        """Raise RequestError for `what` of a request where there is no tokenizer."""
        if not self.has_text:
            raise RequestError(f"{what} needs a tokenizer (--skip-tokenizer-init): give {instead}")

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special or not; where no token has one, its id as vLLM writes it."""
        return self.vocabulary.token_text(token_id) if self.has_text else f"token_id:{token_id}"

    def token_name(self, token_id: int) -> str:
        """The text of one token by itself. As OpenAI writes them, parts of characters are `bytes:\\xe6\\x97`."""
        raw = self.vocabulary.token_bytes(token_id)
        try:
            raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self.token_text(token_id)

    def detokenizer(self, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A fresh incremental detokenizer for one sequence, which follows `prompt_ids`."""
        return make_detokenizer(
            self.vocabulary, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids
        )

    # The library releases the GIL in its calls for a batch, not in those for a single text, which are no faster.
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if MARK in text:
            return self._marked_encoder.encode(text)
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
