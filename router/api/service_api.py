"""Routes that generate nothing for a client: health, facts, metrics, tokenizing, cache, abort, profiles."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import PlainTextResponse
from msgspec.structs import asdict, replace

from router.api.generate_api import WEIGHT_VERSION
from router.api.openapi import new_routes
from router.config import HttpLimits
from router.dispatch.metrics import CONTENT_TYPE, Metrics
from router.http.api_keys import AdminGuard
from router.http.body import Body, OneOf, about
from router.http.responses import answers, json_response, while_connected
from router.nodes.fleet_answers import (
    Detokenized,
    Flushed,
    Health,
    ModelInfo,
    RequestsAborted,
    ServerInfo,
    Tokenized,
    Traces,
)
from router.nodes.membership import Membership
from router.nodes.status import FleetStatus
from router.request.fields import IdPrompts, Texts
from router.request.generation import Generator
from router.request.prompt import Prompt, Prompts
from router.text.served_model import ModelSlot, ServedModel
from shared.errors import RequestError
from shared.protocol.messages import Answered, Flush, Role, StartProfile, StopProfile, Work
from shared.protocol.sampling_params import MAX_SEED, SamplingParams

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 300.0
_MAX_STEPS = 100_000
_PROBE_TOKENS = 8
_PROBE_TIMEOUT_S = 30.0
_FLUSH_RETRY_S = 0.05
_MAX_FLUSH_WAIT_S = 600.0
_MAX_ABORTED_CHARS = 1024
"""The length of a rid, with the number that a batch appends to it."""


class TokenizeBody(Body):
    """The body of /tokenize."""

    prompt: Annotated[
        str | list[str], OneOf("a string or a list of strings", {"str": str, "list": Texts})
    ] = about("One text, or several.")
    add_special_tokens: bool = about("As a prompt gets them.", True)


class DetokenizeBody(Body):
    """The body of /detokenize."""

    tokens: IdPrompts = about("One list of token ids, or several.")
    skip_special_tokens: bool = about("Leaves them out of the text.", True)


class AbortBody(Body):
    """The body of /abort_request."""

    rid: str | None = about("A request, or a batch, by its name.", None, max_length=_MAX_ABORTED_CHARS)
    abort_all: bool = about("Every request.", False)


class StartProfileBody(Body):
    """Field names are SGLang's; where traces go is the node's `--profile-dir`, not the client's."""

    num_steps: int = about("So many forwards; 0: until /stop_profile.", 0, ge=0, le=_MAX_STEPS)
    with_stack: bool = about("With the Python stack of each operation.", False)
    record_shapes: bool = about("With the shapes of each operation's inputs.", False)
    refused: ClassVar[Mapping[str, str]] = {"output_dir": "the node's --profile-dir to say"}


FlushTimeout = Annotated[
    float,
    Query(
        ge=0, le=_MAX_FLUSH_WAIT_S, allow_inf_nan=False, description="Seconds to wait for running requests."
    ),
]


class MetricsText(PlainTextResponse):
    """Prometheus' text format."""

    media_type = CONTENT_TYPE


def health_routes(
    status: FleetStatus, generator: Generator, model: ModelSlot, membership: Membership
) -> APIRouter:
    """The routes for probes."""
    router = new_routes("State")

    described = answers(Health)
    unable = {**described[200], "description": "Nothing can be served."}

    @router.get("/health", responses={**described, 503: unable})
    async def health() -> Response:
        """The state of each fleet, without asking it; 503 when nothing can be served."""
        return json_response(status.describe(), 200 if status.can_serve else 503)

    @router.get("/health_generate", responses=described)
    async def health_generate(request: Request) -> Response:
        """Generate two tokens, through both fleets where there are two."""
        started = time.monotonic()
        if membership.expects(Role.PREFILL) and not membership.live(Role.PREFILL):
            raise RequestError(membership.why_none(Role.PREFILL), status=503, code="no_node")

        async def run() -> None:
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    async with generator.probe(_probe(model.get()), model.get().tokenizer) as group:
                        await group.finished()
            except TimeoutError:
                raise RequestError(f"no answer within {_PROBE_TIMEOUT_S:g} s", status=503) from None

        await while_connected(request.receive, run())
        return json_response(replace(status.describe(), generated_in_s=time.monotonic() - started))

    return router


