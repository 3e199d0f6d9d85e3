"""Reads the bodies of OpenAI's routes into prompts, each with its Work."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import msgspec
import pydantic

from router.api.openai_bodies import (
    AllowedTools,
    ChatBody,
    ChatInputMessage,
    CompletionBody,
    EarlierCall,
    NamedTool,
    OpenAIBody,
    ResponseFormat,
    StreamOptions,
)
from router.config import HttpLimits
from router.http.body import wrong_input
from router.http.wording import shown, wrong
from router.request.generation import Asked
from router.request.prompt import (
    Intake,
    Prompt,
    Prompts,
    check_batch,
    check_num_logprobs,
    check_prompt,
    read_routing_key,
    requested_rid,
)
from router.request.sampling import AskedGrammar, read_sampling, read_samplings, schema_grammar
from router.text.reply_parser import THINK, ReplyRegions, enforced_form
from router.text.served_model import ServedModel
from shared.errors import RequestError
from shared.protocol.logprobs import OUTPUTS_ONLY, LogprobParams
from shared.protocol.messages import Work
from shared.protocol.sampling_params import CallGrammar, Grammar, SamplingParams

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's, of /v1/completions; a chat without a bound has as much as fits."""
_AS_MUCH_AS_FITS = 2**31 - 1
_ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ENFORCED_NAME = re.compile(r"[\w./@-]+")
"""Every family's syntax has these characters in names. XGrammar writes others as they are, quotes and tags too."""

Reasoning = Literal["", "open", "free"]
"""Before a call: none, the rest of what the prompt ends in, or as the model likes."""


@dataclass(frozen=True, kw_only=True)
class OpenAIRequest(Asked):
    """A checked body of either route. `id` is the client's rid or a random one.

    `echoes` are the prompts' texts if the answers begin with them. The answer has the `best_n` sequences of each
    prompt (None: all). `reads` says which regions are read of a chat's answers; None: all is content.
    """

    id: str
    stream: StreamOptions
    with_timeline: bool
    with_logprobs: bool
    echoes: Sequence[str] | None = None
    best_n: int | None = None
    reads: ReplyRegions | None = None
    hides_reasoning: bool = False


async def read_completion(body: CompletionBody, intake: Intake) -> OpenAIRequest:
    """Check what the types of /v1/completions cannot, take places and tokenize. Raises RequestError."""
    model, limits = intake.model, intake.limits
    _check_model(body.model, model)
    given = Prompts("prompt", body.prompt)
    given.check(model, limits)
    num_prompts = len(given)
    best_of = _best_of(body)
    check_batch("n" if body.best_of is None else "best_of", num_prompts * best_of, limits)
    max_new_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    own = format_grammar(body.response_format)
    asked = read_samplings(body, max_new_tokens, num_prompts, model.vocab_size, own_grammar=own)
    reply_id, rids = _ids(requested_rid(body.rid, intake.headers), "cmpl-", given)
    routing_key = read_routing_key(body.routing_key, intake.headers)
    asked_logprobs = _completion_logprobs(body.logprobs, echo=body.echo)
    # `best` ranks sequences by their logprobs, also where the client asks for none.
    logprobs = asked_logprobs or (LogprobParams() if best_of > body.n else None)
    intake.admission.take(rids, [best_of] * num_prompts, whole=reply_id, shared=body.rid is None)
    ids = await given.encode(model, limits, add_special_tokens=body.add_special_tokens)
    for at, input_ids in enumerate(ids):
        check_prompt(input_ids, given.named(at), "prompt", limits)
    prompts = [
        Prompt(
            rid=rid,
            asked_in="prompt",
            work=_work(body, input_ids, params, logprobs, routing_key),
            options=replace(options, n=best_of),
        )
        for rid, input_ids, (params, options) in zip(rids, ids, asked, strict=True)
    ]
    check_num_logprobs(prompts, "logprobs")
    echoes: Sequence[str] | None = None
    if body.echo:
        skip = body.skip_special_tokens
        echoes = given.texts or await model.tokenizer.decode(ids, skip_special_tokens=skip)
    return OpenAIRequest(
        id=reply_id,
        prompts=prompts,
        streams=body.stream,
        stream=body.stream_options or StreamOptions(),
        with_timeline=body.return_timeline,
        with_logprobs=asked_logprobs is not None,
        echoes=echoes,
        best_n=body.n if best_of > body.n else None,
    )


