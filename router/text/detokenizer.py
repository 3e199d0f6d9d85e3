"""Turns token ids into text incrementally. A character (a Unicode code point) is shown as soon as it is complete.

The concatenated pieces are the text of all ids, however the ids were cut into messages:

    byte-level vocabularies    The text is the tokenizer's own decode of the output ids. Bytes that are not UTF-8
                               become U+FFFD, one for each sequence that breaks off, also at the end.
    all others                 The text is the decode of context and output ids without the decode of the context.
                               The context is the end of the prompt, so the first word of the output keeps its
                               space, as in SGLang and vLLM.
    with byte tokens `<0xNN>`  A run of byte tokens that is not UTF-8 keeps its valid characters, and each other byte
                               becomes U+FFFD. (The tokenizer's decode makes every byte of such a run a U+FFFD. That
                               is not known before the run ends, so a script without tokens of its own could not be
                               streamed.)

Special tokens are text only with skip_special_tokens false; the tokenizer's decoder then writes them, with its own
rule for spaces, so spaces_between_special_tokens changes nothing. An id without a token has no text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Container, Mapping, Sequence
from functools import cached_property
from typing import Protocol

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


CONTEXT_TOKENS = 5
"""Tokens at the end of a prompt that a detokenizer decodes as context; as in SGLang and vLLM."""
_MAX_HALF_TOKENS = 3
"""The most bytes, and so tokens, of a character that is not complete."""
_MAX_HELD_TOKENS = 8
"""Tokens without text that are held back, since some decoders show a space only when more text follows."""
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Decodes one sequence. A character that is not complete is held back until its other tokens come."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        ...

    def flush(self) -> str:
        """The text of the ids that are held back, when no more ids will come."""
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
        """The text that these ids complete."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """A U+FFFD if a character is not complete."""
        return self._decoder.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._vocabulary.is_special(token_id):
            return b""
        return self._vocabulary.bytes_of(token_id)


class WindowDetokenizer:
    """For decoders whose text of a token depends on its neighbours, as they join words or drop a space at the start.

    The text of new ids is the decode of context and new ids without the decode of the context. The context is the
    last piece that was shown, so neither decode grows with the output.
    """

    def __init__(
        self, vocabulary: Vocabulary, skip_special_tokens: bool, context: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._new: list[int] = []
        self._num_shown = 0
        self._take_context(vocabulary.visible(context, skip_special_tokens))

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        self._new += self._vocabulary.visible(token_ids, self._skip_special_tokens)
        return self._text(final=False)

    def flush(self) -> str:
        """The text of all ids that are held back."""
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
        num_shown, self._num_shown = self._num_shown, 0
        if text:
            self._take_context(shown)
        return text[num_shown:]

    def _all_but_half(self, text: str) -> str:
        """`text` without its last U+FFFD, which may be a part of a character, whose tokens are kept."""
        text, num_shown = text[:-1], self._num_shown
        self._num_shown = len(text)
        for num_kept in range(1, min(_MAX_HALF_TOKENS, len(self._new) - 1) + 1):
            shown = self._new[:-num_kept]
            if text and self._text_of(shown) == text:
                self._take_context(shown)
                self._new, self._num_shown = self._new[-num_kept:], 0
                break
        return text[num_shown:]

    def _text_of(self, new: Sequence[int]) -> str:
        return self._decode([*self._context, *new])[len(self._context_text) :]

    def _take_context(self, shown: list[int]) -> None:
        """Make the last few ids of `shown` the context; all of them if those few have no text."""
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
    """For sentencepiece vocabularies (Llama 2, Mistral, Gemma), which write other characters as bytes `<0xNN>`."""

    def __init__(
        self, vocabulary: Vocabulary, skip_special_tokens: bool, context: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._half: list[int] = []
        whole = [*self._whole_characters(context), *self._broken()]
        self._window = WindowDetokenizer(vocabulary, skip_special_tokens, whole)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        return self._window.feed(self._whole_characters(token_ids))

    def flush(self) -> str:
        """The text of all ids that are held back; a U+FFFD for each byte of a character that is not complete."""
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
        """The ids that the last byte has settled: those of a character, or U+FFFD for bytes that cannot be one."""
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
        """U+FFFD for each byte that waits for the rest of a character, which will not come."""
        half, self._half = self._half, []
        return [*self._vocabulary.replacement_ids] * len(half)
