"""The logprob fields of requests: what may be asked for, and how much of it at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, cast

from pydantic import Field

from router.http.body import FailFast, OneOf
from router.http.limits import HttpLimits
from router.http.wording import wrong
from router.request.prompt import Prompt
from router.request.prompts import TokenIds, check_token_ids, per_prompt
from shared.errors import RequestError
from shared.protocol.logprobs import (
    MAX_INPUT_LOGPROBS,
    MAX_TOKEN_IDS_LOGPROB,
    MAX_TOP_LOGPROBS,
    OUTPUTS_ONLY,
    LogprobParams,
)

MAX_ANSWER_LOGPROBS = 4 * MAX_INPUT_LOGPROBS
"""Numbers about all prompts of one HTTP request, once for each choice: its answer is made in one go."""
_MAX_START_LEN = 2**31 - 1

TopNum = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
StartLen = Annotated[int, Field(ge=OUTPUTS_ONLY, le=_MAX_START_LEN)]
JudgedIds = Annotated[TokenIds, Field(max_length=MAX_TOKEN_IDS_LOGPROB)]

ReturnLogprob = Annotated[
    bool | list[bool | None],
    OneOf(
        "true or false, or a list of them", {"bool": bool, "list": Annotated[list[bool | None], FailFast()]}
    ),
    Field(description="Tell the logprobs of output tokens."),
]
LogprobStartLen = Annotated[
    int | list[int | None],
    OneOf(
        "an integer or a list of integers",
        {"int": StartLen, "list": Annotated[list[StartLen | None], FailFast()]},
    ),
    Field(description="Tell those of prompt tokens too, from this position on; -1: of none."),
]
TopLogprobsNum = Annotated[
    int | list[int | None],
    OneOf(
        "an integer or a list of integers",
        {"int": TopNum, "list": Annotated[list[TopNum | None], FailFast()]},
    ),
    Field(description="And of so many of the likeliest tokens at each position."),
]
TokenIdsLogprob = Annotated[
    list[int] | list[list[int] | None] | None,
    OneOf(
        "a list of token ids, or a list of such lists",
        {"list[int]": JudgedIds, "list[list]": Annotated[list[JudgedIds | None], FailFast()]},
    ),
    Field(description="And of these tokens at each position."),
]


def ids_of_prompts(
    value: list[int] | list[list[int] | None] | None, num_prompts: int, *, batched: bool
) -> Sequence[list[int]]:
    """`token_ids_logprob` for each prompt: the ids of all are a list already, so a list of lists is one for each."""
    if not value or isinstance(value[0], int):
        return [cast("list[int]", value or [])] * num_prompts
    return per_prompt("token_ids_logprob", value, [], num_prompts, batched=batched)


def check_native(
    top_nums: int | list[int | None],
    token_ids: list[int] | list[list[int] | None] | None,
    vocab_size: int,
    limits: HttpLimits,
) -> None:
    """Refuse what limits and model do not allow /generate; in a list of values for each prompt, it names which."""
    if isinstance(top_nums, list):
        for at, top_num in enumerate(top_nums):
            limits.check_top_logprobs(f"top_logprobs_num[{at}]", top_num or 0)
    else:
        limits.check_top_logprobs("top_logprobs_num", top_nums)
    if not token_ids or isinstance(token_ids[0], int):
        check_token_ids("token_ids_logprob", cast("list[int]", token_ids or []), vocab_size)
    else:
        for at, row in enumerate(token_ids):
            check_token_ids(f"token_ids_logprob[{at}]", row or [], vocab_size)


def chat_logprobs(wanted: bool, top_num: int, limits: HttpLimits) -> LogprobParams | None:
    """`logprobs` and `top_logprobs` of /v1/chat/completions. Raises RequestError."""
    limits.check_top_logprobs("top_logprobs", top_num)
    if top_num and not wanted:
        raise wrong("top_logprobs", "left out, or logprobs be true", top_num)
    return LogprobParams(top_num=top_num) if wanted else None


def completion_logprobs(top_num: int | None, limits: HttpLimits, *, echo: bool) -> LogprobParams | None:
    """`logprobs` of /v1/completions: how many of the likeliest. With `echo` the prompt's tokens are judged too."""
    if top_num is None:
        return None
    limits.check_top_logprobs("logprobs", top_num)
    return LogprobParams(start_len=0 if echo else OUTPUTS_ONLY, top_num=top_num)


def check_start_len(wanted: LogprobParams | None, num_input_ids: int, where: str) -> None:
    """Refuse a `logprob_start_len` behind the prompt; `where` names the prompt in a batch."""
    if wanted is not None and wanted.start_len >= num_input_ids:
        raise RequestError(
            f"{where}logprob_start_len must be at most {num_input_ids - 1}, the last of {num_input_ids} prompt "
            f"tokens, not {wanted.start_len}",
            param="logprob_start_len",
        )


def check_num_native(prompts: Sequence[Prompt]) -> None:
    """Refuse more numbers about the prompts of /generate than can be told."""
    _check_num(
        prompts,
        lambda w: (
            f"logprob_start_len {w.start_len} with top_logprobs_num {w.top_num} and {len(w.token_ids)} "
            "token_ids_logprob"
        ),
        "logprob_start_len",
    )


def check_num_completion(prompts: Sequence[Prompt]) -> None:
    """Refuse more numbers about the prompts of /v1/completions than can be told."""
    _check_num(prompts, lambda w: f"echo with logprobs {w.top_num}", "logprobs")


def _check_num(prompts: Sequence[Prompt], named: Callable[[LogprobParams], str], param: str) -> None:
    total = 0
    for at, prompt in enumerate(prompts):
        wanted = prompt.work.params.logprobs
        if wanted is None:
            continue
        number = wanted.num_input_logprobs(len(prompt.work.input_ids))
        if number > MAX_INPUT_LOGPROBS:
            where = f"prompt {at}: " if len(prompts) > 1 else ""
            raise RequestError(
                f"{where}{named(wanted)} asks for {number} numbers, {wanted.numbers_per_token} for each of "
                f"{number // wanted.numbers_per_token} prompt tokens; at most {MAX_INPUT_LOGPROBS}",
                param=param,
            )
        total += number * prompt.options.n
        if total > MAX_ANSWER_LOGPROBS:
            raise RequestError(
                f"{named(wanted)} asks for {total} numbers about prompt tokens, up to prompt {at} of "
                f"{len(prompts)} with n {prompt.options.n}; at most {MAX_ANSWER_LOGPROBS} in one answer",
                param=param,
            )
