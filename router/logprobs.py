"""The logprob fields of requests, and how each API words the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from router.detokenizer import Detokenizer
from router.fields import Fields
from router.generation import Generation
from router.tokenizer import Tokenizer
from shared.errors import RequestError
from shared.protocol.logprobs import (
    MAX_TOKEN_IDS_LOGPROB,
    MAX_TOP_LOGPROBS,
    OUTPUTS_ONLY,
    LogprobParams,
    TokenLogprobs,
)

_MAX_START_LEN = 2**31 - 1
_FIELDS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob")

TextOf = Callable[[int], str]
Entry = tuple[float | None, int, str | None]
"""(logprob, token id, text), as SGLang lists them; there is no logprob of a token that nothing comes before."""


# --------------------------------------------------------------------------------------------- requests
def read_native_logprobs(
    fields: Fields, num_prompts: int, batched: bool, vocab_size: int
) -> list[LogprobParams | None]:
    """What /generate asks for each prompt; a value, or in a batch a list of them. None where nothing is asked."""
    rows = [
        Fields({name: _value_at(fields, name, at, num_prompts, batched) for name in _FIELDS})
        for at in range(num_prompts)
    ]
    return [_read_row(row, vocab_size) for row in rows]


def _value_at(fields: Fields, name: str, at: int, num_prompts: int, batched: bool) -> object:
    value = fields.raw(name)
    # The ids of one prompt are a list already.
    is_list = isinstance(value, list) and (
        name != "token_ids_logprob" or any(isinstance(v, list) for v in value)
    )
    if not is_list:
        return value
    assert isinstance(value, list)
    if not batched or len(value) != num_prompts:
        expected = f"one value, or a list of {num_prompts}, one for each prompt" if batched else "one value"
        raise fields.wrong(name, expected)
    return value[at]


def _read_row(row: Fields, vocab_size: int) -> LogprobParams | None:
    wanted = LogprobParams(
        start_len=row.integer("logprob_start_len", OUTPUTS_ONLY, low=OUTPUTS_ONLY, high=_MAX_START_LEN),
        top_num=row.integer("top_logprobs_num", 0, low=0, high=MAX_TOP_LOGPROBS),
        token_ids=row.integers(
            "token_ids_logprob", low=0, high=vocab_size - 1, max_count=MAX_TOKEN_IDS_LOGPROB
        ),
    )
    return wanted if row.boolean("return_logprob", False) else None


def check_start_len(wanted: LogprobParams | None, num_input_ids: int, where: str) -> None:
    """Refuse a `logprob_start_len` behind the prompt; `where` names the prompt in a batch."""
    if wanted is not None and wanted.start_len >= num_input_ids:
        raise RequestError(
            f"{where}logprob_start_len must be at most {num_input_ids - 1}, the last of {num_input_ids} prompt "
            f"tokens, not {wanted.start_len}",
            param="logprob_start_len",
        )


def read_chat_logprobs(fields: Fields) -> LogprobParams | None:
    """`logprobs` and `top_logprobs` of /v1/chat/completions."""
    top_num = fields.integer("top_logprobs", 0, low=0, high=MAX_TOP_LOGPROBS)
    if fields.boolean("logprobs", False):
        return LogprobParams(top_num=top_num)
    if top_num:
        raise fields.wrong("top_logprobs", "left out, or logprobs be true")
    return None


def read_completion_logprobs(fields: Fields, *, echo: bool) -> LogprobParams | None:
    """`logprobs` of /v1/completions: how many of the likeliest. With `echo` the prompt's tokens are judged too."""
    if fields.raw("logprobs") is False:
        return None
    top_num = fields.optional_integer("logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if top_num is None:
        return None
    return LogprobParams(start_len=0 if echo else OUTPUTS_ONLY, top_num=top_num)


# ---------------------------------------------------------------------------------------------- answers
def native_logprobs(generation: Generation, text_of: TextOf | None) -> dict[str, object]:
    """The logprob fields of `meta_info` so far; `text_of` fills in texts, for those who want them."""
    wanted = generation.prompt.sampling.params.logprobs
    if wanted is None:
        return {}
    prompt = _Judged.prompt(generation, wanted)
    output = _Judged(generation.output_ids, generation.output_logprobs)
    answer: dict[str, object] = {
        "input_token_logprobs": prompt.own(text_of),
        "output_token_logprobs": output.own(text_of),
    }
    if wanted.top_num:
        answer["input_top_logprobs"] = prompt.top(text_of)
        answer["output_top_logprobs"] = output.top(text_of)
    if wanted.token_ids:
        answer["input_token_ids_logprobs"] = prompt.of_token_ids(wanted.token_ids, text_of)
        answer["output_token_ids_logprobs"] = output.of_token_ids(wanted.token_ids, text_of)
    return answer


@dataclass(frozen=True)
class _Judged:
    """Tokens with their logprobs; None for the first of a prompt, which nothing predicts."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]

    @classmethod
    def prompt(cls, generation: Generation, wanted: LogprobParams) -> _Judged:
        if wanted.start_len < 0:
            return cls((), ())
        logprobs = (None, *generation.input_logprobs)
        return cls(generation.prompt.input_ids[wanted.start_len :][: len(logprobs)], logprobs)

    def own(self, text_of: TextOf | None) -> list[Entry]:
        judged = zip(self.token_ids, self.logprobs, strict=True)
        return [_entry(known.logprob if known else None, token_id, text_of) for token_id, known in judged]

    def top(self, text_of: TextOf | None) -> list[list[Entry] | None]:
        return [_entries(known.top, text_of) if known else None for known in self.logprobs]

    def of_token_ids(self, token_ids: Sequence[int], text_of: TextOf | None) -> list[list[Entry] | None]:
        return [
            _entries(zip(known.of_token_ids, token_ids, strict=True), text_of) if known else None
            for known in self.logprobs
        ]


def _entries(judged: Iterable[tuple[float, int]], text_of: TextOf | None) -> list[Entry]:
    return [_entry(logprob, token_id, text_of) for logprob, token_id in judged]


def _entry(logprob: float | None, token_id: int, text_of: TextOf | None) -> Entry:
    return logprob, token_id, text_of(token_id) if text_of is not None else None


def chat_logprobs(generation: Generation, first: int, tokenizer: Tokenizer) -> dict[str, object]:
    """`choices[].logprobs` of a chat for the output tokens from `first` on."""

    def worded(logprob: float, token_id: int) -> dict[str, object]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": logprob,
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    judged = zip(generation.output_ids[first:], generation.output_logprobs[first:], strict=True)
    content = [
        {**worded(known.logprob, token_id), "top_logprobs": [worded(*top) for top in known.top]}
        for token_id, known in judged
    ]
    return {"content": content, "refusal": None}


class TextOffsets:
    """Where the text of each output token begins, for a sequence that grows."""

    def __init__(self, detokenizer: Detokenizer, start: int) -> None:
        self._detokenizer = detokenizer
        self._end = start
        self._offsets: list[int] = []

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of all of `token_ids`, of which earlier calls have seen the first ones."""
        for token_id in token_ids[len(self._offsets) :]:
            self._offsets.append(self._end)
            self._end += len(self._detokenizer.feed((token_id,)))
        return self._offsets


class JudgedText:
    """The tokens of a completion with their logprobs and places in its text; the prompt's too where it is echoed."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer, echo: str | None) -> None:
        skip = generation.prompt.sampling.skip_special_tokens
        self._generation = generation
        self._tokenizer = tokenizer
        self._echo = echo
        self._in_prompt = TextOffsets(tokenizer.detokenizer(skip_special_tokens=skip), 0)
        self._in_output = TextOffsets(tokenizer.detokenizer(skip_special_tokens=skip), len(echo or ""))

    def worded(self, *, prompt: bool, output_from: int | None) -> dict[str, object]:
        """`choices[].logprobs` of the prompt, and of output tokens from `output_from` on (None: of none)."""
        generation = self._generation
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        offsets: list[int] = []
        if prompt and self._echo is not None:
            logprobs += (None, *generation.input_logprobs)
            token_ids += generation.prompt.input_ids[: len(logprobs)]
            offsets += self._in_prompt.of(token_ids)
        if output_from is not None:
            token_ids += generation.output_ids[output_from:]
            logprobs += generation.output_logprobs[output_from:]
            offsets += self._in_output.of(generation.output_ids)[output_from:]
        judged = list(zip(token_ids, logprobs, strict=True))
        text_of = self._tokenizer.token_text
        return {
            "tokens": [text_of(token_id) for token_id in token_ids],
            "token_logprobs": [known.logprob if known else None for known in logprobs],
            "top_logprobs": [
                self._likeliest(token_id, known) if known else None for token_id, known in judged
            ],
            "text_offset": offsets,
        }

    def _likeliest(self, token_id: int, known: TokenLogprobs) -> dict[str, float]:
        """Also the token itself, be it among the likeliest or not, as OpenAI's does."""
        text_of = self._tokenizer.token_text
        return {text_of(other): logprob for logprob, other in (*known.top, (known.logprob, token_id))}
