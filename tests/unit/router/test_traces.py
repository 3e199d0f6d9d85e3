"""Traces of sequences, as a collector gets them."""

from __future__ import annotations

import contextlib
import http.server
import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from router.api.traces import Traces
from router.config import HttpOptions
from router.dispatch.running_req import Attempt, RunningReq
from router.dispatch.stages import StageSpan, stage_spans, stages_of
from shared.protocol.messages import Decode, Finish, Prefill, ReqKey, ReqReport, Role, Stamp, Work
from shared.protocol.sampling_params import SamplingParams
from tests.patience import until
from tests.unit.router.dispatched import SeenNode
from tests.unit.router.fake_node import FakeNode, one_then_nothing
from tests.unit.router.fakes import joined_pair
from tests.unit.router.test_timeline import stamps

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"text": "a", "sampling_params": {"max_new_tokens": 3}, "rid": "mine"}


@dataclass
class Collector:
    """An OTLP collector: what it was sent, decoded."""

    url: str = ""
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in list(self.requests)
            for of_resource in request.resource_spans
            for scope in of_resource.scope_spans
            for span in scope.spans
        ]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers["content-type"] == "application/x-protobuf"
            collector.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        collector.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


async def prefill(node: FakeNode, message: Prefill | Decode) -> None:
    node.tokens(
        message.key, 0, node.story[:1]
    )  # its stages come with the decode node's, as the handoff brings them


async def decode(node: FakeNode, message: Prefill | Decode) -> None:
    brought = stamps("prefill", "queued", "prefilling", "transferring")  # by the handoff
    own = stamps("decode", "queued", "transferring", "decoding", "finished")
    report = ReqReport(stamps=(*brought, *own))
    node.tokens(message.key, 0, node.story[:3], Finish("length"), report)


def otel_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("Otel")]


async def test_a_span_for_each_stage_on_router_and_nodes(model_folder: Path) -> None:
    with collecting() as collector:
        options = HttpOptions(port=0, served_model_name="tiny", otlp_traces_endpoint=collector.url)
        async with joined_pair(model_folder, prefill=prefill, decode=decode, http=options) as (_, _, client):
            assert otel_threads()
            header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            assert (await client.post("/generate", json=BODY, headers=header)).status_code == 200
            unsampled = {"traceparent": f"00-{'1' * 32}-{PARENT}-00"}
            assert (await client.post("/generate", json=BODY, headers=unsampled)).status_code == 200
        assert not otel_threads()
    spans = {span.name: span for span in collector.spans}
    assert len(spans) == len(collector.spans)
    root = spans.pop("llm_request")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert set(spans) == {
        *("router queued", "router streaming"),
        *("prefill queued", "prefill prefilling", "prefill transferring"),
        *("decode queued", "decode transferring", "decode decoding"),
    }
    for name, span in spans.items():
        assert (span.trace_id, span.parent_span_id) == (root.trace_id, root.span_id)
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano, name
        assert span.end_time_unix_nano <= root.end_time_unix_nano + 50_000_000, name
    told = attributes(root)
    assert told["gen_ai.request.id"] == "mine" and told["gen_ai.usage.completion_tokens"] == 3
    place = attributes(spans["decode decoding"])
    assert (place["baton.node"], place["baton.attempt"], place["baton.router"]) == (
        "decode-0",
        0,
        told["baton.router"],
    )
    assert place["baton.incarnation"]
    (resource,) = {r.resource.SerializeToString() for q in collector.requests for r in q.resource_spans}
    assert b"service.name" in resource and b"baton" in resource


async def test_a_request_that_was_given_up_has_a_trace_too(model_folder: Path) -> None:
    with collecting() as collector:
        options = HttpOptions(port=0, served_model_name="tiny", otlp_traces_endpoint=collector.url)
        scripts: Any = {"prefill": one_then_nothing, "decode": one_then_nothing}
        async with (
            joined_pair(model_folder, **scripts, http=options) as (_, _, client),
            client.stream("POST", "/generate", json={**BODY, "stream": True}) as response,
        ):
            await anext(response.aiter_lines())
    assert {span.name for span in collector.spans} == {"llm_request", "router queued", "router streaming"}


