"""Tells special tokens that a chat template writes from strings of a client that look like them.

A tokenizer makes a token of `<|im_end|>` wherever these characters stand. `ControlTokens` therefore puts MARK into
such strings of a client's values before a template is rendered, and `MarkedEncoder` encodes them as text.
"""

from __future__ import annotations

import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer

from shared.errors import RequestError

MARK = "\ud800"
"""It has no UTF-8, so no body, template or tokenizer has it."""


class ControlTokens:
    """The tokens that come from templates alone: special ones, and added ones that the templates' `sources` name."""

    def __init__(self, added: Iterable[AddedToken], sources: Iterable[str]) -> None:
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

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._renamed = Tokenizer(tokenizer.model)
        self._renamed.normalizer, self._renamed.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
        added = [(i, t) for i, t in sorted(tokenizer.get_added_tokens_decoder().items()) if t.content]
        self._only_tokens = [t.content for i, t in added if i in self._ids(t.content)]
        self._names = names = {t.content: secrets.token_hex(16) for _, t in added}
        self._pattern = _pattern(names)
        self._renamed.add_tokens(
            [
                AddedToken(names[t.content], lstrip=t.lstrip, rstrip=t.rstrip, normalized=False)
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
