"""The types of fields that both dialects have, and the checks of them that depend on the model or on limits."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar, cast

from pydantic import Field, WithJsonSchema

from router.dispatch.live_rids import Claim
from router.http.body import FailFast, OneOf, about, one_or_more
from router.http.limits import MAX_BATCH_SIZE, HttpLimits
from router.http.wording import wrong
from router.request.prompt import Prompt
from router.request.queue_limit import QueuePlaces
from router.text.served_model import ServedModel
from shared.errors import RequestError, maximum_context
from shared.protocol.logprobs import MAX_INPUT_LOGPROBS, MAX_TOP_LOGPROBS, LogprobParams

T = TypeVar("T")

MAX_ANSWER_LOGPROBS = 4 * MAX_INPUT_LOGPROBS
"""Numbers about the tokens of all prompts of one HTTP request, counted for each choice. They are in one answer."""
MAX_RID_CHARS = 256
MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID})]
"""`check_token_ids` checks the model's bounds. The type checks none, since a prompt may have 100,000 ids."""
TokenIds = Annotated[list[TokenId], FailFast()]
Texts = Annotated[list[str], FailFast(), Field(min_length=1, max_length=MAX_BATCH_SIZE)]
IdRows = Annotated[list[TokenIds], FailFast(), Field(min_length=1, max_length=MAX_BATCH_SIZE)]
IdPrompts = Annotated[
    list[int] | list[list[int]],
    OneOf(
        "a list of token ids, or a list of such lists",
        {"list[int]": Annotated[TokenIds, Field(min_length=1)], "list[list]": IdRows},
    ),
]
Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID_CHARS)]
Rids = Annotated[
    str | list[str] | None,
    one_or_more("a string or a list of strings", "str", Rid, MAX_BATCH_SIZE),
    about("Names the request, for /abort_request; no other that runs may have the same."),
]
ReturnTimeline = Annotated[bool, about("Tell when it was in which stage, and on which node.")]
CHOSEN_HERE = "the router's to choose"
"""The error text for fields that name the nodes of a request or how they connect."""
TopNum = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
ExtraKey = Annotated[str, Field(max_length=MAX_RID_CHARS)]
MAX_PRIORITY = 1000
"""The bound on a priority and its negative. Ageing raises priorities, so this bounds how long a request waits."""
MAX_ROUTING_KEY_CHARS = 256
ROUTING_KEY_HEADER = "x-smg-routing-key"
"""SGLang's name. Proxies in front of a fleet set this header, since they do not rewrite bodies."""
AddSpecialTokens = Annotated[bool, about("A text gets those that the tokenizer adds, such as the BOS.")]
Priority = Annotated[
    int,
    about(
        "Higher is served first, where the nodes have --enable-priority-scheduling.",
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
    ),
]
RoutingKey = Annotated[
    str | None,
    about(
        "Requests with one key are grouped under --schedule-policy routing-key. "
        "The header X-SMG-Routing-Key counts where this is left out.",
        max_length=MAX_ROUTING_KEY_CHARS,
    ),
]


@dataclass(frozen=True)
class Intake:
    """What a body is read with: model and limits, and of its request the headers, the places and the rids."""

    model: ServedModel
    limits: HttpLimits
    headers: Mapping[str, str]
    places: QueuePlaces
    claim: Claim

    def take(self, rids: Sequence[str], counts: Sequence[int], *, whole: str | None, shared: bool) -> None:
        """Take places in the queue and the rids of all prompts, which become `counts` sequences. RequestError."""
        self.places.hold(sum(counts))
        self.claim.take(rids, counts, whole=whole, shared=shared)

    async def input_ids(
        self,
        texts: Sequence[str],
        ids: list[list[int]],
        field: str,
        *,
        batched: bool,
        add_special_tokens: bool = True,
    ) -> list[list[int]]:
        """The token ids of the prompts in `field`, which has `texts` or `ids`. Raises RequestError."""
        if texts:
            special = add_special_tokens
            ids = await encode_prompts(
                texts, self.model, self.limits, field, batched=batched, add_special_tokens=special
            )
        for at, row in enumerate(ids):
            self.limits.check_prompt(row, f"prompt {at}" if batched else "the prompt", field)
        return ids


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the model does not have."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        at, outside = next((at, i) for at, i in enumerate(token_ids) if not 0 <= i < vocab_size)
        raise wrong(f"{name}[{at}]", f"a token id from 0 to {vocab_size - 1}", outside)