async def test_a_collector_that_is_gone_costs_a_line_in_the_log(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with collecting() as collector:
        url = collector.url

    with caplog.at_level(logging.WARNING, "baton"):
        options = HttpOptions(port=0, served_model_name="tiny", otlp_traces_endpoint=url)
        async with joined_pair(model_folder, prefill=prefill, decode=decode, http=options) as (_, _, client):
            assert (await client.post("/generate", json=BODY)).status_code == 200
    assert "traces_not_sent reason=" in caplog.text
    until(lambda: not otel_threads())  # it was told to end, and may have a last line to log


# ------------------------------------------------------------------------------------- stages of nodes
P = SeenNode("p0", Role.PREFILL)
D0, D1 = SeenNode("d0", Role.DECODE), SeenNode("d1", Role.DECODE)
EPOCH = 1_700_000_000.0


def moved(skew: float = 0.0) -> RunningReq:
    """A sequence of 10 s that went from p0 to d0, and moved to d1 after 6 s; d0's clock is ahead by `skew`."""
    key = ReqKey("router", "1")
    req = RunningReq(key, Work((1, 2), SamplingParams()), wake=lambda: None, now=100.0)
    of_p = [("queued", 0.1), ("prefilling", 1.0), ("transferring", 2.0)]
    of_d0 = [("queued", 0.1), ("transferring", 0.5), ("decoding", 3.0)]
    at_p = tuple(Stamp("prefill", stage, EPOCH + s) for stage, s in of_p)
    at_d0 = tuple(Stamp("decode", stage, EPOCH + skew + s) for stage, s in of_d0)
    left = Stamp("decode", "transferring", EPOCH + skew + 6.0)
    at_d1 = tuple(
        Stamp("decode", stage, EPOCH + s)
        for stage, s in [("queued", 5.9), ("transferring", 6.0), ("decoding", 6.5), ("finished", 9.9)]
    )
    first = Attempt(key, (P, D0), sent_at=100.0)
    first.reports = {Role.PREFILL: ReqReport(stamps=at_p), Role.DECODE: ReqReport(stamps=(*at_p, *at_d0))}
    second = Attempt(ReqKey("router", "1", 1), (D1,), sent_at=105.9)
    second.reports = {Role.DECODE: ReqReport(stamps=(*at_p, *at_d0, left, *at_d1))}
    req.attempts = [first, second]
    req.first_token_at, req.ended_at = 102.1, 110.0
    return req


def as_rows(spans: list[StageSpan]) -> list[tuple[str, int, str, float, float]]:
    return [
        (s.node.ref.node_id, s.attempt, s.stage, round(s.began - EPOCH, 3), round(s.ended - EPOCH, 3))
        for s in spans
    ]


MOVED = [
    ("p0", 0, "queued", 0.1, 1.0),
    ("p0", 0, "prefilling", 1.0, 2.0),
    ("p0", 0, "transferring", 2.0, 3.0),
    ("d0", 0, "queued", 0.1, 0.5),
    ("d0", 0, "transferring", 0.5, 3.0),
    ("d0", 0, "decoding", 3.0, 6.0),
    ("d0", 0, "transferring", 6.0, 10.0),
    ("d1", 1, "queued", 5.9, 6.0),
    ("d1", 1, "transferring", 6.0, 6.5),
    ("d1", 1, "decoding", 6.5, 9.9),
]


def test_each_node_of_a_sequence_that_moved_has_its_own_stages() -> None:
    assert as_rows(stage_spans(moved(), EPOCH - 100.0)) == MOVED


def test_stages_of_two_nodes_are_not_mixed() -> None:
    stays = {part.node.ref.node_id: part.stays for part in stages_of(moved(skew=3600.0))}
    told = {name: [(stage, round(seconds, 3)) for stage, seconds in of] for name, of in stays.items()}
    assert told == {
        "p0": [("queued", 0.9), ("prefilling", 1.0)],
        "d0": [("queued", 0.4), ("transferring", 2.5), ("decoding", 3.0)],
        "d1": [("queued", 0.1), ("transferring", 0.5), ("decoding", 3.4)],
    }


def test_a_collector_that_never_answers_does_not_hold_up_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        traces = Traces(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
        traces._tracer.start_span("one").end()
        sending = threading.Thread(target=traces._processor.force_flush)
        sending.start()
        asked, _ = silent.accept()
        traces.close(0.1)
        assert sending.is_alive(), "it has not been waited for"
        asked.close()
    sending.join()
    until(lambda: not [thread for thread in threading.enumerate() if "OtelBatch" in thread.name])
