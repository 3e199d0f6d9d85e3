"""The prompts of a request: as a body has them, and each with its `Work` for nodes and the options of its text."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from router.config import HttpLimits
from router.http.responses import HEADER
from router.http.wording import wrong
from router.request.admission import Admission
from router.request.fields import MAX_ROUTING_KEY_CHARS
from router.text.served_model import ServedModel
from shared.errors import RequestError, maximum_context
from shared.protocol.logprobs import MAX_INPUT_LOGPROBS
from shared.protocol.messages import Work
from shared.protocol.sampling_params import MAX_SEED

T = TypeVar("T")

MAX_ANSWER_LOGPROBS = 4 * MAX_INPUT_LOGPROBS
"""Numbers about the prompts of one HTTP request, counted for each choice, and as many again about its output."""
ROUTING_KEY_HEADER = "x-smg-routing-key"
"""SGLang's name. Proxies in front of a fleet set this header, since they do not rewrite bodies."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How many answers a prompt gets, where their texts end, and which parts of them are shown.

    `stop_regex_field` and `grammar_field` are the fields of the request that had the patterns and the grammar.
    """

    n: int = 1
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_regex_field: str = "stop_regex"
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    grammar_field: str | None = None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a request. It becomes `options.n` sequences, and `work` is that of the first.

    `rid` is the client's or a random one, `asked_in` the field of the request that had the prompt. `split` sends the
    prompt through both fleets, however short it is.
    """

    rid: str
    work: Work
    options: AnswerOptions = field(default_factory=AnswerOptions)
    asked_in: str | None = None
    split: bool = False

    @property
    def num_input_logprobs(self) -> int:
        """The numbers about tokens of the prompt that are asked for."""
        wanted = self.work.params.logprobs
        return 0 if wanted is None else wanted.num_input_logprobs(len(self.work.input_ids))

    def work_of(self, choice: int) -> Work:
        """The work of choice `choice`, from 0 to n - 1, which is added to the seed."""
        params = self.work.params
        seed = (params.seed + choice) & MAX_SEED
        return msgspec.structs.replace(self.work, params=msgspec.structs.replace(params, seed=seed))

    def in_cache_of(self, owner: bytes) -> Prompt:
        """The prompt, which shares cached prefixes with prompts of the same `owner` alone; as it is if that is empty.

        `owner` is a digest of an API key. Nodes are sent a digest under it, which tells neither key nor `extra_key`.
        """
        if not owner:
            return self
        digest = blake2b(self.work.extra_key.encode(), key=owner, digest_size=16, person=b"baton-cache")
        return replace(self, work=msgspec.structs.replace(self.work, extra_key=digest.hexdigest()))

    def in_terms_of_request(self, error: RequestError) -> RequestError:
        """A node's error about the grammar names its kind; the result names the client's field instead."""
        grammar, asked_in = self.work.params.grammar, self.options.grammar_field
        if grammar is None or asked_in is None or error.param != grammar.kind:
            return error
        message = f"{asked_in}: {error.message.removeprefix(f'{grammar.kind}: ')}"
        return RequestError(message, status=error.status, param=asked_in, code=error.code)


# ----------------------------------------------------------------------------------- from a body to prompts
@dataclass(frozen=True)
class Intake:
    """What a body is read with: model and limits, and of its request the headers and the admission."""

    model: ServedModel
    limits: HttpLimits
    headers: Mapping[str, str]
    admission: Admission


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
        check_batch(self.field, len(self), limits)
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
        most_tokens = min(model.context_length, limits.max_prompt_tokens or model.context_length)
        token_chars = model.tokenizer.max_token_chars
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


def check_batch(field: str, num_sequences: int, limits: HttpLimits) -> None:
    """Refuse a request whose `field` makes too many sequences."""
    if num_sequences > limits.max_batch_size:
        raise RequestError(
            f"{field}: {num_sequences} sequences; at most {limits.max_batch_size} (--max-batch-size)",
            param=field,
        )


def check_prompt(input_ids: Sequence[int], where: str, field: str, limits: HttpLimits) -> None:
    """Refuse a prompt without tokens, or with too many. `where` names the prompt, and `field` its field."""
    most = limits.max_prompt_tokens
    if not input_ids:
        raise RequestError(f"{where} has no tokens", param=field)
    if most is not None and len(input_ids) > most:
        raise RequestError(
            f"{where} has {len(input_ids)} tokens; at most {most} are taken (--max-prompt-tokens): "
            f"{maximum_context(most)}",
            param=field,
            code="context_length_exceeded",
        )


def requested_rid(rid: str | list[str] | None, headers: Mapping[str, str]) -> str | list[str] | None:
    """The body's rid, or else the request id; None if the client gave neither."""
    return rid if rid is not None else headers.get(HEADER)


def read_routing_key(routing_key: str | None, headers: Mapping[str, str]) -> str:
    """The routing key of a body; the header counts where the body has none. Raises RequestError."""
    if routing_key is None:
        routing_key = headers.get(ROUTING_KEY_HEADER, "")
        if len(routing_key) > MAX_ROUTING_KEY_CHARS:
            raise wrong("routing_key", f"at most {MAX_ROUTING_KEY_CHARS} characters long", routing_key)
    return routing_key


def check_num_logprobs(prompts: Sequence[Prompt], param: str) -> None:
    """Refuse more numbers about prompt tokens than an answer may have; `param` asks for them."""
    total = 0
    for at, prompt in enumerate(prompts):
        wanted, number = prompt.work.params.logprobs, prompt.num_input_logprobs
        if wanted is not None and number > MAX_INPUT_LOGPROBS:
            where = f"prompt {at}: " if len(prompts) > 1 else ""
            raise RequestError(
                f"{where}{param} asks for {number} numbers, {wanted.numbers_per_token} for each of "
                f"{number // wanted.numbers_per_token} prompt tokens; at most {MAX_INPUT_LOGPROBS}",
                param=param,
            )
        total += number * prompt.options.n
        if total > MAX_ANSWER_LOGPROBS:
            raise RequestError(
                f"{param} asks for {total} numbers about prompt tokens, up to prompt {at} of "
                f"{len(prompts)} with n {prompt.options.n}; at most {MAX_ANSWER_LOGPROBS} in one answer",
                param=param,
            )
