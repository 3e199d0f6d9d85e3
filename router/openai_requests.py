"""Checks the bodies of OpenAI's routes and turns them into prompts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.fields import Fields, shown
from router.generate_api import HttpLimits, read_extra_key, read_ids, read_rids
from router.generation import Prompt
from router.logprobs import check_num_completion, read_chat_logprobs, read_completion_logprobs
from router.sampling import Dialect, check_batch_size, read_sampling
from router.scheduling_hints import read_hints
from router.served_model import ServedModel
from shared.errors import RequestError

_LATER = "not supported yet"
_MAX_MESSAGES = 4096
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_COMPLETIONS = Dialect(
    max_new_tokens=("max_tokens", "max_completion_tokens"),
    min_new_tokens="min_tokens",
    seed="seed",
    has_response_format=True,
    default_max_new_tokens=16,
)
_CHAT = Dialect(
    max_new_tokens=("max_completion_tokens", "max_tokens"),
    min_new_tokens="min_tokens",
    seed="seed",
    has_response_format=True,
    default_max_new_tokens=2**31 - 1,  # as much as fits
)
_COMPLETIONS_TO_COME: Mapping[str, Sequence[object]] = {
    "suffix": ("",),
    "lora_path": (),
}
_CHAT_TO_COME: Mapping[str, Sequence[object]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "audio": (),
    "prediction": (),
    "lora_path": (),
}


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """`usage` asks for a last event with it, `continuous_usage` for it in every event."""

    usage: bool
    continuous_usage: bool


@dataclass(frozen=True, kw_only=True)
class OpenAIRequest:
    """A checked body of either route. `id` is the client's rid or a random one; `stream` is None for one answer.

    `echoes` are the texts of the prompts, for those who want them in front of the answer.
    """

    id: str
    prompts: list[Prompt]
    stream: StreamOptions | None
    with_timeline: bool
    echoes: list[str] | None = None


async def read_completion(
    fields: Fields, model: ServedModel, limits: HttpLimits, headers: Mapping[str, str]
) -> OpenAIRequest:
    """A body of /v1/completions. Raises RequestError."""
    _check_model(fields, model)
    fields.refuse(_COMPLETIONS_TO_COME, _LATER)
    texts, ids, batched = _read_prompt(fields, model.vocab_size)
    num_prompts = len(texts or ids)
    samplings = [read_sampling(fields, _COMPLETIONS, model.vocab_size) for _ in range(num_prompts)]
    check_batch_size(num_prompts * samplings[0].n, limits.max_batch_size)
    if fields.optional_integer("best_of", low=1, high=128) not in (None, samplings[0].n):
        raise fields.wrong("best_of", f"the same as n, {samplings[0].n}")
    reply_id, rids = _read_id(fields, "cmpl-", num_prompts, batched)
    extra_key, hints = read_extra_key(fields), read_hints(fields, headers)
    echo = fields.boolean("echo", False)
    logprobs = read_completion_logprobs(fields, echo=echo)
    if texts:
        ids = await model.tokenizer.encode(texts)
    for at, input_ids in enumerate(ids):
        if not input_ids:
            raise RequestError(f"prompt {at} has no tokens", param="prompt")
    prompts = [
        Prompt(
            rid=rid,
            input_ids=tuple(input_ids),
            sampling=sampling.judged(logprobs),
            extra_key=extra_key,
            hints=hints,
        )
        for rid, input_ids, sampling in zip(rids, ids, samplings, strict=True)
    ]
    check_num_completion(prompts)
    echoes = None
    if echo:
        skip = samplings[0].skip_special_tokens
        echoes = texts or [model.tokenizer.decode(row, skip_special_tokens=skip) for row in ids]
    return OpenAIRequest(
        id=reply_id,
        prompts=prompts,
        stream=_read_stream(fields),
        with_timeline=_wants_timeline(fields),
        echoes=echoes,
    )


async def read_chat(
    fields: Fields, model: ServedModel, limits: HttpLimits, headers: Mapping[str, str]
) -> OpenAIRequest:
    """A body of /v1/chat/completions. Raises RequestError."""
    _check_model(fields, model)
    fields.refuse({"chat_template": ()}, "the server's to choose")
    fields.refuse(_CHAT_TO_COME, _LATER)
    messages = _read_messages(fields)
    sampling = read_sampling(fields, _CHAT, model.vocab_size).judged(read_chat_logprobs(fields))
    check_batch_size(sampling.n, limits.max_batch_size)
    reply_id, rids = _read_id(fields, "chatcmpl-", 1, False)
    if model.chat_template is None:
        raise RequestError(f"model {model.name} has no chat template; the server needs --chat-template FILE")
    variables = fields.raw("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise fields.wrong("chat_template_kwargs", "an object")
    text = model.chat_template.render(messages, variables)
    # The template writes the special tokens itself.
    ids = (await model.tokenizer.encode([text], add_special_tokens=False))[0]
    if not ids:
        raise RequestError("the chat template made no prompt of these messages", param="messages")
    prompt = Prompt(
        rid=rids[0],
        input_ids=tuple(ids),
        sampling=sampling,
        extra_key=read_extra_key(fields),
        hints=read_hints(fields, headers),
    )
    return OpenAIRequest(
        id=reply_id, prompts=[prompt], stream=_read_stream(fields), with_timeline=_wants_timeline(fields)
    )


def _check_model(fields: Fields, model: ServedModel) -> None:
    name = fields.string("model", max_chars=1024)
    if name not in (None, "", "default", model.name, model.model):
        raise unknown_model(name or "", model)


def unknown_model(name: str, model: ServedModel) -> RequestError:
    """The 404 for a model that is not served here."""
    return RequestError(
        f"model {shown(name)} does not exist; this server has {model.name!r}",
        status=404,
        param="model",
        code="model_not_found",
    )


def _read_stream(fields: Fields) -> StreamOptions | None:
    options = fields.nested("stream_options")
    usage = options.boolean("include_usage", False)
    continuous = options.boolean("continuous_usage_stats", False)
    if not fields.boolean("stream", False):
        return None
    return StreamOptions(usage=usage, continuous_usage=continuous)


def _wants_timeline(fields: Fields) -> bool:
    return fields.boolean("return_timeline", False)


def _read_id(fields: Fields, prefix: str, num_prompts: int, batched: bool) -> tuple[str, list[str]]:
    """The reply's id, and a rid for each prompt that /abort_request finds by that id."""
    given = fields.raw("rid")
    if isinstance(given, list):
        return prefix + uuid.uuid4().hex, read_rids(fields, num_prompts, batched)
    if given is None:
        fields = Fields({"rid": prefix + uuid.uuid4().hex})
    return str(fields.raw("rid")), read_rids(fields, num_prompts, batched)


