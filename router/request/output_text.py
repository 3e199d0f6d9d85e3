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
    """`token_ids` so far with the text of each; `matched` is the client's stop string or pattern that ended them.

    A token has the text that it completes, so one that is half a character, or may become a stop, has none.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, conditions: StopConditions) -> None:
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        """Of each token."""
        self.end = ""
        """The text behind that of all tokens, which the end of the sequence settles."""
        self.matched: str | None = None
        self._tokenizer = tokenizer
        self._options = prompt.options
        self._min_new_tokens = prompt.work.params.min_new_tokens
        self._detokenizer: Detokenizer = tokenizer.detokenizer(
            skip_special_tokens=self._options.skip_special_tokens, prompt_ids=prompt.work.input_ids
        )
        self._matcher = StopMatcher(conditions, keep=self._options.no_stop_trim) if conditions else None
        self._joined = ""
        self._num_joined = 0

    @property
    def text(self) -> str:
        """All text so far. The texts are joined here, since a stream of differences does not need this."""
        if self._num_joined < len(self.texts):
            self._joined += "".join(self.texts[self._num_joined :])
            self._num_joined = len(self.texts)
        return self._joined + self.end

    def add(self, token_ids: Sequence[int], finish: Finish | Aborted | None) -> str:
        """The text that these tokens and the end of the sequence add. Raises RequestError."""
        first = len(self.texts)
        by_stop_id = _is_stop_id(token_ids, finish)
        num_shown = len(token_ids) - (by_stop_id and not self._options.no_stop_trim)
        for at, token_id in enumerate(
            token_ids
        ):  # one by one, since a stop may end the text between two of them
            self.token_ids.append(token_id)
            armed = self._armed and not (by_stop_id and at == len(token_ids) - 1)
            self.texts.append(self._text_of(token_id, armed=armed) if at < num_shown else "")
            if self.matched is not None:
                return "".join(self.texts[first:])
        if finish is not None:
            self.end = self._detokenizer.flush()
            if self._matcher is not None:
                scan = self._matcher.feed(self.end, armed=self._armed and not by_stop_id)
                self.matched = scan.matched
                self.end = scan.text + self._matcher.flush()
        return "".join(self.texts[first:]) + self.end

    def _text_of(self, token_id: int, *, armed: bool) -> str:
        if self._matcher is None:
            return self._detokenizer.feed((token_id,))
        before = ""
        if self._options.skip_special_tokens:
            special = self._tokenizer.special_text(token_id)
            scan = self._matcher.feed(special, visible=False, armed=armed)
            if scan.matched is not None:
                self.matched = scan.matched
                return scan.text
            before = scan.text
        scan = self._matcher.feed(self._detokenizer.feed((token_id,)), armed=armed)
        self.matched = scan.matched
        return before + scan.text

    @property
    def _armed(self) -> bool:
        """True behind the first `min_new_tokens`. A stop may begin within them, and must be completed behind them."""
        return len(self.token_ids) > self._min_new_tokens


def _is_stop_id(token_ids: Sequence[int], finish: Finish | Aborted | None) -> bool:
    """True when the node stopped at the last of these tokens."""
    return (
        isinstance(finish, Finish)
        and finish.type == "stop"
        and bool(token_ids)
        and token_ids[-1] == finish.matched
    )
