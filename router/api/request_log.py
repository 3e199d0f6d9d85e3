"""--log-requests: one event for each request, when it has ended, without prompts, answers and keys.

request request_id=b route="POST /generate" status=200 rid=a req=17 attempt=0 router=4f21 sequences=1
        prompt_tokens=70 completion_tokens=16 cached_tokens=0 ttft_s=0.02 queue_s=0.001 finish=stop
        nodes=decode-0,prefill-0 slow_because=reservation arrived_ms=1763935383120
        prompt_lens=70 output_lens=16 prefixes=q3Zl0c1mW5g= prefix_tokens=64 prefix_key=5bd1e995 e2e_s=0.2

From `arrived_ms` on (milliseconds since 1970) they are what `router plan --trace` reads: prompt_lens=70;9
output_lens=16,12;7 are two prompts, of which the first has two answers, and `prefixes` has the hashes of each prompt
(prefix_hashes.py), unless none has a whole block of `prefix_tokens`.
`slow_because` is there if the first or the second token was slow: the stage that took longest beyond what it should
cost, of the sequence that lost most time in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.prefix_hashes import BLOCK_TOKENS, PrefixHasher
from router.dispatch.stages import stages_of, worst_of
from router.http.responses import ERROR
from router.request.generation import Generation, GenerationGroup, group_of
from router.request.output_text import kind_of
from shared.errors import RequestError
from shared.log import event
from shared.timeline import ReqStage

POLLED = frozenset({"/health", "/metrics", "/live/state"})
"""Machines ask these every few seconds, so they are logged only when they fail."""


class RequestLog:
    """Middleware: logs each request after its answer."""

    def __init__(self, app: ASGIApp, hasher: PrefixHasher) -> None:
        self._app = app
        self._hasher = hasher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, then log."""
        began, arrived_at = time.monotonic(), time.time()
        status: int | None = None
        complete = disconnected = False

        async def watched_receive() -> Message:
            nonlocal disconnected
            message = await receive()
            if message["type"] == "http.disconnect" and not complete:
                disconnected = True
            return message

        async def watched_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self._app(scope, watched_receive, watched_send)
        finally:
            if status is None or status >= 400 or scope["path"] not in POLLED:
                group = group_of(scope)
                trace = {} if group is None else _trace_fields(group, arrived_at, self._hasher)
                fields = _request_fields(scope, status, began) | trace
                fields["e2e_s"] = time.monotonic() - began
                if disconnected:
                    fields["disconnected"] = True
                event("request", **{name: value for name, value in fields.items() if value is not None})


def _request_fields(scope: Scope, status: int | None, began: float) -> dict[str, Any]:
    state = scope["state"]
    group = group_of(scope)
    error: RequestError | None = state.get(ERROR)
    route = getattr(scope.get("route"), "path", None) or scope["path"][:100]
    fields: dict[str, Any] = {
        "request_id": state.get("request_id"),
        "route": f"{scope['method']} {route}",
        "status": status,
    }
    if error is not None:  # its message and param quote the request, so they are not logged
        fields["code"] = error.code
    if group is not None:
        fields |= _generated(group, began)
    return fields


def _trace_fields(group: GenerationGroup, arrived_at: float, hasher: PrefixHasher) -> dict[str, object]:
    """What a plan needs: when the request came, and of each prompt its length, its prefixes and its answers."""
    sequences: dict[int, list[Generation]] = {}
    for generation in group.generations:
        if generation.started:
            sequences.setdefault(generation.prompt_index, []).append(generation)
    fields: dict[str, object] = {"arrived_ms": int(arrived_at * 1e3)}
    if sequences:
        fields["prompt_lens"] = ";".join(str(first.req.prompt_len) for first, *_ in sequences.values())
        fields["output_lens"] = ";".join(
            ",".join(str(len(answer.output_ids)) for answer in answers) for answers in sequences.values()
        )
        prefixes = [hasher.hashes(first.prompt.work) for first, *_ in sequences.values()]
        if any(prefixes):
            fields |= {
                "prefixes": ";".join(prefixes),
                "prefix_tokens": BLOCK_TOKENS,
                "prefix_key": hasher.key_id,
            }
    return fields


def _generated(group: GenerationGroup, began: float) -> dict[str, object]:
    """The fields of all sequences: sums of tokens, the time of the first token, the longest time in a queue."""
    generations = [generation for generation in group.generations if generation.started]
    reqs = [generation.req for generation in generations]
    prompts = [generation.req for generation in generations if generation.choice == 0]
    slow = [one for req in reqs if req.start is not None and (one := worst_of(req.start.stages)) is not None]
    first = min((req.first_token_at for req in reqs if req.first_token_at is not None), default=None)
    return {
        "rid": group.prompts[0].rid,
        "req": _joined(req.key.rid for req in reqs),
        "attempt": max((req.key.attempt for req in reqs), default=None),
        "router": reqs[0].key.router if reqs else None,
        "sequences": sum(prompt.options.n for prompt in group.prompts),
        "prompt_tokens": sum(req.prompt_len for req in prompts),
        "completion_tokens": sum(len(generation.output_ids) for generation in generations),
        "cached_tokens": sum(req.cached_tokens for req in prompts),
        "ttft_s": first - began if first is not None else None,
        "queue_s": max((queued_s for g in generations for queued_s in _queued_s(g)), default=None),
        "finish": _joined(_finish(generation) for generation in generations),
        "nodes": _joined(
            node.ref.node_id for req in reqs for attempt in req.attempts for node in attempt.nodes
        ),
        "slow_because": max(slow, key=lambda one: one.excess_s).stage if slow else None,
    }


def _queued_s(generation: Generation) -> Iterator[float]:
    """The seconds from the arrival on the node that prefilled to the first chunk, if known."""
    for part in stages_of(generation.req):
        if any(stamp.stage == ReqStage.PREFILLING for stamp in part.stamps):
            yield from (seconds for stage, seconds in part.stays if stage == ReqStage.QUEUED)


def _finish(generation: Generation) -> str:
    if generation.finish_reason is not None:
        return kind_of(generation.finish_reason)
    error = generation.req.error
    return f"error:{error.status}" if error is not None else "unfinished"


def _joined(names: Iterable[str]) -> str:
    return ",".join(sorted(set(names)))
