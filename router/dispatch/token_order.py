"""The tokens that nodes tell of one sequence: checked, since a broken node may say anything, and put in order.

A node goes on where it left off. Position 0 comes from the prefill and from the decode node, so each node is checked
by itself. Tokens of two nodes may still overtake each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shared.protocol.logprobs import LogprobParams, Logprobs
from shared.protocol.messages import Role, TokenEntry, Work

if TYPE_CHECKING:
    from router.dispatch.running_req import Attempt


class TokenOrder:
    """Forwards each output position once, and after those before it. `why_wrong` has bounded the positions.

    The first token to arrive for a position is kept.
    """

    def __init__(self, first: int) -> None:
        self.next = first
        self.end: int | None = None
        self._ahead: dict[int, int] = {}

    @property
    def finished(self) -> bool:
        """True when every token up to the announced end has been forwarded."""
        return self.end is not None and self.next >= self.end

    def finish_at(self, position: int) -> None:
        """No token at or after `position` belongs to the sequence. The first announcement counts."""
        if self.end is None:
            self.end = max(position, self.next)

    def add(self, position: int, token_ids: Sequence[int]) -> list[int]:
        """Take tokens whose first is at `position`; returns those that can be forwarded now."""
        limit = position + len(token_ids) if self.end is None else self.end
        if position == self.next and not self._ahead:
            ready = list(token_ids[: max(0, limit - position)])
            self.next += len(ready)
            return ready
        for at, token_id in enumerate(token_ids, start=position):
            if self.next <= at < limit:
                self._ahead.setdefault(at, token_id)
        ready = []
        while self.next in self._ahead and self.next != self.end:
            ready.append(self._ahead.pop(self.next))
            self.next += 1
        return ready


def why_wrong(entry: TokenEntry, attempt: Attempt, work: Work, role: Role, vocab_size: int) -> str:
    """Why the node of `role` in `attempt` cannot have computed `entry` of `work`; empty if it can have.

    The first message of a move's target may lack logprobs: it repeats tokens of the source.
    """
    num_told = attempt.num_told.get(role)
    begins_right = entry.position == num_told if num_told is not None else entry.position <= attempt.first
    if entry.position < 0 or not begins_right:
        return f"tokens at position {entry.position}, where {num_told or attempt.first} was due"
    num_tokens, limit = len(entry.token_ids), work.params.max_new_tokens
    end = entry.position + num_tokens
    matched = () if entry.finish is None or entry.finish.matched is None else (entry.finish.matched,)
    if wrong := _outside((*entry.token_ids, *matched), vocab_size):
        return wrong
    if end > limit or (end == limit > 0 and entry.finish is None):
        return f"{end} tokens of {limit} without a finish"
    if entry.finish is not None and not num_tokens and limit:
        return f"a finish at position {end} without a token"
    num_known = len(work.input_ids) + attempt.first
    if entry.report is not None and entry.report.cached_tokens > num_known:
        return f"{entry.report.cached_tokens} cached tokens of {num_known}"
    asked, is_first = work.params.logprobs, num_told is None
    if asked is None:
        return "logprobs that were not asked for" if entry.logprobs or entry.input_logprobs else ""
    num_inputs = asked.num_input_logprobs(len(work.input_ids)) // asked.numbers_per_token
    may_lack = not num_tokens or (attempt.is_move and is_first)
    may_lack_inputs = not (num_inputs and is_first) or attempt.first > 0
    return _wrong_logprobs(
        entry.logprobs, asked, num_tokens, vocab_size, may_lack=may_lack
    ) or _wrong_logprobs(entry.input_logprobs, asked, num_inputs, vocab_size, may_lack=may_lack_inputs)


def _wrong_logprobs(
    told: Logprobs | None, asked: LogprobParams, num_tokens: int, vocab_size: int, *, may_lack: bool
) -> str:
    if told is None:
        return "" if may_lack else f"no logprobs of {num_tokens} tokens"
    nbytes = (len(told.chosen), len(told.top_ids), len(told.of_token_ids))
    if nbytes != tuple(4 * num_tokens * each for each in (1, asked.top_num, len(asked.token_ids))):
        return f"logprobs with parts of {nbytes} bytes for {num_tokens} tokens"
    return _outside(array("i", told.top_ids), vocab_size)


def _outside(token_ids: Iterable[int], vocab_size: int) -> str:
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    return "" if wrong is None else f"the token id {wrong} of a vocabulary of {vocab_size}"
