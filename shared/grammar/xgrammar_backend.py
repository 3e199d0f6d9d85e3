"""The XGrammar backend (Dong et al. 2024, "XGrammar: Flexible and Efficient Structured Generation Engine").

This file is imported when the first grammar is compiled. The library imports transformers, which takes a second.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import tokenizers
import xgrammar
from transformers import PreTrainedTokenizerFast

from shared.errors import RequestError
from shared.grammar.call_tags import structural_tag, written_around
from shared.grammar.regex_syntax import as_written_for_xgrammar
from shared.grammar.schema_keywords import check_keywords
from shared.protocol.sampling_params import CallGrammar, Grammar

MAX_WHITESPACE = 64
"""Most spaces between two elements of JSON. Without a bound, a weak model may generate spaces for ever."""
MAX_CACHED_NBYTES = 256 << 20
"""Size of the compiled grammars that are kept with their texts, those used last. The library's own cache is off: it
takes masks from other grammars, so that what a grammar allows would depend on what was compiled before."""
MAX_MESSAGE_CHARS = 500
MAX_FORCED_BYTES = 256
"""Longest text that `forced_tokens` returns at once. A longer one is forced in several parts."""
MAX_SPELLINGS = 64
"""Most tokens that a forced text may begin with. They are prefixes of each other, so there are only a few."""

SPACES = ("\u2581", "\u0120")
"""A space in sentencepiece and in byte-level vocabularies."""

Encode = Callable[[str], list[int]]
Masks = Mapping[bytes, np.ndarray]
"""Words of a mask for a last byte: what may follow it. Bytes that are not there are followed by anything."""

_NO_UTF8 = {0xE0: (0x80, 0xA0), 0xED: (0xA0, 0xC0), 0xF0: (0x80, 0x90)}
"""First bytes of a character, and the second bytes that XGrammar allows there although UTF-8 does not."""
_CALLS = msgspec.json.Decoder(CallGrammar)
"""Made here, as two threads must not be the first to decode a type."""
_SOURCE_LINE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class XGrammarMatcher:
    """A GrammarMatcher. `pieces` are the bytes of each token, `after` masks what may follow a last byte."""

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, pieces: Sequence[bytes], after: Masks, encode: Encode
    ) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._after = after
        self._last_byte = b""
        self._ends = frozenset(self._matcher.stop_token_ids)
        self._pieces = pieces
        self._encode = encode
        self._mask_W: np.ndarray | None = None
        """The mask of the current position, where `forced_tokens` has computed it already."""

    @property
    def is_terminated(self) -> bool:
        """True once an end of sequence was accepted."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Advance by one token, unless the grammar does not allow it."""
        self._mask_W = None
        is_accepted = not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))
        if is_accepted:
            self._last_byte = self._pieces[token_id][-1:]
        return is_accepted

    def fill_mask(self, mask_GW: np.ndarray, row: int) -> None:
        """Write which tokens may come next."""
        if self._mask_W is None:
            self._matcher.fill_next_token_bitmask(mask_GW, row)
        else:
            mask_GW[row] = self._mask_W
        if self._last_byte in self._after:
            mask_GW[row] &= self._after[self._last_byte]

    def forced_tokens(self) -> list[int]:
        """Tokenize the text that must come next, up to MAX_FORCED_BYTES of it.

        This computes a mask, which the next `fill_mask` uses, and another mask for each token of the text. XGrammar's
        `find_jump_forward_string` does not return where a grammar forces an endless text (root ::= "a" root).
        """
        ahead, text = self._matcher, b""
        while len(text) < MAX_FORCED_BYTES:
            token_id, mask_W = self._forced_beginning(ahead)
            if ahead is self._matcher:
                self._mask_W = mask_W
            if token_id is None:
                break
            if ahead is self._matcher:
                ahead = self._matcher.fork()
            ahead.accept_token(token_id)
            text += self._pieces[token_id]
        try:
            return self._encode(text.decode()) if text else []
        except UnicodeDecodeError:
            return []  # the bytes begin or end within a character, which the model finishes

    def _forced_beginning(self, matcher: xgrammar.GrammarMatcher) -> tuple[int | None, np.ndarray]:
        """Return the shortest token that may come next (None unless all others begin with it), and the mask."""
        mask_1W = np.zeros((1, -(-len(self._pieces) // 32)), dtype=np.int32)
        matcher.fill_next_token_bitmask(mask_1W, 0)
        words = np.flatnonzero(mask_1W[0])
        if words.size > MAX_SPELLINGS:
            return None, mask_1W[0]
        bits = np.unpackbits(mask_1W[0, words].view(np.uint8), bitorder="little").reshape(-1, 32)
        at_word, at_bit = np.nonzero(bits)
        allowed = (words[at_word] * 32 + at_bit).tolist()
        if not allowed or len(allowed) > MAX_SPELLINGS or not self._ends.isdisjoint(allowed):
            return None, mask_1W[0]
        shortest = min(allowed, key=lambda token_id: len(self._pieces[token_id]))
        piece = self._pieces[shortest]
        forced = bool(piece) and all(self._pieces[token_id].startswith(piece) for token_id in allowed)
        return shortest if forced else None, mask_1W[0]


class XGrammarCompiled:
    """A CompiledGrammar of XGrammar."""

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, pieces: Sequence[bytes], after: Masks, encode: Encode
    ) -> None:
        self._compiled = compiled
        self._pieces = pieces
        self._after = after
        self._encode = encode
        self.vocab_size = int(compiled.tokenizer_info.vocab_size)
        self.nbytes = int(compiled.memory_size_bytes)

    def new_matcher(self) -> XGrammarMatcher:
        """Return a matcher at the beginning of the grammar."""
        return XGrammarMatcher(self._compiled, self._pieces, self._after, self._encode)


class XGrammarBackend:
    """Compiles grammars for the tokenizer of one model. XGrammar releases the GIL while it compiles."""

    def __init__(
        self,
        tokenizer_info: xgrammar.TokenizerInfo,
        encode: Encode,
        max_kept_nbytes: int = MAX_CACHED_NBYTES,
        special_texts: Mapping[int, str] | None = None,
    ) -> None:
        """`special_texts` are those of special tokens, which only the grammar of calls knows."""
        self._info = tokenizer_info
        self._special_texts = special_texts or {}
        self._call_compilers: dict[str, tuple[xgrammar.GrammarCompiler, list[bytes]]] = {}
        self._pieces = list(tokenizer_info.decoded_vocab)
        self._encode = encode
        self._kept: dict[Grammar, XGrammarCompiled] = {}
        self._kept_nbytes = 0
        self._max_kept_nbytes = max_kept_nbytes
        self._lock = threading.Lock()
        first_V = np.array([piece[0] if piece else 0 for piece in self._pieces])
        self._after = {
            bytes([lead]): _mask((first_V < low) | (first_V >= high))
            for lead, (low, high) in _NO_UTF8.items()
        }
        self._compiler = _compiler(tokenizer_info)

    @classmethod
    def load(
        cls,
        folder: Path,
        vocab_size: int,
        eos_token_ids: Collection[int],
        max_kept_nbytes: int = MAX_CACHED_NBYTES,
    ) -> XGrammarBackend:
        """Make the backend of the model in `folder`. Raises RequestError where the folder has no tokenizer.json."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise RequestError("this node follows no grammars: its model folder has no tokenizer.json")
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        info = tokenizer_info(tokenizer, vocab_size, eos_token_ids)
        added = tokenizer.get_added_tokens_decoder().items()
        special = {i: token.content for i, token in added if token.special and i not in eos_token_ids}
        return cls(info, continuation_encoder(tokenizer), max_kept_nbytes, special)

    def compile(self, grammar: Grammar) -> XGrammarCompiled:
        """Check and compile a grammar, or take it from the cache. Raises RequestError with the compiler's message."""
        with self._lock:
            kept = self._forget(grammar)
        compiled = kept or self._compile(grammar)
        with self._lock:
            self._forget(grammar)
            self._kept[grammar] = compiled  # the last one, as it was used last
            self._kept_nbytes += _kept_nbytes(grammar, compiled)
            while self._kept_nbytes > self._max_kept_nbytes:
                self._forget(next(iter(self._kept)))
        return compiled

    def _forget(self, grammar: Grammar) -> XGrammarCompiled | None:
        compiled = self._kept.pop(grammar, None)
        self._kept_nbytes -= _kept_nbytes(grammar, compiled) if compiled else 0
        return compiled

    def _compile(self, grammar: Grammar) -> XGrammarCompiled:
        pieces = self._pieces
        try:
            match grammar.kind:
                case "json_schema":
                    text = check_keywords(grammar.text)
                    compiled = self._compiler.compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)
                case "regex":
                    compiled = self._compiler.compile_regex(as_written_for_xgrammar(grammar.text))
                case "ebnf":
                    compiled = self._compiler.compile_grammar(grammar.text)
                case "calls":
                    calls = _CALLS.decode(grammar.text)
                    compiler, pieces = self._call_compiler(calls)
                    compiled = compiler.compile_structural_tag(structural_tag(calls, MAX_WHITESPACE))
        except (RuntimeError, ValueError) as error:
            message = _SOURCE_LINE.sub("", str(error)).strip()
            message = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}..."
            message = message or "XGrammar refuses it without a reason; is a number in it too large?"
            raise RequestError(f"{grammar.kind}: {message}", param=grammar.kind) from None
        return XGrammarCompiled(compiled, pieces, self._after, self._encode)

    def _call_compiler(self, calls: CallGrammar) -> tuple[xgrammar.GrammarCompiler, list[bytes]]:
        """A compiler for which the special tokens that a family writes have text, and the bytes of all tokens."""
        family = calls.family + calls.written
        with self._lock:
            if family not in self._call_compilers:
                pieces, written = [*self._pieces], written_around(calls)
                for token_id, text in self._special_texts.items():
                    if text in written:
                        pieces[token_id] = text.encode()
                self._call_compilers[family] = _compiler(_with_pieces(self._info, pieces)), pieces
            return self._call_compilers[family]


