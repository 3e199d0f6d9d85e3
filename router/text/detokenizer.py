"""Token ids to text, a few at a time. A character (a Unicode code point) is shown as soon as it is complete.

The pieces put together are the text of all ids, whatever messages the ids came in:

    byte-level vocabularies    the tokenizer's own decode of the output ids. Bytes that are no UTF-8 are U+FFFD, one
                               for each sequence that breaks off, also at the end.
    all others                 what the tokenizer's decode of context and output ids has beyond that of the context.
                               The context is the end of the prompt, so that the first word after it keeps its space
                               (prompt and output put together read as the model meant them), as in SGLang and vLLM.
    with byte tokens `<0xNN>`  a run of byte tokens that is no UTF-8 keeps the characters it has, and each other byte
                               is a U+FFFD. (The tokenizer's decode makes every byte of such a run a U+FFFD, which
                               could not be known before the run ends, so that text in a script without tokens of its
                               own would not be streamed at all.)

Special tokens are text only with skip_special_tokens false, and then as the tokenizer's decoder words them. It has
its own way with spaces, so that spaces_between_special_tokens changes nothing. An id without a token is nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from router.text.vocabulary import Vocabulary

CONTEXT_TOKENS = 5
"""Of a prompt, that a detokenizer looks at; as in SGLang and vLLM."""
_MAX_HALF_TOKENS = 3
"""Half a character has so many bytes at most."""
_MAX_HELD_TOKENS = 8
"""Without text, until they are taken to be none: some decoders show a space only when more text follows."""
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One sequence on its way to text. Half a character is held back until the rest comes."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        ...

    def flush(self) -> str:
        """The text of what is held back, when no more ids will come."""
        ...


def make_detokenizer(
    vocabulary: Vocabulary, *, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
) -> Detokenizer:
    """A fresh detokenizer for the output that follows `prompt_ids`, of which the last CONTEXT_TOKENS count."""
    context = prompt_ids[-CONTEXT_TOKENS:]
    if vocabulary.is_byte_level:
        return ByteLevelDetokenizer(vocabulary, skip_special_tokens)
    if vocabulary.byte_of:
        return ByteFallbackDetokenizer(vocabulary, skip_special_tokens, context)
    return WindowDetokenizer(vocabulary, skip_special_tokens, context)


class ByteLevelDetokenizer:
    """For byte-level BPE (GPT-2, Llama 3, Qwen): tokens are bytes, and bytes are decoded as they come."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._vocabulary.is_special(token_id):
            return b""
        return self._vocabulary.bytes_of(token_id)


class WindowDetokenizer:
    """For decoders that look at neighbours, as by joining words or dropping a space at the start.

    Text is the difference between decoding [context, new) and decoding the context, which trails by one piece of
    text, so that the decoder sees the same on the left in both. Neither grows with the output.
    """

    def __init__(
        self, vocabulary: Vocabulary, skip_special_tokens: bool, context: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._new: list[int] = []
        self._num_told = 0
        self._take_context(vocabulary.visible(context, skip_special_tokens))

    def feed(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        self._new += self._vocabulary.visible(token_ids, self._skip_special_tokens)
        return self._text(final=False)

    def flush(self) -> str:
        """See Detokenizer."""
        return self._text(final=True)

    def _text(self, *, final: bool) -> str:
        if not self._new:
            return ""
        text = self._text_of(self._new)
        if text.endswith(_REPLACEMENT) and self._vocabulary.may_show_half_characters and not final:
            return self._all_but_half(text)
        if not text and not final and len(self._new) <= _MAX_HELD_TOKENS:
            return ""
        shown, self._new = self._new, []
        num_told, self._num_told = self._num_told, 0
        if text:
            self._take_context(shown)
        return text[num_told:]

    def _all_but_half(self, text: str) -> str:
        """`text` without the last U+FFFD, which may be a half character; the tokens behind it are kept."""
        text, num_told = text[:-1], self._num_told
        self._num_told = len(text)
        for num_kept in range(1, min(_MAX_HALF_TOKENS, len(self._new) - 1) + 1):
            shown = self._new[:-num_kept]
            if text and self._text_of(shown) == text:
                self._take_context(shown)
                self._new, self._num_told = self._new[-num_kept:], 0
                break
        return text[num_told:]

    def _text_of(self, new: Sequence[int]) -> str:
        return self._decode([*self._context, *new])[len(self._context_text) :]

    def _take_context(self, shown: list[int]) -> None:
        """The next piece follows `shown`: the last few of them tell as much, unless they are no text."""
        start = max(0, len(shown) - CONTEXT_TOKENS)
        while start and self._vocabulary.continues_character(shown[start]):
            start -= 1
        self._context = shown[start:]
        self._context_text = self._decode(self._context)
        if not self._context_text:
            self._context, self._context_text = shown, self._decode(shown)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._vocabulary.decode(token_ids, self._skip_special_tokens)


class ByteFallbackDetokenizer:
    """For sentencepiece vocabularies (Llama 2, Mistral, Gemma), where `<0xNN>` is a byte of what has no token."""

    def __init__(
        self, vocabulary: Vocabulary, skip_special_tokens: bool, context: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._half: list[int] = []
        whole = [*self._whole_characters(context), *self._broken()]
        self._window = WindowDetokenizer(vocabulary, skip_special_tokens, whole)

    def feed(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return self._window.feed(self._whole_characters(token_ids))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._window.feed(self._broken()) + self._window.flush()

    def _whole_characters(self, token_ids: Sequence[int]) -> list[int]:
        """Ids whose runs of bytes are UTF-8; bytes that may be the beginning of a character are kept for later."""
        byte_of, whole = self._vocabulary.byte_of, list[int]()
        for token_id in self._vocabulary.visible(token_ids, self._skip_special_tokens):
            if token_id in byte_of:
                self._half.append(token_id)
                whole += self._completed()
            else:
                whole += self._broken()
                whole.append(token_id)
        return whole

    def _completed(self) -> list[int]:
        """What the last byte has settled: a character, or that the bytes before it are none."""
        settled: list[int] = []
        while self._half:
            try:
                _, num_bytes = codecs.utf_8_decode(
                    bytes(map(self._vocabulary.byte_of.__getitem__, self._half))
                )
                settled += self._half[:num_bytes]
            except UnicodeDecodeError as e:
                num_bytes = e.end
                settled += [*self._vocabulary.replacement_ids] * num_bytes
            if not num_bytes:
                break
            del self._half[:num_bytes]
        return settled

    def _broken(self) -> list[int]:
        """The bytes that are waiting, when the rest of their character will not come."""
        half, self._half = self._half, []
        return [*self._vocabulary.replacement_ids] * len(half)
