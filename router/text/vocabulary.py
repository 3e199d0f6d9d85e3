"""The tables of a tokenizer that decoding needs. They are read once and shared by all sequences."""

from __future__ import annotations

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

    @property
    def may_show_half_characters(self) -> bool:
        """True when the decoder shows U+FFFD for bytes that later tokens may complete."""
        return "ByteLevel" in self._steps

    @cached_property
    def byte_of(self) -> Mapping[int, int]:
        """The byte of each `<0xNN>`, if the decoder makes characters of them (sentencepiece); empty if not."""
        if "ByteFallback" not in self._steps:
            return {}
        tokens = self._tokenizer.get_vocab()
        found = {i: int(token[3:5], 16) for token, i in tokens.items() if _BYTE_TOKEN.fullmatch(token)}
        return found if len(set(found.values())) == _NUM_BYTES else {}

    @cached_property
    def replacement_ids(self) -> Sequence[int]:
        """The byte tokens of U+FFFD; only where there is a `byte_of`."""
        id_of = {byte: token_id for token_id, byte in self.byte_of.items()}
        return [id_of[byte] for byte in "\ufffd".encode()]

    def continues_character(self, token_id: int) -> bool:
        """True for a byte token that continues a character in UTF-8."""
        return self.byte_of.get(token_id, 0) & 0xC0 == 0x80

    @cached_property
    def _ids(self) -> Collection[int]:
        return frozenset(self._tokenizer.get_vocab().values())

    def visible(self, token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """`token_ids` without special ones that are skipped and ids without a token, as in a padded vocabulary."""
        hidden: Container[int] = self._special_texts if skip_special_tokens else ()
        return [i for i in token_ids if i in self._ids and i not in hidden]

    def is_special(self, token_id: int) -> bool:
        """True for tokens such as an end-of-text marker."""
        return token_id in self._special_texts

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
        if self.may_show_half_characters:
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