def _kept_nbytes(grammar: Grammar, compiled: XGrammarCompiled) -> int:
    """Memory of a kept grammar. A character of its text is up to 4 bytes, and the objects are some 2 KiB."""
    return compiled.nbytes + 4 * len(grammar.text) + 2048


def _mask(allowed_V: np.ndarray) -> np.ndarray:
    """The bits of tokens as words of a mask."""
    return np.packbits(np.pad(allowed_V, (0, -len(allowed_V) % 32)), bitorder="little").view(np.int32)


def _compiler(info: xgrammar.TokenizerInfo) -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _with_pieces(info: xgrammar.TokenizerInfo, pieces: list[bytes]) -> xgrammar.TokenizerInfo:
    """The same tokens with these bytes. One without any is never part of a text."""
    return xgrammar.TokenizerInfo(
        pieces,
        xgrammar.VocabType.RAW,
        vocab_size=info.vocab_size,
        stop_token_ids=info.stop_token_ids,
        add_prefix_space=info.add_prefix_space,
    )


def tokenizer_info(
    tokenizer: tokenizers.Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
) -> xgrammar.TokenizerInfo:
    """Describe the tokenizer to XGrammar, with the text of each token.

    Special tokens get no text, since their text is not part of the output. Ids of the model that the tokenizer lacks
    get none either.
    """
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    detected = xgrammar.TokenizerInfo.from_huggingface(fast, stop_token_ids=sorted(eos_token_ids))
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    pieces = [""] * vocab_size
    for piece, token_id in tokenizer.get_vocab().items():
        if token_id < vocab_size and (token_id not in special or token_id in eos_token_ids):
            pieces[token_id] = piece
    return xgrammar.TokenizerInfo(
        pieces,
        detected.vocab_type,
        vocab_size=vocab_size,
        stop_token_ids=sorted(eos_token_ids),
        add_prefix_space=detected.add_prefix_space,
    )


def continuation_encoder(tokenizer: tokenizers.Tokenizer) -> Encode:
    """Return a function that tokenizes text in the middle of a sequence.

    Tokenizers of the sentencepiece family put a space before a text. There the text is encoded after a line break.
    The result is empty where the line break and the text become one token.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    before = encode("\n")
    if not "".join(tokenizer.encode("a", add_special_tokens=False).tokens).startswith(SPACES):
        return encode

    def encode_behind(text: str) -> list[int]:
        ids = encode("\n" + text)
        return ids[len(before) :] if ids[: len(before)] == before else []

    return encode_behind