def _read_prompt(fields: Fields, vocab_size: int) -> tuple[list[str], list[list[int]], bool]:
    value = fields.raw("prompt")
    if isinstance(value, str):
        return [value], [], False
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return value, [], True
    if isinstance(value, list) and value and all(type(item) in (int, list) for item in value):
        rows, batched = read_ids(fields, "prompt", vocab_size)
        return [], rows, batched
    raise fields.wrong("prompt", "a string, a list of strings, token ids, or a list of lists of token ids")


def _read_messages(fields: Fields) -> list[dict[str, object]]:
    value = fields.raw("messages")
    if not isinstance(value, list) or not value:
        raise fields.wrong("messages", "a list of at least one message")
    if len(value) > _MAX_MESSAGES:
        raise RequestError(f"messages has {len(value)} entries; at most {_MAX_MESSAGES}", param="messages")
    return [_read_message(message, f"messages[{at}]") for at, message in enumerate(value)]


def _read_message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object, not {shown(message)}", param="messages")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(_ROLES)}, not {shown(role)}", param="messages"
        )
    if content is None and role == "assistant":
        content = ""  # a message that only calls tools
    if isinstance(content, list):
        content = "".join(_read_part(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    if not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be a string or a list of parts, not {shown(content)}", param="messages"
        )
    return {**message, "content": content}


def _read_part(part: object, where: str) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if kind != "text" or not isinstance(text, str):
        raise RequestError(
            f"{where} must be {{'type': 'text', 'text': ...}}, not {shown(part)}", param="messages"
        )
    return text
