"""--otlp-traces-endpoint: one trace of each sequence, a span a stage, sent to a collector by OpenTelemetry's SDK.

    llm_request                     the sequence, from arrival to end; its parent is the client's `traceparent`
    ├── router queued               until its first token
    ├── prefill queued, prefilling, transferring
    ├── decode queued, transferring, decoding
    └── router streaming            from its first token on

The router makes all spans (ADR 37): nodes report their stages to it anyway, and need no SDK, collector or header.
The attributes are those of vLLM (`gen_ai.*`) and Baton's own (`baton.*`). The SDK reads its other OTEL_* variables.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.dispatch.stages import StageSpan, stage_spans
from router.request.generation import Generation, group_of
from shared.log import LimitedWarning

CLOSE_S = 3.0
"""A collector that does not answer holds up the end of the router for so long, and not for its request's timeout."""
_SDK_LOGGER = "opentelemetry"
_OF_ROUTER: Mapping[str, AttributeValue] = {"baton.role": "router"}


class Traces:
    """Sends spans from a thread of the SDK, whose queue is bounded and drops what does not fit. `close` ends it."""

    def __init__(self, endpoint: str) -> None:
        """Send to `endpoint`, the whole URL."""
        self._log = _SdkLog()
        logger = logging.getLogger(_SDK_LOGGER)
        logger.addHandler(self._log)
        logger.propagate = False
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        provider = TracerProvider(resource=_resource(os.environ), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer: Tracer = provider.get_tracer("baton")

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app`, behind whose answers the traces of a request's sequences are sent."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            finally:
                group = group_of(scope)
                for generation in group.generations if group is not None else ():
                    if generation.started and generation.req.ended:
                        self.tell(generation, Headers(scope=scope))

        return traced

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is queued, and end the thread. One that waits for an answer after `timeout_s` ends by itself."""
        ending = threading.Thread(target=self._processor.shutdown, name="end of traces", daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive():
            self._exporter.shutdown()  # no more is sent; a request under way cannot be ended
        else:
            logging.getLogger(_SDK_LOGGER).removeHandler(self._log)

    def tell(self, generation: Generation, headers: Mapping[str, str]) -> None:
        """Send the spans of a sequence that has ended."""
        req = generation.req
        assert req.ended_at is not None
        wall_s = time.time() - time.monotonic()
        context = TraceContextTextMapPropagator().extract(headers)
        ended = generation.finished_at or req.ended_at + wall_s
        root = self._tracer.start_span(
            "llm_request",
            context,
            SpanKind.SERVER,
            _attributes(generation),
            start_time=_ns(generation.queued_at),
        )
        if root.is_recording():
            first = ended if req.first_token_at is None else min(ended, req.first_token_at + wall_s)
            parts = [("router queued", generation.queued_at, first, _OF_ROUTER)]
            parts += [
                (f"{span.node.role} {span.stage}", span.began, span.ended, _place(span, req.key.router))
                for span in stage_spans(req, wall_s)
            ]
            if req.first_token_at is not None:
                parts.append(("router streaming", first, ended, _OF_ROUTER))
            inside = set_span_in_context(root)
            for name, began, over, attributes in parts:
                part = self._tracer.start_span(name, inside, attributes=attributes, start_time=_ns(began))
                part.end(_ns(max(began, over)))
            for stamp in req.failover.stamps:
                root.add_event(stamp.stage, timestamp=_ns(stamp.time))
            _set_status(root, generation)
        root.end(_ns(ended))


class _SdkLog(logging.Handler):
    """Turns what the SDK logs from its thread, such as a collector that cannot be reached, into events."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._warn = LimitedWarning("traces_not_sent")

    def emit(self, record: logging.LogRecord) -> None:
        self._warn(reason=record.getMessage())


def _resource(environment: Mapping[str, str]) -> Resource:
    named = "OTEL_SERVICE_NAME" in environment or SERVICE_NAME in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    return Resource.create({} if named else {SERVICE_NAME: "baton"})


def _attributes(generation: Generation) -> dict[str, AttributeValue]:
    req, params = generation.req, generation.req.work.params
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.id": generation.prompt.rid,
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.usage.prompt_tokens": req.prompt_len,
        "gen_ai.usage.completion_tokens": len(generation.output_ids),
        "baton.cached_tokens": req.cached_tokens,
        "baton.kv_bytes_transferred": req.kv_bytes_transferred,
        "baton.attempts": len(req.attempts),
        "baton.req": req.key.rid,
        "baton.router": req.key.router,
    }
    if req.first_token_at is not None:
        attributes["gen_ai.latency.time_to_first_token"] = req.waited_s + req.first_token_at - req.started_at
    if req.start is not None and req.start.slow_because is not None:
        attributes["baton.slow_because"] = req.start.slow_because.value
    return attributes


def _place(span: StageSpan, router: str) -> Mapping[str, AttributeValue]:
    return {
        "baton.role": span.node.role.value,
        "baton.node": span.node.ref.node_id,
        "baton.incarnation": span.node.ref.incarnation,
        "baton.attempt": span.attempt,
        "baton.router": router,
    }


def _set_status(root: Span, generation: Generation) -> None:
    error = generation.req.error
    if error is not None and error.status != 499:  # the message may quote the request
        root.set_status(Status(StatusCode.ERROR, error.code or str(error.status)))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