async def read_chat(body: ChatBody, intake: Intake, *, prefix: str = "chatcmpl-") -> OpenAIRequest:
    """Check what the types of /v1/chat/completions cannot, take places and tokenize. Raises RequestError.

    The id of the reply begins with the `prefix`.
    """
    model, limits = intake.model, intake.limits
    _check_model(body.model, model)
    wanted = _chat_logprobs(body.logprobs, body.top_logprobs)
    calls = _wanted_calls(body, model)
    max_new_tokens = _AS_MUCH_AS_FITS if body.max_tokens is None else body.max_tokens
    own = _call_grammar(calls) if calls else format_grammar(body.response_format)  # a format is for text
    params, options = read_sampling(body, max_new_tokens, model.vocab_size, own_grammar=own)
    check_batch("n", options.n, limits)
    reply_id, rids = _ids(requested_rid(body.rid, intake.headers), prefix, Prompts("messages", ""))
    routing_key = read_routing_key(body.routing_key, intake.headers)
    intake.admission.take(rids, [options.n], whole=reply_id, shared=body.rid is None)
    text, ids = await _render(body, model, limits)
    check_prompt(ids, "the prompt that the chat template makes", "messages", limits)
    reasoning = _reasoning(model, text)
    if calls is not None:
        params = msgspec.structs.replace(params, grammar=_call_grammar(calls, reasoning).grammar)
    reads = _reads(body, model, reasoning, enforces=calls is not None)
    if reads is not None and (calls is not None or model.writes_special_tokens):
        options = replace(options, skip_special_tokens=False)
    prompt = Prompt(
        rid=rids[0],
        asked_in="messages",
        work=_work(body, ids, params, wanted, routing_key),
        options=options,
    )
    return OpenAIRequest(
        id=reply_id,
        prompts=[prompt],
        streams=body.stream,
        stream=body.stream_options or StreamOptions(),
        with_timeline=body.return_timeline,
        with_logprobs=body.logprobs,
        reads=reads,
        hides_reasoning=not body.include_reasoning,
    )