async def encode_prompts(
    texts: Sequence[str],
    model: ServedModel,
    limits: HttpLimits,
    field: str,
    *,
    batched: bool,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """The token ids of `texts`. Raises RequestError.

    A text that would not fit even if all of its tokens were the longest is refused before it is tokenized, since that
    could take many seconds.
    """
    most_tokens, token_chars = (
        limits.most_prompt_tokens(model.context_length),
        model.tokenizer.max_token_chars,
    )
    for at, text in enumerate(texts):
        if len(text) > most_tokens * token_chars:
            where = f"prompt {at}" if batched else "the prompt"
            raise RequestError(
                f"{where} has {len(text)} characters, more than {most_tokens} tokens of at most {token_chars} can "
                f"hold: {maximum_context(most_tokens)}",
                param=field,
                code="context_length_exceeded",
            )
    return await model.tokenizer.encode(texts, add_special_tokens=add_special_tokens)


def id_rows(
    name: str, value: list[int] | list[list[int]], vocab_size: int, limits: HttpLimits
) -> tuple[list[list[int]], bool]:
    """The rows of token ids in `value`, whose type is IdPrompts, and whether it is a list of rows."""
    batched = isinstance(value[0], list)
    rows = cast("list[list[int]]", value if batched else [value])
    limits.check("max_batch_size", name, len(rows))
    for at, row in enumerate(rows):
        check_token_ids(f"{name}[{at}]" if batched else name, row, vocab_size)
    return rows, batched


def per_prompt(
    name: str, value: T | list[T | None] | None, default: T, num_prompts: int, *, batched: bool
) -> list[T]:
    """A field's value for each prompt. The field has one value for all or a list of them; null is the default."""
    if not isinstance(value, list):
        return [default if value is None else value] * num_prompts
    if not batched or len(value) != num_prompts:
        expected = f"one value, or a list of {num_prompts}, one for each prompt" if batched else "one value"
        raise RequestError(f"{name} must be {expected}, not a list of {len(value)}", param=name)
    return [default if item is None else item for item in value]


def read_rids(rid: str | list[str] | None, num_prompts: int, *, batched: bool) -> list[str]:
    """A rid for each prompt: the client's, or a random one. A string that names a batch is numbered."""
    if rid is None:
        return [uuid.uuid4().hex for _ in range(num_prompts)]
    if isinstance(rid, str):
        return [f"{rid}_{i}" for i in range(num_prompts)] if batched else [rid]
    if len(rid) != num_prompts:
        raise wrong("rid", f"a string or a list of {num_prompts}, one for each prompt", rid)
    return rid


def read_routing_key(routing_key: str | None, headers: Mapping[str, str]) -> str:
    """The routing key of a body; the header counts where the body has none. Raises RequestError."""
    if routing_key is None:
        routing_key = headers.get(ROUTING_KEY_HEADER, "")
        if len(routing_key) > MAX_ROUTING_KEY_CHARS:
            raise wrong("routing_key", f"at most {MAX_ROUTING_KEY_CHARS} characters long", routing_key)
    return routing_key


def check_num_logprobs(prompts: Sequence[Prompt], named: Callable[[LogprobParams], str], param: str) -> None:
    """Refuse more numbers about prompt tokens than an answer may have; `named` writes the fields that ask."""
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
