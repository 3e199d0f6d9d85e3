"""Two routers that are started at the same moment on one port: the second is told so, and serves nobody."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys

import pytest
import uvloop
from starlette.responses import PlainTextResponse

from router.config import ConnectionOptions
from router.http.http_server import HttpServer
from router.http.http_socket import bind_http, listen_http, start_listening
from shared.errors import ConfigError
from tests.patience import PATIENCE_S

HOST = "127.0.0.1"
TAKEN = r"127\.0\.0\.1:\d+ cannot be bound: Address already in use; choose another --port"


def test_a_port_is_taken_as_soon_as_it_is_bound() -> None:
    with contextlib.closing(listen_http(HOST, 0)) as first:
        port = first.getsockname()[1]
        socket.create_connection((HOST, port), timeout=PATIENCE_S).close()
        with pytest.raises(ConfigError, match=TAKEN):
            listen_http(HOST, port)


def test_who_binds_at_the_same_moment_but_listens_later_is_told() -> None:
    with contextlib.closing(bind_http(HOST, 0)) as first:
        late = bind_http(HOST, first.getsockname()[1])  # the kernel lets both, while neither listens
        start_listening(first)
        with pytest.raises(ConfigError, match=TAKEN):
            start_listening(late)
        assert late.fileno() == -1, "closed"


def test_a_server_that_does_not_listen_does_not_pretend_to() -> None:
    """uvloop logs what `listen` says and goes on."""

    async def run(unlucky: socket.socket) -> None:
        server = HttpServer(PlainTextResponse("hi"), ConnectionOptions(), log_requests=False)
        with pytest.raises(OSError, match="does not listen"):
            await server.start([unlucky])

    with contextlib.closing(bind_http(HOST, 0)) as first:
        unlucky = bind_http(HOST, first.getsockname()[1])
        start_listening(first)
        uvloop.run(run(unlucky))


PROGRAM = """
import json, resource, sys
from router.http.http_server import room_for
resource.setrlimit(resource.RLIMIT_NOFILE, (600, 2000))
rooms = [(room_for(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)) for wanted in (1000, 8192)]
print(json.dumps(rooms))
"""


def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows() -> None:
    """In a process of its own, which cannot take a hard limit back either."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    enough, limited = json.loads(ran.stdout)
    assert enough == [1000, [2000, 2000]]
    assert limited == [1488, [2000, 2000]]
    assert "max_connections_limited asked=8192 possible=1488 open_files_limit=2000" in ran.stderr