def chat_body(fields: Mapping[str, Any]) -> ChatBody:
    """The body of a chat with these fields, which another dialect's body has. Raises RequestError."""
    try:
        return ChatBody.model_validate(fields)
    except pydantic.ValidationError as error:
        raise wrong_input([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from error


async def count_prompt_tokens(body: ChatBody, model: ServedModel, limits: HttpLimits) -> int:
    """The tokens of a chat's prompt. Raises RequestError."""
    _check_model(body.model, model)
    _, ids = await _render(body, model, limits)
    return len(ids)


async def _render(body: ChatBody, model: ServedModel, limits: HttpLimits) -> tuple[str, list[int]]:
    """The prompt that the chat template makes, and its tokens."""
    if model.chat_template is None:
        raise RequestError(f"model {model.name} has no chat template; the server needs --chat-template FILE")
    continues = body.continue_final_message
    if continues and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    messages = [_message(message, f"messages[{at}]") for at, message in enumerate(body.messages)]
    tools = [{**tool.sent, "function": tool.function.sent} for tool in body.tools or ()] or None
    render = partial(
        model.chat_template.render,
        messages,
        tools=tools,
        documents=body.documents,
        variables={**_effort(body), **(body.chat_template_kwargs or {})},
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
    )
    num_chars = len(msgspec.json.encode((messages, tools, body.documents)))
    text = await model.tokenizer.workers.run(num_chars, render)
    # The template writes the special tokens itself.
    [ids] = await Prompts("messages", text).encode(model, limits, add_special_tokens=False)
    return text, ids


def _work(
    body: OpenAIBody,
    input_ids: Sequence[int],
    params: SamplingParams,
    logprobs: LogprobParams | None,
    routing_key: str,
) -> Work:
    return Work(
        tuple(input_ids),
        msgspec.structs.replace(params, logprobs=logprobs),
        extra_key=body.extra_key,
        priority=body.priority,
        routing_key=routing_key,
    )


def format_grammar(asked: ResponseFormat | None) -> AskedGrammar | None:
    """The grammar of OpenAI's `response_format`; None for plain text."""
    field = "response_format"
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return schema_grammar(f"{field}.schema", asked.object_schema) or AskedGrammar(field, _ANY_OBJECT)
    field = f"{field}.json_schema.schema"
    found = schema_grammar(field, asked.json_schema.json_schema if asked.json_schema else None)
    if found is None:
        raise wrong(field, "a JSON schema", None)
    return found


def _chat_logprobs(wanted: bool, top_num: int) -> LogprobParams | None:
    """The logprobs that a chat's `logprobs` and `top_logprobs` ask for. Raises RequestError."""
    if top_num and not wanted:
        raise wrong("top_logprobs", "left out, or logprobs be true", top_num)
    return LogprobParams(top_num=top_num) if wanted else None


def _completion_logprobs(top_num: int | None, *, echo: bool) -> LogprobParams | None:
    """The logprobs that a completion's `logprobs` asks for. With `echo` the prompt's tokens have logprobs too."""
    if top_num is None:
        return None
    return LogprobParams(start_len=0 if echo else OUTPUTS_ONLY, top_num=top_num)


def _wanted_calls(body: ChatBody, model: ServedModel) -> CallGrammar | None:
    """The calls that a grammar guarantees, if any. Raises RequestError for a choice that cannot be served."""
    mode, named = _mode_and_named(body.tool_choice)
    tools = body.tools or []
    if not tools and (named or mode == "required"):
        raise RequestError("tool_choice needs tools, and there are none", param="tool_choice")
    is_strict = mode == "auto" and any(tool.function.strict for tool in tools)
    if mode == "none" or (mode == "auto" and not named and not is_strict):
        return None
    places: dict[str, int] = {}
    for at, tool in enumerate(tools):
        name = tool.function.name
        if places.setdefault(name, at) != at:
            where = f"tools[{at}].function.name"
            raise RequestError(f"{where}: there is another function of the name {name!r}", param=where)
    for one in named:
        if one.function.name not in places:
            why = f"tool_choice names {one.function.name!r}, which is not among the tools"
            raise RequestError(why, param="tool_choice")
    form = enforced_form(model.form)
    is_own = form is model.form
    if mode == "auto" and not is_own:
        return None
    allowed = {one.function.name for one in named} or places.keys()
    wanted = []
    for name, at in places.items():
        if name in allowed:
            function = tools[at].function
            if not _ENFORCED_NAME.fullmatch(name):
                raise wrong(f"tools[{at}].function.name", "of letters, digits and _./@- for a grammar", name)
            parameters = _of_objects(function.parameters, f"tools[{at}].function.parameters")
            strict = mode != "auto" or function.strict
            wanted.append({"function": {"name": name, "parameters": parameters, "strict": strict}})
    return CallGrammar(
        family=form.grammar,
        tools=wanted,
        choice="auto" if mode == "auto" else "required",
        # In a syntax that it does not know, a model would go on with calls until max_tokens.
        parallel=is_own and body.parallel_tool_calls and not isinstance(body.tool_choice, NamedTool),
        think=form.think,
        behind_reasoning=form.behind_reasoning,
        frame=form.frame,
    )


def _call_grammar(calls: CallGrammar, reasoning: Reasoning = "") -> AskedGrammar:
    """The grammar of an answer that begins with this reasoning."""
    whole = msgspec.structs.replace(calls, reasoning=reasoning)
    return AskedGrammar("tools", Grammar("calls", msgspec.json.encode(whole).decode()))


def _of_objects(parameters: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """The schema at `where`, of objects alone. Where it has `$ref`, `anyOf` or values, nodes check the type."""
    parameters = parameters or _NO_ARGUMENTS
    types = parameters.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise wrong(f"{where}.type", "'object', since arguments are an object", types)
    return {**parameters, "type": "object"}


def _mode_and_named(
    choice: str | NamedTool | AllowedTools | None,
) -> tuple[str, Sequence[NamedTool]]:
    """none, auto or required, and the tools that the choice names."""
    match choice:
        case AllowedTools():
            return choice.allowed_tools.mode, choice.allowed_tools.tools
        case NamedTool():
            return "required", [choice]
        case _:
            return choice or "auto", ()


def _reasoning(model: ServedModel, prompt: str) -> Reasoning:
    """What the answer behind this prompt may begin with."""
    begin, end = model.form.think if model.form is not None else THINK
    if not model.reasons or prompt.rstrip().endswith(end):
        return ""
    return "open" if prompt.rstrip().endswith(begin.rstrip()) else "free"


def _reads(
    body: ChatBody, model: ServedModel, reasoning: Reasoning, *, enforces: bool
) -> ReplyRegions | None:
    """What is read of answers; None: nothing. Where a grammar `enforces` calls, they have its form."""
    form = enforced_form(model.form) if enforces else model.form
    has_calls = enforces or (form is not None and bool(body.tools) and body.tool_choice != "none")
    reasons = model.reasons and body.separate_reasoning
    if not (has_calls or reasons or (form is not None and form.is_framed)):
        return None
    return ReplyRegions(
        form=form,
        has_calls=has_calls,
        reasons=reasons,
        in_reasoning=reasoning == "open",
        tools=[{"function": tool.function.sent} for tool in body.tools or ()],
        is_one_call=not body.parallel_tool_calls,
        is_named=isinstance(body.tool_choice, NamedTool),
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


def _ids(given: str | list[str] | None, prefix: str, prompts: Prompts) -> tuple[str, Sequence[str]]:
    """The reply's id, and a rid for each prompt that /abort_request finds by that id."""
    reply_id = given if isinstance(given, str) else prefix + uuid.uuid4().hex
    return reply_id, prompts.rids(given if isinstance(given, list) else reply_id)


def _best_of(body: CompletionBody) -> int:
    """How many sequences of each prompt are generated."""
    if body.best_of is None:
        return body.n
    if body.best_of < body.n:
        raise wrong("best_of", f"at least n, {body.n}", body.best_of)
    if body.stream and body.best_of > body.n:
        raise wrong("best_of", f"n, {body.n}, in a stream, which cannot wait for the best", body.best_of)
    return body.best_of


def _effort(body: ChatBody) -> dict[str, object]:
    """The variables by which templates are told how much to reason; `none` is told as each of them names it."""
    if body.reasoning_effort is None:
        return {}
    off = {"enable_thinking": False, "thinking": False} if body.reasoning_effort == "none" else {}
    return {"reasoning_effort": body.reasoning_effort, **off}


def _message(message: ChatInputMessage, where: str) -> dict[str, object]:
    """A message for templates: its text in one piece, arguments of calls as objects, and no empty list of calls."""
    content, calls = message.content, message.tool_calls
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and message.role != "assistant":  # an assistant's may only call tools
        raise wrong(f"{where}.content", "a string or a list of parts", None)
    fields = {**message.sent, "content": content or ""}
    if not calls:
        return {name: value for name, value in fields.items() if name != "tool_calls"}
    named = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    thoughts = fields.get("reasoning_content")
    # The template of gpt-oss has this name, and refuses a call with both thoughts and text.
    thinking = {"thinking": thoughts} if thoughts and not content else {}
    return {**thinking, **fields, "tool_calls": named}


def _call(call: EarlierCall, where: str) -> dict[str, object]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        name = f"{where}.function.arguments"
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as e:
            raise RequestError(f"{name} is no JSON object in a string: {e}", param=name) from e
    return {**call.sent, "function": {**call.function.sent, "arguments": arguments or {}}}
