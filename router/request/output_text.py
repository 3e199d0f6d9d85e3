"""The output of one sequence as text: tokens in, text that is safe to show out, until a stop ends it.

Stop strings and patterns are looked for in the text *with* its special tokens, also where these are not shown, as in
SGLang: `"stop": "<|im_end|>"` works with skip_special_tokens. The token that completes a stop is an output token, and
the last; what the same message says behind it is dropped. A node's own end (EOS, a stop id, the length) comes after
every token before it: a stop that the last allowed token completes has ended the text, one that only the EOS token
itself would complete has not.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.dispatch.running_req import Aborted
from router.request.prompt import Prompt
from router.request.stop_matcher import StopConditions, StopMatcher
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer
from shared.protocol.messages import Finish


class OutputText:
    """`token_ids` and `text` so far; `matched` is the stop that ended them, as the client gave it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, conditions: StopConditions) -> None:
        self.token_ids: list[int] = []
        self.matched: str | None = None
        self._tokenizer = tokenizer
        self._options = prompt.options
        self._min_new_tokens = prompt.work.params.min_new_tokens
        self._detokenizer: Detokenizer = tokenizer.detokenizer(
            skip_special_tokens=self._options.skip_special_tokens, prompt_ids=prompt.work.input_ids
        )
        self._matcher = StopMatcher(conditions, keep=self._options.no_stop_trim) if conditions else None
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All of it; put together when it is asked for, since a stream of differences never does."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, token_ids: Sequence[int], finish: Finish | Aborted | None) -> str:
        """The text that these tokens add, and that the end of the sequence does. Raises RequestError."""
        if self._matcher is None:
            self.token_ids += token_ids
            added = self._detokenizer.feed(token_ids[: self._num_shown(token_ids, finish)])
            if finish is not None:
                added += self._detokenizer.flush()
        else:
            added = self._add_until_stop(self._matcher, token_ids, finish)
        if added:
            self._pieces.append(added)
        return added

    def _add_until_stop(
        self, matcher: StopMatcher, token_ids: Sequence[int], finish: Finish | Aborted | None
    ) -> str:
        """Token by token, since a stop may end it between two of them."""
        added: list[str] = []
        by_stop_id = _is_stop_id(token_ids, finish)
        num_shown = self._num_shown(token_ids, finish)
        for at, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if at < num_shown:
                armed = self._armed and not (by_stop_id and at == len(token_ids) - 1)
                added.append(self._scan(matcher, token_id, armed=armed))
                if self.matched is not None:
                    return "".join(added)
        if finish is not None:
            scan = matcher.feed(self._detokenizer.flush(), armed=self._armed and not by_stop_id)
            self.matched = scan.matched
            added += (scan.text, matcher.flush())
        return "".join(added)

    def _scan(self, matcher: StopMatcher, token_id: int, *, armed: bool) -> str:
        before = ""
        if self._options.skip_special_tokens:
            scan = matcher.feed(self._tokenizer.special_text(token_id), visible=False, armed=armed)
            if scan.matched is not None:
                self.matched = scan.matched
                return scan.text
            before = scan.text
        scan = matcher.feed(self._detokenizer.feed((token_id,)), armed=armed)
        self.matched = scan.matched
        return before + scan.text

    @property
    def _armed(self) -> bool:
        """A stop may be completed only behind the first `min_new_tokens`; it may begin within them."""
        return len(self.token_ids) > self._min_new_tokens

    def _num_shown(self, token_ids: Sequence[int], finish: Finish | Aborted | None) -> int:
        """The id that stopped the sequence is an output id, but not text, unless the client wants it."""
        return len(token_ids) - (_is_stop_id(token_ids, finish) and not self._options.no_stop_trim)


def _is_stop_id(token_ids: Sequence[int], finish: Finish | Aborted | None) -> bool:
    """True when the last of these tokens is what the node stopped at."""
    return (
        isinstance(finish, Finish)
        and finish.type == "stop"
        and bool(token_ids)
        and token_ids[-1] == finish.matched
    )
