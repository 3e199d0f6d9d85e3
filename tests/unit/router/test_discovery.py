"""Discoveries: what DNS and the API of Kubernetes list, and what membership makes of a listing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import queue
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client

from router.nodes.discovery import Discovery, DnsDiscovery, Listing, make_discovery
from router.nodes.k8s_discovery import K8sDiscovery, address_of_pod
from router.nodes.member import MemberState
from shared.errors import ConfigError
from shared.protocol.messages import Role
from shared.protocol.resolver import Resolver
from tests.patience import PATIENCE_S, eventually, until
from tests.unit.router.fakes import FakeNode
from tests.unit.router.test_membership import TIMING, changes_of, new_membership

PREFILL, DECODE = ("prefill", "decode")
SELECTORS = {Role.PREFILL: "role=prefill", Role.DECODE: "role=decode"}


@contextlib.asynccontextmanager
async def listing_of(discovery: Discovery) -> AsyncIterator[list[Listing]]:
    """What it tells, while it runs."""
    told: list[Listing] = []
    task = asyncio.create_task(discovery.run(told.append))
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ------------------------------------------------------------------------------------------------------- DNS
async def test_dns_lists_every_address_and_a_failure_lists_nothing() -> None:
    class Names:
        def __init__(self) -> None:
            self.hosts = ["10.0.0.2", "10.0.0.3", "10.0.0.2"]
            self.asked = 0

        def __call__(self, host: str, port: int, *, type: int) -> list[tuple[Any, ...]]:
            assert (host, port) == ("nodes.example", 7300)
            self.asked += 1
            if not self.hosts:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [
                (socket.AF_INET6, type, 0, "", ("fd00::1", port, 0, 0)),
                *((socket.AF_INET, type, 0, "", (host, port)) for host in self.hosts),
            ]

    names = Names()
    discovery = dataclasses.replace(DnsDiscovery.of("nodes.example:7300"), poll_s=0.01)
    discovery = dataclasses.replace(discovery, resolver=Resolver(names))
    async with listing_of(discovery) as told:
        await eventually(lambda: told)
        hosts = ("10.0.0.2", "10.0.0.3", "[fd00::1]")
        assert told[-1] == {(Role.DECODE, f"tcp://{host}:7300") for host in hosts}
        names.hosts = []
        asked = names.asked
        await eventually(lambda: names.asked > asked + 2)
        assert all(told)
        names.hosts = ["10.0.0.4"]
        await eventually(lambda: (Role.DECODE, "tcp://10.0.0.4:7300") in told[-1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dns:", "is not HOST"),
        ("dns:nodes.example:0", "is not HOST"),
        ("consul:nodes", "neither dns:NAME[:PORT] nor k8s"),
        ("k8s:baton", "neither dns:NAME[:PORT] nor k8s"),
    ],
)
def test_a_source_that_is_none(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="--discovery") as refused:
        make_discovery(text, None, SELECTORS)
    assert words in str(refused.value)


# ------------------------------------------------------------------------------------------------ membership
async def test_a_node_that_is_listed_no_more_stays_while_it_answers() -> None:
    timing = dataclasses.replace(TIMING, forget_s=0.05)
    async with (
        FakeNode(Role.DECODE, "d0") as kept,
        FakeNode(Role.DECODE, "d1") as gone,
        new_membership(timing=timing) as (membership, events),
    ):
        membership.on_listing([(Role.DECODE, kept.ref.address), (Role.DECODE, gone.ref.address)])
        await eventually(lambda: len(membership.live(Role.DECODE)) == 2)
        membership.on_listing([])
        await asyncio.sleep(4 * timing.forget_s)
        assert len(membership.live(Role.DECODE)) == 2 and not events.lost
        await gone.stop()
        await eventually(lambda: [member.node_id for member in membership.members] == ["d0"])


async def test_the_log_names_what_is_known_of_a_listed_node(caplog: pytest.LogCaptureFixture) -> None:
    """DNS knows no role: a node that has never answered is not called a decode node that was lost."""
    caplog.set_level(logging.INFO, "baton")

    async with FakeNode(Role.PREFILL, "p0") as node, new_membership() as (membership, _):
        with socket.create_server(("127.0.0.1", 0)) as server:
            silent = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        membership.on_listing([(Role.DECODE, node.ref.address), (Role.DECODE, silent)])
        await eventually(lambda: membership.live(Role.PREFILL))
        (lost,) = (member for member in membership.members if not member.node_id)
        await eventually(lambda: lost.state is MemberState.LOST)
        await membership.remove(lost)
        texts = [record.getMessage() for record in caplog.records]
        assert f"prefill_node_alive node=p0 address={node.ref.address}" in texts
        assert any(text.startswith(f"node_lost address={silent} reason=") for text in texts), texts
        assert f"node_forgotten address={silent}" in texts
        named = membership.dial(silent, Role.DECODE, pinned=True)
        assert named is not None
        await eventually(lambda: named.state is MemberState.LOST)
        text = caplog.records[-1].getMessage()
        assert text.startswith(f"decode_node_lost address={silent} reason="), "the operator knows its role"


@pytest.mark.parametrize("joined", [False, True], ids=["listed first", "joined first"])
async def test_a_listed_node_is_dialled_until_it_is_back(joined: bool) -> None:
    """One that is not listed, and is lost at the same time, is forgotten meanwhile."""
    timing = dataclasses.replace(TIMING, forget_s=0.05)
    async with (
        FakeNode(Role.DECODE, "d0") as kept,
        FakeNode(Role.DECODE, "d1") as unlisted,
        new_membership(timing=timing) as (membership, _),
    ):
        node = FakeNode(Role.DECODE, "d2")
        await node.__aenter__()
        known = [kept, unlisted, node] if joined else [unlisted]
        for one in known:
            assert membership.dial(one.ref.address, Role.DECODE, pinned=False) is not None
        if joined:
            await eventually(lambda: len(membership.all_live()) == 3)
        # Its role is what it says, and not the one in which it is listed.
        membership.on_listing([(Role.PREFILL, kept.ref.address), (Role.PREFILL, node.ref.address)])
        await eventually(lambda: len(membership.live(Role.DECODE)) == 3)
        await node.stop()
        await unlisted.stop()

        def names() -> list[str]:
            return sorted(member.node_id for member in membership.members)

        await eventually(lambda: names() == ["d0", "d2"])
        await asyncio.sleep(4 * (timing.forget_s + timing.redial_s))
        assert names() == ["d0", "d2"]
        member = next(member for member in membership.members if member.node_id == "d2")
        assert member.state in (MemberState.LOST, MemberState.LEFT) and member.role is Role.DECODE
        membership.on_listing([(Role.PREFILL, kept.ref.address)])
        await eventually(lambda: names() == ["d0"])


async def test_of_two_members_of_one_name_the_connected_one_is_found() -> None:
    """A pod that was started anew has another address, and the name is looked up by operators."""
    async with new_membership() as (membership, events):
        changes = changes_of(membership, events)
        old = FakeNode(Role.DECODE, "d0")
        await old.__aenter__()
        assert membership.dial(old.ref.address, Role.DECODE, pinned=True) is not None
        await eventually(lambda: membership.live(Role.DECODE))
        await old.stop()
        await eventually(lambda: not membership.live(Role.DECODE))
        async with FakeNode(Role.DECODE, "d0") as new:
            assert membership.dial(new.ref.address, Role.DECODE, pinned=True) is not None
            await eventually(lambda: membership.live(Role.DECODE))
            names = [(member.node_id, member.node is None) for member in membership.members]
            assert names == [("d0", True), ("d0", False)]
            found = changes.find("d0")
            assert found is not None and found.address == new.ref.address
            lost = changes.find(old.ref.address.removeprefix("tcp://"))
            assert lost is not None and lost.address == old.ref.address


async def test_a_node_is_told_to_resume_only_while_it_is_added() -> None:
    """Else each later connection would take back the drain of another router."""
    async with new_membership() as (membership, events), FakeNode(Role.DECODE, "d0") as node:
        changes = changes_of(membership, events)
        for _ in range(2):  # anew, and once more as a member
            member = await changes.add(Role.DECODE, node.ref.address, PATIENCE_S)
            assert member.state is MemberState.ALIVE and member.pinned and not member.resume


async def test_a_node_that_is_listed_in_another_role_is_still_listed() -> None:
    async with new_membership() as (membership, _), FakeNode(Role.DECODE, "d0") as node:
        for role in Role:
            membership.on_listing([(role, node.ref.address)])
            assert [member.listed for member in membership.members] == [True]
        membership.on_listing([])
        assert [member.listed for member in membership.members] == [False]


async def test_a_node_that_the_operator_removed_is_dialled_when_it_has_been_off_the_list() -> None:
    async with FakeNode(Role.DECODE, "d0") as node, new_membership() as (membership, _):
        listed = [(Role.DECODE, node.ref.address)]
        membership.on_listing(listed)
        await eventually(lambda: membership.live(Role.DECODE))
        await membership.remove(membership.members[0])
        membership.on_listing(listed)
        await asyncio.sleep(4 * TIMING.redial_s)
        assert not membership.members
        membership.on_listing([])
        membership.on_listing(listed)
        await eventually(lambda: membership.live(Role.DECODE))


async def test_listed_nodes_without_room_are_named_and_dialled_by_a_later_listing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        FakeNode(Role.DECODE, "d0") as d0,
        FakeNode(Role.DECODE, "d1") as d1,
        new_membership(max_members=1) as (membership, _),
    ):
        first, second = sorted((Role.DECODE, node.ref.address) for node in (d0, d1))
        membership.on_listing([first, second])
        await eventually(lambda: len(membership.live(Role.DECODE)) == 1)
        assert f"member_ignored address={second[1]} members=1" in caplog.text
        await membership.remove(membership.members[0])
        membership.on_listing([first, second])
        await eventually(lambda: len(membership.live(Role.DECODE)) == 1)
        assert [(one.address, one.listed) for one in membership.members] == [(second[1], True)]


# ------------------------------------------------------------------------------------------------ Kubernetes
def pod(name: str, role: str, ip: str | None, port: int | None = None, **changed: Any) -> dict[str, Any]:
    ports = [{"name": "http", "containerPort": 9100}]
    if port is not None:
        ports.append({"name": "control", "containerPort": port})
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"name": name, "namespace": "baton", "labels": {"role": role}, **changed},
        "spec": {"containers": [{"name": "node", "ports": ports}]},
        "status": {"phase": "Running", **({"podIP": ip} if ip else {})},
    }


class ApiServer:
    """Lists and watches pods as the API of Kubernetes does. A watch sends what `change` is told, until `drop`."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.namespace = "baton"
        """The only one that it answers for."""
        self.version = 100
        self.num_lists = 0
        self.num_watches = 0
        """That have begun."""
        self.num_gone = 0
        """Answer so many watches with 410."""
        self.broken = False
        self._watches: dict[queue.Queue[dict[str, Any] | None], str] = {}
        self._lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query = {key: values[0] for key, values in parse_qs(url.query).items()}
                assert url.path == f"/api/v1/namespaces/{api.namespace}/pods"
                if api.broken:
                    self.send_error(503)
                elif query.get("watch"):
                    api.watch(self, query["labelSelector"])
                else:
                    self.answer(api.list(query["labelSelector"]))

            def answer(self, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing is printed."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, name="api server").start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def client(self) -> client.CoreV1Api:
        configuration = client.Configuration(host=self.url)
        return client.CoreV1Api(client.ApiClient(configuration))

    def list(self, selector: str) -> dict[str, Any]:
        with self._lock:
            self.num_lists += 1
            items = [pod for pod in self.pods.values() if _matches(pod, selector)]
            return {
                "kind": "PodList",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": str(self.version)},
                "items": items,
            }

    def watch(self, handler: BaseHTTPRequestHandler, selector: str) -> None:
        events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with self._lock:
            gone = self.num_gone > 0
            self.num_gone -= gone
            self._watches[events] = selector
            self.num_watches += 1
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        if gone:
            status = {
                "kind": "Status",
                "code": 410,
                "reason": "Expired",
                "message": "too old resource version",
            }
            events.put({"type": "ERROR", "object": status})
            events.put(None)
        with contextlib.suppress(OSError):
            while (event := events.get()) is not None:
                line = json.dumps(event).encode() + b"\n"
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            handler.wfile.write(b"0\r\n\r\n")
        with self._lock:
            self._watches.pop(events, None)

    def change(self, kind: str, pod: dict[str, Any]) -> None:
        with self._lock:
            self.version += 1
            pod["metadata"]["resourceVersion"] = str(self.version)
            if kind == "DELETED":
                self.pods.pop(pod["metadata"]["name"], None)
            else:
                self.pods[pod["metadata"]["name"]] = pod
            for events, selector in self._watches.items():
                if _matches(pod, selector):
                    events.put({"type": kind, "object": pod})

    def drop(self) -> None:
        """End every watch, as a load balancer between may."""
        with self._lock:
            for events in self._watches:
                events.put(None)

    def close(self) -> None:
        self.broken = True
        self.drop()
        self.server.shutdown()
        self.server.server_close()


def _matches(pod: dict[str, Any], selector: str) -> bool:
    key, _, value = selector.partition("=")
    return bool(pod["metadata"]["labels"][key] == value)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()
    until(
        lambda: (
            not any(thread.name in ("SharedInformer", "stop informer") for thread in threading.enumerate())
        ),
        "no thread is left",
    )


def discovery(api: ApiServer) -> K8sDiscovery:
    return K8sDiscovery(api.client, "baton", SELECTORS, poll_s=0.01, retry_s=0.05)


@pytest.mark.parametrize(
    ("namespace", "of_context", "expected"),
    [(None, "baton", "baton"), ("baton", "other", "baton"), (None, None, "default")],
)
async def test_outside_a_cluster_the_context_of_kubectl_names_the_namespace(
    namespace: str | None,
    of_context: str | None,
    expected: str,
    api: ApiServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A context may name none, or have the field without a value."""
    api.namespace = expected
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)  # that of a pod in which the tests run
    monkeypatch.setenv("HOME", str(tmp_path))
    context = {"cluster": "c", "user": "u", "namespace": of_context}
    kubeconfig = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": context}],
        "clusters": [{"name": "c", "cluster": {"server": api.url}}],
        "users": [{"name": "u", "user": {}}],
    }
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(json.dumps(kubeconfig))
    api.change("ADDED", pod("p0", PREFILL, "10.0.0.2"))

    async with listing_of(K8sDiscovery.connect(namespace, SELECTORS)) as told:
        await eventually(lambda: told and told[-1] == {(Role.PREFILL, "tcp://10.0.0.2:7100")})


async def test_pods_are_listed_and_watched(api: ApiServer) -> None:
    api.change("ADDED", pod("p0", PREFILL, "10.0.0.2"))
    api.change("ADDED", pod("x", "router", "10.0.0.9"))

    async with listing_of(discovery(api)) as told:
        p0, d0 = (Role.PREFILL, "tcp://10.0.0.2:7100"), (Role.DECODE, "tcp://10.0.0.3:7500")
        await eventually(lambda: told and told[-1] == {p0})
        await eventually(lambda: api.num_watches == 2)
        api.change("ADDED", pod("d0", DECODE, None, 7500))
        api.change("MODIFIED", pod("d0", DECODE, "10.0.0.3", 7500))
        await eventually(lambda: told[-1] == {p0, d0})
        api.change("DELETED", pod("p0", PREFILL, "10.0.0.2"))
        await eventually(lambda: told[-1] == {d0})


@pytest.mark.parametrize("gone", [False, True])
async def test_a_watch_that_is_dropped_or_too_old_is_made_up_for(api: ApiServer, gone: bool) -> None:
    api.change("ADDED", pod("d0", DECODE, "10.0.0.3"))

    async with listing_of(discovery(api)) as told:
        d0, d1 = (Role.DECODE, "tcp://10.0.0.3:7200"), (Role.DECODE, "tcp://10.0.0.4:7200")
        await eventually(lambda: told and told[-1] == {d0})
        await eventually(lambda: api.num_watches == 2)
        num_lists, api.num_gone = api.num_lists, 2 * gone
        api.drop()
        if gone:
            api.pods["d1"] = pod("d1", DECODE, "10.0.0.4")  # no watch tells
            await eventually(lambda: api.num_lists == num_lists + 2)
        else:
            await eventually(lambda: api.num_watches == 4)
            api.change("ADDED", pod("d1", DECODE, "10.0.0.4"))
        await eventually(lambda: told[-1] == {d0, d1})


async def test_an_api_that_fails_takes_no_node_away(api: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    api.change("ADDED", pod("d0", DECODE, "10.0.0.3"))

    async with listing_of(discovery(api)) as told:
        await eventually(lambda: told and len(told[-1]) == 1)
        await eventually(lambda: api.num_watches == 2)
        api.broken = True
        api.drop()
        await eventually(lambda: "discovery_failed" in caplog.text)
        d0, d1 = (Role.DECODE, "tcp://10.0.0.3:7200"), (Role.DECODE, "tcp://10.0.0.4:7200")
        assert told[-1] == {d0}
        api.broken = False
        await eventually(lambda: api.num_watches == 4)
        api.change("ADDED", pod("d1", DECODE, "10.0.0.4"))
        await eventually(lambda: told[-1] == {d0, d1})


@pytest.mark.parametrize(
    ("changed", "address"),
    [({}, "tcp://10.0.0.3:7200"), ({"deletionTimestamp": "2026-11-23T00:00:00Z"}, None)],
)
def test_a_pod_that_ends_is_not_listed(changed: dict[str, str], address: str | None) -> None:
    described = pod("d0", DECODE, "10.0.0.3", **changed)
    deserialize = client.ApiClient().deserialize
    model = deserialize(json.dumps(described), "V1Pod", "application/json")
    assert address_of_pod(model, Role.DECODE) == address
    model.status.phase = "Failed"
    assert address_of_pod(model, Role.DECODE) is None


@pytest.mark.parametrize("missing", ["metadata", "spec", "status"])
def test_a_pod_without_a_part_is_not_listed_and_ends_no_router(missing: str) -> None:
    described = pod("d0", DECODE, "10.0.0.3")
    del described[missing]
    model = client.ApiClient().deserialize(json.dumps(described), "V1Pod", "application/json")
    assert address_of_pod(model, Role.DECODE) is None
