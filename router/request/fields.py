"""The types of fields that both dialects have, and the checks of them that depend on the model or on limits."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

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


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the model does not have."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        at, outside = next((at, i) for at, i in enumerate(token_ids) if not 0 <= i < vocab_size)
        raise wrong(f"{name}[{at}]", f"a token id from 0 to {vocab_size - 1}", outside)


class Prompts:
    """The prompts of a request, which `field` has as `texts` or as `ids`, in a list or not."""

    def __init__(
        self, field: str, value: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
    ) -> None:
        self.field = field
        self.is_list = not isinstance(value, str) and not isinstance(value[0], int)
        rows: Any = value if self.is_list else [value]
        self.texts: Sequence[str] = rows if isinstance(rows[0], str) else ()
        self.ids: Sequence[list[int]] = () if self.texts else rows

    def __len__(self) -> int:
        return len(self.texts or self.ids)

    def check(self, model: ServedModel, limits: HttpLimits) -> None:
        """Refuse too many prompts, and ids that the model does not have."""
        limits.check("max_batch_size", self.field, len(self))
        for at, row in enumerate(self.ids):
            check_token_ids(f"{self.field}[{at}]" if self.is_list else self.field, row, model.vocab_size)

    def named(self, at: int) -> str:
        """A prompt, in errors."""
        return f"prompt {at}" if self.is_list else "the prompt"

    def each(self, name: str, value: T | list[T | None] | None, default: T) -> list[T]:
        """The value of a field for each prompt. It has one for all or a list of them; null is the default."""
        if not isinstance(value, list):
            return [default if value is None else value] * len(self)
        if not self.is_list or len(value) != len(self):
            a_list = f", or a list of {len(self)}, one for each prompt" if self.is_list else ""
            raise RequestError(f"{name} must be one value{a_list}, not a list of {len(value)}", param=name)
        return [default if item is None else item for item in value]

    def rids(self, rid: str | list[str] | None) -> list[str]:
        """A rid for each prompt: the client's, or a random one. A string that names a batch is numbered."""
        if rid is None:
            return [uuid.uuid4().hex for _ in range(len(self))]
        if isinstance(rid, str):
            return [f"{rid}_{i}" for i in range(len(self))] if self.is_list else [rid]
        if len(rid) != len(self):
            raise wrong("rid", f"a string or a list of {len(self)}, one for each prompt", rid)
        return rid

    async def encode(
        self, model: ServedModel, limits: HttpLimits, *, add_special_tokens: bool = True
    ) -> Sequence[list[int]]:
        """The token ids of each prompt. Raises RequestError.

        A text that would not fit even if all of its tokens were the longest is refused before it is tokenized, since
        that could take many seconds.
        """
        most_tokens, token_chars = (
            limits.most_prompt_tokens(model.context_length),
            model.tokenizer.max_token_chars,
        )
        for at, text in enumerate(self.texts):
            if len(text) > most_tokens * token_chars:
                raise RequestError(
                    f"{self.named(at)} has {len(text)} characters, more than {most_tokens} tokens of at most "
                    f"{token_chars} can hold: {maximum_context(most_tokens)}",
                    param=self.field,
                    code="context_length_exceeded",
                )
        if self.ids:
            return self.ids
        return await model.tokenizer.encode(self.texts, add_special_tokens=add_special_tokens)


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
