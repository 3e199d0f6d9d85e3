"""Turns token ids into text incrementally. A character (a Unicode code point) is shown as soon as it is complete.

The concatenated pieces are the text of all ids, however the ids were cut into messages:

    byte-level vocabularies    The text is the tokenizer's own decode of the output ids. Bytes that are not UTF-8
                               become U+FFFD, one for each sequence that breaks off, also at the end.
    all others                 The text is the decode of context and output ids without the decode of the context.
                               The context is the end of the prompt, so the first word of the output keeps its
                               space, as in SGLang and vLLM. Byte tokens `<0xNN>` that are not UTF-8 become U+FFFD.

Special tokens are text only with skip_special_tokens false; the tokenizer's decoder then writes them, with its own
rule for spaces, so spaces_between_special_tokens changes nothing. An id without a token has no text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Container, Mapping, Sequence
from functools import cached_property

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_NUM_BYTES = 256


class Vocabulary:
    """The tokens of a tokenizer, and how its decoder puts them together."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._steps = _decoder_steps(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special_texts = {i: token.content for i, token in added.items() if token.special}
        self._bytes_of: dict[int, bytes] = {}
        self._text_of: dict[int, str] = {}

    @property
    def is_byte_level(self) -> bool:
        """True when decoding is nothing but putting the bytes of all tokens together (GPT-2, Llama 3, Qwen)."""
        return self._steps == ["ByteLevel"]

    @cached_property
    def byte_of(self) -> Mapping[int, int]:
        """The byte of each `<0xNN>`, if the decoder makes characters of them (sentencepiece); empty if not."""
        if "ByteFallback" not in self._steps:
            return {}
        tokens = self._tokenizer.get_vocab()
        found = {i: int(token[3:5], 16) for token, i in tokens.items() if _BYTE_TOKEN.fullmatch(token)}
        return found if len(set(found.values())) == _NUM_BYTES else {}

    @cached_property
    def _ids(self) -> Collection[int]:
        return frozenset(self._tokenizer.get_vocab().values())

    def visible(self, token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """`token_ids` without special ones that are skipped and ids without a token, as in a padded vocabulary."""
        hidden: Container[int] = self._special_texts if skip_special_tokens else ()
        return [i for i in token_ids if i in self._ids and i not in hidden]

    def special_text(self, token_id: int) -> str:
        """The text of a special token by itself; empty for other tokens."""
        return self._special_texts.get(token_id, "")

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary; empty for an id without a token."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = _token_bytes(self._tokenizer.id_to_token(token_id))
        return known

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special or not; U+FFFD for a part of a character."""
        known = self._text_of.get(token_id)
        if known is None:
            # Some decoders drop a space at the start of a text, so the token is decoded behind itself.
            once = self.decode((token_id,), False)
            known = self._text_of[token_id] = self.decode((token_id, token_id), False)[len(once) :]
        return known

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, also where they are only a part of a character."""
        if "ByteLevel" in self._steps:
            return self.bytes_of(token_id)
        byte = self.byte_of.get(token_id)
        return self.token_text(token_id).encode() if byte is None else bytes((byte,))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """All ids at once, by the tokenizer's own decoder."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """The names of the steps of a decoder, as tokenizer.json has them."""
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return [step["type"] for step in decoder.get("decoders", [decoder])]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable byte is its own character, and other bytes are characters from U+0100 on."""
    themselves = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = (byte for byte in range(_NUM_BYTES) if byte not in themselves)
    return {chr(byte): byte for byte in themselves} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _token_bytes(token: str | None) -> bytes:
    """As in tokenizers' ByteLevel decoder, a token with a character outside the alphabet is its own text."""
    if token is None:
        return b""
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode()


CONTEXT_TOKENS = 5
"""Tokens at the end of a prompt that a detokenizer decodes as context; as in SGLang and vLLM."""
_MAX_HELD_TOKENS = 8
"""So many tokens without text, or with a part of a character, are held back until more text follows."""
_REPLACEMENT = "\ufffd"


def make_detokenizer(
    vocabulary: Vocabulary, *, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
) -> Detokenizer:
    """A fresh detokenizer for the output that follows `prompt_ids`, of which the last CONTEXT_TOKENS count."""
    if vocabulary.is_byte_level:
        return ByteLevelDetokenizer(vocabulary, skip_special_tokens)
    return WindowDetokenizer(vocabulary, skip_special_tokens, prompt_ids)


class ByteLevelDetokenizer:
    """For byte-level BPE (GPT-2, Llama 3, Qwen): tokens are bytes, and bytes are decoded as they come."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that this id completes."""
        if self._skip_special_tokens and self._vocabulary.special_text(token_id):
            return ""
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))

    def flush(self) -> str:
        """A U+FFFD if a character is not complete."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For decoders whose text of a token depends on its neighbours, as they join words or drop a space at the start.

    The text of new ids is the decode of context and new ids without the decode of the context. The context is the
    last piece that was shown, so neither decode grows with the output. Each id is a step of its own, so that the text
    does not depend on how the ids were cut.
    """

    def __init__(
        self, vocabulary: Vocabulary, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._new: list[int] = []
        self._context: list[int] = []
        self._context_text = ""
        self._take_context(vocabulary.visible(prompt_ids[-CONTEXT_TOKENS:], skip_special_tokens))

    def feed(self, token_id: int) -> str:
        """The text that this id completes."""
        if not self._vocabulary.visible((token_id,), self._skip_special_tokens):
            return ""
        self._new.append(token_id)
        return self._text(final=len(self._new) > _MAX_HELD_TOKENS)

    def flush(self) -> str:
        """The text of all ids that are held back."""
        return self._text(final=True)

    def _text(self, *, final: bool) -> str:
        text = self._decode([*self._context, *self._new])[len(self._context_text) :]
        if not final and (not text or text.endswith(_REPLACEMENT)):
            return ""
        if text:
            self._take_context(self._new)
        self._new = []
        return text

    def _take_context(self, shown: Sequence[int]) -> None:
        """Byte tokens are no context: they would make one run with those that follow."""
        words = [i for i in shown if i not in self._vocabulary.byte_of]
        if words:
            self._context, self._context_text = words, self._decode(words)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._vocabulary.decode(token_ids, self._skip_special_tokens)


Detokenizer = ByteLevelDetokenizer | WindowDetokenizer
"""Decodes one sequence. A character that is not complete is held back until its other tokens come."""
