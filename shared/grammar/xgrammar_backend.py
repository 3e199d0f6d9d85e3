"""Grammars by XGrammar (Dong et al. 2024, "XGrammar: Flexible and Efficient Structured Generation Engine").

Imported by the first grammar only: the library imports transformers, which takes a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import xgrammar
from transformers import PreTrainedTokenizerFast

from shared.errors import RequestError
from shared.grammar.nesting import check_nesting
from shared.grammar.schema_keywords import check_keywords
from shared.protocol.sampling_params import Grammar

MAX_WHITESPACE = 64
"""Spaces between two elements of JSON at most; without a bound, a weak model goes on with spaces for ever."""
MAX_CACHED_NBYTES = 256 << 20
"""Compiled grammars that the library keeps, the least used ones leaving first."""
MAX_MESSAGE_CHARS = 500
MAX_FORCED_BYTES = 256
"""A longer text is forced in several parts."""
MAX_SPELLINGS = 64
"""Tokens that may begin a forced text at most; they are prefixes of each other, so there are a few."""

SPACES = ("\u2581", "\u0120")
"""How sentencepiece and byte-level vocabularies write a space."""

Encode = Callable[[str], list[int]]

_SOURCE_LINE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class XGrammarMatcher:
    """See GrammarMatcher."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, pieces: Sequence[bytes], encode: Encode) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._ends = frozenset(self._matcher.stop_token_ids)
        self._pieces = pieces
        self._encode = encode
        self._mask_W: np.ndarray | None = None
        """What may come next, where `forced_tokens` has worked it out already."""

    @property
    def is_terminated(self) -> bool:
        """See GrammarMatcher."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """See GrammarMatcher."""
        self._mask_W = None
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))

    def fill_mask(self, mask_GW: np.ndarray, row: int) -> None:
        """See GrammarMatcher."""
        if self._mask_W is None:
            self._matcher.fill_next_token_bitmask(mask_GW, row)
        else:
            mask_GW[row] = self._mask_W

    def forced_tokens(self) -> list[int]:
        """See GrammarMatcher. Takes a mask, which the next `fill_mask` saves, and one more for each character forced.

        XGrammar's `find_jump_forward_string` does not end where a grammar forces a text without an end
        (root ::= "a" root), so the text is found here, up to a limit.
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
            return []  # bytes that begin or end within a character: the model finishes it

    def _forced_beginning(self, matcher: xgrammar.GrammarMatcher) -> tuple[int | None, np.ndarray]:
        """The shortest token that may come next, if all others begin with it; and the mask."""
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
    """See CompiledGrammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, pieces: Sequence[bytes], encode: Encode) -> None:
        self._compiled = compiled
        self._pieces = pieces
        self._encode = encode
        self.vocab_size = int(compiled.tokenizer_info.vocab_size)

    def new_matcher(self) -> XGrammarMatcher:
        """See GrammarBackend."""
        return XGrammarMatcher(self._compiled, self._pieces, self._encode)


class XGrammarBackend:
    """Compiles for the tokenizer of one model folder. XGrammar lets the GIL go while it compiles."""

    def __init__(self, tokenizer_info: xgrammar.TokenizerInfo, encode: Encode) -> None:
        self._pieces = list(tokenizer_info.decoded_vocab)
        self._encode = encode
        self._compiler = xgrammar.GrammarCompiler(
            tokenizer_info, max_threads=1, cache_limit_bytes=MAX_CACHED_NBYTES
        )

    @classmethod
    def load(cls, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> XGrammarBackend:
        """For the model in `folder`, with `vocab_size` logits. Raises RequestError where there is no tokenizer."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise RequestError("this model has no tokenizer.json, so grammars cannot be followed", status=400)
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        return cls(tokenizer_info(tokenizer, vocab_size, eos_token_ids), continuation_encoder(tokenizer))

    def compile(self, grammar: Grammar) -> XGrammarCompiled:
        """See GrammarBackend."""
        check_nesting(grammar)
        try:
            match grammar.kind:
                case "json_schema":
                    check_keywords(grammar.text)
                    compiled = self._compiler.compile_json_schema(
                        grammar.text, max_whitespace_cnt=MAX_WHITESPACE
                    )
                case "regex":
                    compiled = self._compiler.compile_regex(grammar.text)
                case "ebnf":
                    compiled = self._compiler.compile_grammar(grammar.text)
        except RuntimeError as error:
            message = _SOURCE_LINE.sub("", str(error)).strip()
            message = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}..."
            message = message or "XGrammar refuses it without a reason; is a number in it too large?"
            raise RequestError(f"{grammar.kind}: {message}", param=grammar.kind) from None
        return XGrammarCompiled(compiled, self._pieces, self._encode)


def tokenizer_info(
    tokenizer: tokenizers.Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
) -> xgrammar.TokenizerInfo:
    """The bytes of each token, as XGrammar sees them.

    Special tokens have none: their text is not part of the output, and a string must not be made of them. The
    same goes for ids that the model has and the tokenizer has not.
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
    """Encodes text that goes on in the middle of a sequence.

    Tokenizers of the sentencepiece family put a space before a text; there it is encoded behind a line break, and
    nothing comes back where the two melt into one token.
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
