"""HTTPS on the router, with certificates that openssl makes on the spot."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from router.flags import build_parser, router_config
from router.http.config import ConnectionOptions, HttpOptions
from router.http.connection import NUM_SPARE_CONNECTIONS
from router.http.tls import Tls, TlsOptions
from router.server import Router
from shared.errors import ConfigError
from shared.protocol.messages import Role
from tests.patience import PATIENCE_S, eventually
from tests.unit.router.fakes import FakeNode, figure, joined_pair, joined_router
from tests.unit.router.raw_client import RawClient, post
from tests.unit.router.stepping_node import ROOMY, SteppingNode
from tests.unit.router.test_slow_readers import ENDLESS, request

pytestmark = [
    pytest.mark.uvloop,
    pytest.mark.usefixtures("quiet"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
]


def make_certificate(folder: Path, name: str, password: str = "") -> TlsOptions:
    """A certificate of its own authority, for 127.0.0.1."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subject = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    new_key += ("-passout", f"pass:{password}") if password else ("-nodes",)
    argv = ["openssl", "req", "-x509", *new_key, *subject, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(argv, check=True, capture_output=True)
    return TlsOptions(ssl_certfile=certificate, ssl_keyfile=key)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def ours(folder: Path) -> TlsOptions:
    return make_certificate(folder, "ours")


def trusting(options: TlsOptions, own: TlsOptions | None = None) -> ssl.SSLContext:
    """The context of a client that trusts this certificate alone, and has `own`."""
    context = ssl.create_default_context(cafile=options.ssl_certfile)
    if own is not None:
        assert own.ssl_certfile is not None
        context.load_cert_chain(own.ssl_certfile, own.ssl_keyfile)
    return context


def config_of(tls: TlsOptions) -> HttpOptions:
    return HttpOptions(port=0, served_model_name="tiny", tls=tls)


async def ask(router: Router, context: ssl.SSLContext, path: str = "/health") -> int:
    async with httpx.AsyncClient(base_url=router.url, timeout=PATIENCE_S, verify=context) as client:
        return (await client.get(path)).status_code


async def test_answers_and_streams_over_https(model_folder: Path, ours: TlsOptions) -> None:
    async with joined_pair(model_folder, http=config_of(ours), wait=False) as (_, router, plain):
        assert router.url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(
            base_url=router.url, timeout=PATIENCE_S, verify=trusting(ours)
        ) as client:
            await eventually(lambda: _is_ok(client))
            streamed = await client.post("/generate", json={"text": "a fox", "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await plain.get("/health")
        with pytest.raises(httpx.HTTPError):
            await httpx.AsyncClient().get(router.url.replace("https", "http") + "/health")


async def _is_ok(client: httpx.AsyncClient) -> bool:
    return (await client.get("/health")).json()["status"] == "ok"


async def test_a_new_certificate_is_read_on_demand(model_folder: Path, folder: Path) -> None:
    options = make_certificate(folder, "renewed")
    before = trusting(options)

    async with joined_router(model_folder, [], http=config_of(options), wait=False) as (router, _):
        await ask(router, before)
        make_certificate(folder, "renewed")
        after = trusting(options)
        await ask(router, before)
        router.reload_files()
        await ask(router, after)
        assert options.ssl_keyfile is not None
        options.ssl_keyfile.write_text("broken")
        router.reload_files()
        await ask(router, after)


async def test_clients_need_a_certificate_where_authorities_are_given(
    model_folder: Path, folder: Path, ours: TlsOptions
) -> None:
    theirs = make_certificate(folder, "theirs")

    http = config_of(replace(ours, ssl_ca_certs=theirs.ssl_certfile))
    async with joined_router(model_folder, [], http=http, wait=False) as (router, _):
        await ask(router, trusting(ours, theirs))
        for stranger in (trusting(ours), trusting(ours, make_certificate(folder, "other"))):
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await ask(router, stranger)


async def test_a_client_that_reads_nothing_is_dropped(model_folder: Path, ours: TlsOptions) -> None:
    options = ConnectionOptions(write_timeout_s=0.3)
    async with (
        FakeNode(Role.PREFILL, limits=ROOMY) as prefill,
        SteppingNode() as decode,
        joined_router(
            model_folder, [prefill, decode], http=config_of(ours), connections=options, wait=False
        ) as (router, _),
        httpx.AsyncClient(base_url=router.url, timeout=PATIENCE_S, verify=trusting(ours)) as client,
    ):
        await eventually(lambda: _is_ok(client))
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", router.http_port, ssl=trusting(ours), limit=1024
        )
        stuck = RawClient(reader, writer)
        stuck.send(post("/generate", request(ENDLESS), headers="X-SMG-Routing-Key: stuck:1:0.001\n"))
        await eventually(lambda: figure(client, "baton:http_unsent_bytes"))
        await eventually(lambda: _has_no_streams(router))
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _has_no_streams(router: Router) -> bool:
    return router._dispatcher.num_running == 0


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "half a hello"])
async def test_handshakes_are_counted_and_timed_as_connections_are(
    model_folder: Path, ours: TlsOptions, said: bytes
) -> None:
    bound = 4 + NUM_SPARE_CONNECTIONS

    async with contextlib.AsyncExitStack() as exits:
        options = ConnectionOptions(max_connections=4, header_timeout_s=2 * PATIENCE_S)
        router, _ = await exits.enter_async_context(
            joined_router(model_folder, [], http=config_of(ours), connections=options, wait=False)
        )
        connections = router._server.connections
        writers = []
        for number in range(bound + 3):
            reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
            writers.append(writer)
            if number < bound:
                writer.write(said)
                await eventually(lambda number=number: len(connections) == number + 1)
            else:
                assert await reader.read() == b"", "closed at once"
        assert len(connections) == bound
        connections.options = replace(options, header_timeout_s=0.1)
        writers[0].close()
        await eventually(lambda: len(connections) == bound - 1)
        reader, late = await asyncio.open_connection("127.0.0.1", router.http_port)
        late.write(said)
        assert await reader.read() == b"", "it is too slow"
        writers[1].close()
        assert await ask(router, trusting(ours)) == 503, "spare, and the fleet is not ready"
        for writer in (*writers, late):
            writer.close()
        await eventually(lambda: len(connections) == 0)


