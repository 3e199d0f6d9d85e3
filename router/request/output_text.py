"""The output of one sequence as text. Tokens go in, and text that is safe to show comes out, until a stop ends it.

Stops are searched in the text *with* its special tokens, also where these are not shown, as in SGLang: `"stop":
"<|im_end|>"` works with skip_special_tokens. The token that completes a stop is the last output token; later tokens
of the same message are dropped. A node's own end (EOS, a stop id, the length) comes after the tokens before it, so a
stop that the last allowed token completes ends the text. A stop that only the EOS token would complete does not.
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
    """`token_ids` and `text` so far; `matched` is the client's stop string or pattern that ended them."""

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
        """All text so far. The pieces are joined here, since a stream of differences does not need this."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, token_ids: Sequence[int], finish: Finish | Aborted | None) -> str:
        """The text that these tokens and the end of the sequence add. Raises RequestError."""
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
        """Add tokens one by one, since a stop may end the text between two of them."""
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
        """True behind the first `min_new_tokens`. A stop may begin within them, and must be completed behind them."""
        return len(self.token_ids) > self._min_new_tokens

    def _num_shown(self, token_ids: Sequence[int], finish: Finish | Aborted | None) -> int:
        """How many of these tokens become text: not the stop id, unless the client set no_stop_trim."""
        return len(token_ids) - (_is_stop_id(token_ids, finish) and not self._options.no_stop_trim)


def _is_stop_id(token_ids: Sequence[int], finish: Finish | Aborted | None) -> bool:
    """True when the node stopped at the last of these tokens."""
    return (
        isinstance(finish, Finish)
        and finish.type == "stop"
        and bool(token_ids)
        and token_ids[-1] == finish.matched
    )
