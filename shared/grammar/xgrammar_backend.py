"""Grammars by XGrammar (Dong et al. 2024, "XGrammar: Flexible and Efficient Structured Generation Engine").

Imported by the first grammar only: the library imports transformers, which takes a second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

import numpy as np
import tokenizers
import xgrammar
from transformers import PreTrainedTokenizerFast

from shared.errors import RequestError
from shared.protocol.sampling_params import Grammar

MAX_WHITESPACE = 64
"""Spaces between two elements of JSON at most; without a bound, a weak model goes on with spaces for ever."""
MAX_SCHEMA_DEPTH = 256
"""Levels of nesting in a schema's text; XGrammar's time and memory grow with the cube (400 objects take 11 s)."""
MAX_MESSAGE_CHARS = 500

_SOURCE_LINE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class XGrammarMatcher:
    """See GrammarMatcher."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)

    @property
    def is_terminated(self) -> bool:
        """See GrammarMatcher."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """See GrammarMatcher."""
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))

    def fill_mask(self, mask_GW: np.ndarray, row: int) -> None:
        """See GrammarMatcher."""
        self._matcher.fill_next_token_bitmask(mask_GW, row)


class XGrammarCompiled:
    """See CompiledGrammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled
        self.vocab_size = int(compiled.tokenizer_info.vocab_size)
        self.nbytes = int(compiled.memory_size_bytes)

    def new_matcher(self) -> XGrammarMatcher:
        """See GrammarBackend."""
        return XGrammarMatcher(self._compiled)


class XGrammarBackend:
    """Compiles for the tokenizer of one model folder. XGrammar lets the GIL go while it compiles."""

    def __init__(self, tokenizer_info: xgrammar.TokenizerInfo) -> None:
        self._compiler = xgrammar.GrammarCompiler(tokenizer_info, max_threads=1, cache_enabled=False)

    @classmethod
    def load(cls, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> XGrammarBackend:
        """For the model in `folder`, with `vocab_size` logits. Raises RequestError where there is no tokenizer."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise RequestError("this model has no tokenizer.json, so grammars cannot be followed", status=400)
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        return cls(tokenizer_info(tokenizer, vocab_size, eos_token_ids))

    def compile(self, grammar: Grammar) -> XGrammarCompiled:
        """See GrammarBackend."""
        try:
            match grammar.kind:
                case "json_schema":
                    _check_depth(grammar.text)
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
            raise RequestError(f"{grammar.kind}: {message}", param=grammar.kind) from None
        return XGrammarCompiled(compiled)


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


def _check_depth(schema: str) -> None:
    try:
        level = [json.loads(schema)]
    except ValueError:
        return  # the compiler says it better
    except RecursionError:
        level = [None]
        depth = MAX_SCHEMA_DEPTH + 1
    else:
        depth = 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        level = [child for node in level for child in _children(node)]
        depth += 1
    if depth > MAX_SCHEMA_DEPTH:
        raise RequestError(f"json_schema: nested deeper than {MAX_SCHEMA_DEPTH} levels", param="json_schema")


def _children(node: object) -> Collection[object]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()