async def test_handshakes_end_with_the_router(model_folder: Path, ours: TlsOptions) -> None:
    async with joined_router(model_folder, [], http=config_of(ours), wait=False) as (router, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
        await eventually(lambda: len(router._server.connections) == 1)
    assert await reader.read() == b""
    writer.close()


def test_files_of_no_use_are_refused_by_the_name_of_their_flag(folder: Path, ours: TlsOptions) -> None:
    assert ours.ssl_certfile is not None and ours.ssl_keyfile is not None
    locked = make_certificate(folder, "locked", password="open sesame")
    other = make_certificate(folder, "another")
    nonsense = folder / "nonsense"
    nonsense.write_text("nonsense")
    missing = folder / "missing"
    for options, message in (
        (TlsOptions(ssl_keyfile=ours.ssl_keyfile), "--ssl-keyfile needs --ssl-certfile"),
        (replace(ours, ssl_certfile=missing), f"--ssl-certfile {missing} cannot be read: No such file"),
        (replace(ours, ssl_keyfile=missing), f"--ssl-keyfile {missing} cannot be read: No such file"),
        (replace(ours, ssl_keyfile=folder), f"--ssl-keyfile {folder} cannot be read: Is a directory"),
        (replace(ours, ssl_certfile=nonsense), f"--ssl-certfile {nonsense}, --ssl-keyfile .*not a cert"),
        (replace(ours, ssl_keyfile=other.ssl_keyfile), r"not a certificate and its key \(.*mismatch"),
        (locked, "not a certificate and its key"),
        (replace(locked, ssl_keyfile_password="wrong"), "not a certificate and its key"),
        (replace(ours, ssl_ca_certs=nonsense), f"--ssl-ca-certs {nonsense}: no certificates"),
    ):
        with pytest.raises(ConfigError, match=message):
            Tls(options)
    assert Tls(replace(locked, ssl_keyfile_password="open sesame")).context is not None
    assert Tls(TlsOptions()).context is None


def test_flags() -> None:
    args = ["--ssl-certfile", "c", "--ssl-keyfile", "k", "--ssl-keyfile-password", "p", "--ssl-ca-certs", "a"]
    config = router_config(build_parser().parse_args(args))
    assert config.http.tls == TlsOptions(
        ssl_certfile=Path("c"), ssl_keyfile=Path("k"), ssl_keyfile_password="p", ssl_ca_certs=Path("a")
    )
    assert config.http.url(1) == "https://127.0.0.1:1" and config.http.has_files
    assert "ssl_keyfile_password" not in config.shown()
    with pytest.raises(ConfigError, match="--ssl-certfile c cannot be read"):
        config.check()
