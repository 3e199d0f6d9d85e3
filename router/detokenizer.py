"""Token ids to text, a few at a time: the pieces put together equal the text of all ids decoded at once."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

import tokenizers
from tokenizers import decoders

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One sequence on its way to text. Half a character is held back until the rest comes."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        ...

    def flush(self) -> str:
        """The text of what is held back, when no more ids will come."""
        ...


class Vocabulary:
    """What decoding needs to know of a tokenizer, read once and shared by all sequences."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._bytes_of: dict[int, bytes] = {}
        self._text_of: dict[int, str] = {}
        self._byte_ids = frozenset(
            i for token, i in tokenizer.get_vocab().items() if _BYTE_TOKEN.fullmatch(token)
        )

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh detokenizer for one sequence."""
        if self._byte_level:
            return ByteLevelDetokenizer(self, skip_special_tokens)
        return WindowDetokenizer(self, skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """True for tokens such as an end-of-text marker."""
        return token_id in self._special_ids

    def is_byte(self, token_id: int) -> bool:
        """True for `<0xNN>`, a byte of a character that has no token of its own (sentencepiece)."""
        return token_id in self._byte_ids

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token of a byte-level vocabulary stands for; nothing for an id it does not have."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = _token_bytes(self._tokenizer.id_to_token(token_id))
        return known

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special or not; a replacement character for a part of a character."""
        known = self._text_of.get(token_id)
        if known is None:
            # Some decoders drop a space at the start of a text, so the token is looked at behind itself.
            once = self.decode((token_id,), False)
            known = self._text_of[token_id] = self.decode((token_id, token_id), False)[len(once) :]
        return known

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, also where they are only a part of a character."""
        if self._byte_level:
            return self.bytes_of(token_id)
        token = self._tokenizer.id_to_token(token_id)
        if token is not None and token_id in self._byte_ids:
            return bytes((int(token[3:5], 16),))
        return self.token_text(token_id).encode()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """All ids at once."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


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
    """For all other tokenizers, whose decoders look at neighbours (spaces at the start, runs of byte tokens).

    Text is the difference between decoding [prefix, end) and decoding [prefix, shown), where `prefix` trails
    by one piece of text, so that the decoder sees the same left context in both. A run of byte tokens is
    decoded as a whole or not at all, so it is held back until another token ends it.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._shown = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        # A skipped token does not end a run of byte tokens, so it is as if it had not been there.
        skip = self._skip_special_tokens
        self._ids += (i for i in token_ids if not (skip and self._vocabulary.is_special(i)))
        if len(self._ids) == self._shown or self._vocabulary.is_byte(self._ids[-1]):
            return ""
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        del self._ids[: self._shown]
        self._shown = len(self._ids)
        return text

    def flush(self) -> str:
        """See Detokenizer."""
        text = self._new_text()
        self._shown = len(self._ids)
        return text

    def _new_text(self) -> str:
        shown = self._vocabulary.decode(self._ids[: self._shown], self._skip_special_tokens)
        return self._vocabulary.decode(self._ids, self._skip_special_tokens)[len(shown) :]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    themselves = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = (byte for byte in range(256) if byte not in themselves)
    return {chr(byte): byte for byte in themselves} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _token_bytes(token: str | None) -> bytes:
    """As tokenizers' ByteLevel decoder does: a token with any other character in it stands for its own text."""
    if token is None:
        return b""
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode()
