"""Turns the bodies of OpenAI's routes into prompts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.admission import Ticket
from router.body import shown, wrong
from router.generation import Prompt
from router.limits import HttpLimits
from router.logprob_fields import chat_logprobs, check_num_completion, completion_logprobs
from router.openai_bodies import ChatBody, ChatMessage, CompletionBody, OpenAIBody, StreamOptions
from router.prompts import id_rows, read_rids
from router.request_ids import requested_rid
from router.sampling import read_sampling
from router.scheduling_hints import read_hints
from router.served_model import ServedModel
from shared.errors import RequestError


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
    body: CompletionBody, model: ServedModel, limits: HttpLimits, headers: Mapping[str, str], ticket: Ticket
) -> OpenAIRequest:
    """Check what the types of /v1/completions cannot, take places and tokenize. Raises RequestError."""
    _check_model(body.model, model)
    texts, ids, batched = _prompts(body, model.vocab_size, limits)
    num_prompts = len(texts or ids)
    limits.check_batch_size(num_prompts * body.n)
    samplings = [read_sampling(body, model.vocab_size, limits) for _ in range(num_prompts)]
    if body.best_of not in (None, body.n):
        raise wrong("best_of", f"the same as n, {body.n}", body.best_of)
    reply_id, rids = _ids(requested_rid(body.rid, headers), "cmpl-", num_prompts, batched=batched)
    hints = read_hints(body.priority, body.routing_key, headers)
    logprobs = completion_logprobs(body.logprobs, limits, echo=body.echo)
    ticket.take(num_prompts * body.n)
    if texts:
        ids = await model.tokenizer.encode(texts)
    for at, input_ids in enumerate(ids):
        limits.check_prompt(input_ids, f"prompt {at}" if batched else "the prompt", "prompt")
    prompts = [
        Prompt(
            rid=rid,
            shared_rid=body.rid is None,
            input_ids=tuple(input_ids),
            sampling=sampling.judged(logprobs),
            extra_key=body.extra_key,
            hints=hints,
        )
        for rid, input_ids, sampling in zip(rids, ids, samplings, strict=True)
    ]
    check_num_completion(prompts)
    echoes = None
    if body.echo:
        skip = body.skip_special_tokens
        echoes = texts or [model.tokenizer.decode(row, skip_special_tokens=skip) for row in ids]
    return OpenAIRequest(
        id=reply_id,
        prompts=prompts,
        stream=_stream(body),
        with_timeline=body.return_timeline,
        echoes=echoes,
    )


async def read_chat(
    body: ChatBody, model: ServedModel, limits: HttpLimits, headers: Mapping[str, str], ticket: Ticket
) -> OpenAIRequest:
    """Check what the types of /v1/chat/completions cannot, take places and tokenize. Raises RequestError."""
    _check_model(body.model, model)
    messages = [_message(message, f"messages[{at}]") for at, message in enumerate(body.messages)]
    wanted = chat_logprobs(body.logprobs, body.top_logprobs, limits)
    sampling = read_sampling(body, model.vocab_size, limits).judged(wanted)
    limits.check_batch_size(sampling.n)
    reply_id, rids = _ids(requested_rid(body.rid, headers), "chatcmpl-", 1, batched=False)
    hints = read_hints(body.priority, body.routing_key, headers)
    if model.chat_template is None:
        raise RequestError(f"model {model.name} has no chat template; the server needs --chat-template FILE")
    ticket.take(sampling.n)
    text = model.chat_template.render(messages, body.chat_template_kwargs or {})
    # The template writes the special tokens itself.
    ids = (await model.tokenizer.encode([text], add_special_tokens=False))[0]
    limits.check_prompt(ids, "the prompt that the chat template makes", "messages")
    prompt = Prompt(
        rid=rids[0],
        shared_rid=body.rid is None,
        input_ids=tuple(ids),
        sampling=sampling,
        extra_key=body.extra_key,
        hints=hints,
    )
    return OpenAIRequest(
        id=reply_id, prompts=[prompt], stream=_stream(body), with_timeline=body.return_timeline
    )


def unknown_model(name: str, model: ServedModel) -> RequestError:
    """The 404 for a model that is not served here."""
    return RequestError(
        f"model {shown(name)} does not exist; this server has {model.name!r}",
        status=404,
        param="model",
        code="model_not_found",
    )


def _check_model(name: str | None, model: ServedModel) -> None:
    if name not in (None, "", "default", model.name, model.model):
        raise unknown_model(name or "", model)


def _stream(body: OpenAIBody) -> StreamOptions | None:
    return (body.stream_options or StreamOptions()) if body.stream else None


def _ids(
    given: str | list[str] | None, prefix: str, num_prompts: int, *, batched: bool
) -> tuple[str, Sequence[str]]:
    """The reply's id, and a rid for each prompt that /abort_request finds by that id."""
    reply_id = given if isinstance(given, str) else prefix + uuid.uuid4().hex
    names = given if isinstance(given, list) else reply_id
    return reply_id, read_rids(names, num_prompts, batched=batched)


def _prompts(
    body: CompletionBody, vocab_size: int, limits: HttpLimits
) -> tuple[list[str], list[list[int]], bool]:
    """Texts or ids, whichever was given, and whether as a list of prompts."""
    if isinstance(body.prompt, str):
        return [body.prompt], [], False
    if isinstance(body.prompt[0], str):
        return body.prompt, [], True
    rows, batched = id_rows("prompt", body.prompt, vocab_size, limits)
    return [], rows, batched


def _message(message: ChatMessage, where: str) -> dict[str, object]:
    """As the chat template is to see it."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and message.role != "assistant":  # an assistant's may only call tools
        raise wrong(f"{where}.content", "a string or a list of parts", None)
    return {**(message.model_extra or {}), "role": message.role, "content": content or ""}