def info_routes(
    status: FleetStatus,
    membership: Membership,
    model: ModelSlot,
    metrics: Metrics,
    limits: HttpLimits,
    flags: Mapping[str, object],
) -> APIRouter:
    """The routes for facts about model, nodes and load, and for tokenizing. `flags` are the router's."""
    router = new_routes("State")

    @router.get("/get_model_info", responses=answers(ModelInfo))
    @router.get("/model_info", responses=answers(ModelInfo))
    async def model_info() -> Response:
        """The model."""
        served = model.get()
        info = ModelInfo(
            model_path=served.model,
            tokenizer_path=str(served.path),
            weight_version=WEIGHT_VERSION,
            served_model_name=served.name,
            vocab_size=served.vocab_size,
            context_length=status.context_length(),
            max_model_len=status.context_length(),
            has_chat_template=served.chat_template is not None,
        )
        return json_response(info)

    @router.get("/get_server_info", responses=answers(ServerInfo))
    @router.get("/server_info", responses=answers(ServerInfo))
    async def server_info() -> Response:
        """Sizes, flags and the load of every node, asked for now."""
        await membership.refresh()
        return json_response({**flags, **asdict(status.server_info())})

    @router.get("/metrics", response_class=MetricsText)
    async def prometheus() -> Response:
        """Prometheus' text format, of the router that answers, with the load of every node asked for now."""
        await membership.refresh()
        return MetricsText(metrics.export())

    @router.post("/v1/tokenize", include_in_schema=False)
    @router.post("/tokenize", tags=["SGLang"], responses=answers(Tokenized))
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        """Text to token ids, as a prompt would be."""
        prompts = Prompts("prompt", body.prompt)
        prompts.check(model.get(), limits)
        encoding = prompts.encode(model.get(), limits, add_special_tokens=body.add_special_tokens)
        ids = [*await while_connected(request.receive, encoding)]
        many = prompts.is_list
        tokenized = Tokenized(
            tokens=ids if many else ids[0],
            count=[len(row) for row in ids] if many else len(ids[0]),
            max_model_len=status.context_length(),
        )
        return json_response(tokenized)

    @router.post("/v1/detokenize", include_in_schema=False)
    @router.post("/detokenize", tags=["SGLang"], responses=answers(Detokenized))
    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        """Token ids to text."""
        served = model.get()
        given = Prompts("tokens", body.tokens)
        given.check(served, limits)
        decoding = served.tokenizer.decode(given.ids, skip_special_tokens=body.skip_special_tokens)
        texts = await while_connected(request.receive, decoding)
        return json_response(Detokenized(text=texts if given.is_list else texts[0]))

    return router


def control_routes(
    membership: Membership,
    abort: Callable[[str | None], RequestsAborted],
    admin_only: AdminGuard,
) -> APIRouter:
    """The routes that act on a running service."""
    router = new_routes("Operation")

    @router.get("/flush_cache", responses=answers(Flushed), dependencies=[Depends(admin_only)])
    @router.post("/flush_cache", responses=answers(Flushed), dependencies=[Depends(admin_only)])
    async def flush_cache(request: Request, timeout: FlushTimeout = 0.0) -> Response:
        """Empty every RadixCache, once nothing runs; `timeout` says how many seconds that may take."""
        return json_response(await while_connected(request.receive, _flush(membership, timeout)))

    @router.post("/abort_request", responses=answers(RequestsAborted))
    async def abort_request(request: Request, body: AbortBody) -> Response:
        """End a request by its rid, or all, at every router; each answers with what it has, finished by `abort`."""
        if not body.rid and not body.abort_all:
            raise RequestError("give rid, or abort_all: true", param="rid")
        if body.abort_all:
            await admin_only(request)
        return json_response(abort(None if body.abort_all else body.rid))

    @router.post("/start_profile", responses=answers(Traces), dependencies=[Depends(admin_only)])
    async def start_profile(body: StartProfileBody | None = None) -> Response:
        """Trace every live node for `num_steps` steps, or until /stop_profile."""
        asked = body or StartProfileBody()

        def message(call_id: int) -> StartProfile:
            return StartProfile(call_id, asked.num_steps or None, asked.with_stack, asked.record_shapes)

        return _traces(await membership.call(message, _START_TIMEOUT_S))

    @router.post("/stop_profile", responses=answers(Traces), dependencies=[Depends(admin_only)])
    async def stop_profile() -> Response:
        """Write the traces."""
        return _traces(await membership.call(StopProfile, _STOP_TIMEOUT_S))

    return router


async def _flush(membership: Membership, timeout_s: float) -> Flushed:
    deadline = time.monotonic() + timeout_s
    while True:
        flushed = await membership.call(Flush, timeout_s=5.0)
        busy = sorted(node_id for node_id, answer in flushed.items() if not answer.ok)
        if not busy:
            return Flushed(message="Cache flushed.", nodes=sorted(flushed))
        if time.monotonic() >= deadline:
            raise RequestError(f"not flushed, because requests are running: {', '.join(busy)}", code="busy")
        await asyncio.sleep(_FLUSH_RETRY_S)


def _probe(model: ServedModel) -> Prompt:
    ids = tuple(secrets.randbelow(model.vocab_size) for _ in range(_PROBE_TOKENS))
    params = SamplingParams(
        max_new_tokens=2, temperature=0.0, ignore_eos=True, seed=secrets.randbelow(MAX_SEED)
    )
    return Prompt(rid=f"health-{secrets.token_hex(8)}", work=Work(ids, params), split=True)


def _traces(answered: dict[str, Answered]) -> Response:
    if not answered:
        raise RequestError("there is no live node to profile", status=503, code="no_node")
    refused = {node_id: answer.detail for node_id, answer in sorted(answered.items()) if not answer.ok}
    traces = {node_id: answer.detail for node_id, answer in sorted(answered.items()) if answer.ok}
    if refused:
        others = f"; done on {', '.join(traces)}" if traces else ""
        raise RequestError("; ".join(f"{node_id}: {why}" for node_id, why in refused.items()) + others)
    return json_response(Traces(traces=traces))
