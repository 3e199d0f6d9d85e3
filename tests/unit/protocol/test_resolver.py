"""Names that do not resolve are told in time."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from shared.protocol.resolver import Resolver, warn_unless_resolved
from tests.patience import until


def look_up(host: str, port: int, *, type: int) -> list[tuple[Any, ...]]:
    if host == "known.example":
        return [(socket.AF_INET, type, 6, "", ("192.0.2.1", port))]
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize(
    ("host", "is_known"),
    [("known.example", True), ("::1", True), ("10.0.0.1", True), ("typo.example", False)],
)
def test_a_node_warns_of_an_advertised_host_that_is_unknown(
    host: str, is_known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    resolver = Resolver(look_up)
    with caplog.at_level(logging.WARNING, "baton"):
        warn_unless_resolved(host, resolver)
        until(lambda: not resolver._running, "the look-up has ended")
        until(lambda: is_known or bool(caplog.records), "the warning is logged")
    assert is_known != ("typo.example does not resolve" in caplog.text)
