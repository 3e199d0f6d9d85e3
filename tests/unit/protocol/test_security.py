"""Who may talk: the same fleet key on both ends, and no listening beyond loopback without one."""

from __future__ import annotations

import itertools
import queue
from pathlib import Path

import msgspec
import pytest
import zmq

from shared.errors import ConfigError
from shared.protocol.loopback import is_loopback, require_key_beyond_loopback
from shared.protocol.messages import Ping
from shared.protocol.security import MIN_KEY_BYTES, FleetKey
from tests.patience import until
from tests.unit.protocol.conftest import MakeParty, Party

OLD, NEW = FleetKey(b"the secret until now"), FleetKey(b"the secret from now on")
BOTH, BOTH_THE_NEW_FIRST = (
    FleetKey(b"the secret until now", b"the secret from now on"),
    FleetKey(b"the secret from now on", b"the secret until now"),
)
ROTATION = (OLD, BOTH, BOTH_THE_NEW_FIRST, NEW)
RIGHT, WRONG = FleetKey(b"the secret of this fleet"), FleetKey(b"the secret of another one")


@pytest.mark.parametrize("key", [WRONG, None], ids=["another key", "no key"])
def test_without_the_key_nobody_gets_in(party: MakeParty, key: FleetKey | None) -> None:
    node, intruder, router = (
        party("node", RIGHT),
        party("intruder", key).start(),
        party("router-1", RIGHT).start(),
    )
    address = node.listen()
    intruder.dial("n", address)
    for _ in range(20):
        intruder.send("n", Ping(1))
    with pytest.raises(queue.Empty):
        intruder.connected.get(timeout=0.5)
    router.dialled("n", address)
    router.send("n", Ping(2))
    assert node.hear() == ("router-1", Ping(2))
    assert node.heard.empty()


def test_the_server_s_public_key_alone_opens_nothing(party: MakeParty) -> None:
    node, router = party("node", RIGHT), party("router-1", RIGHT).start()
    address = node.listen()
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.identity = b"router|intruder|1"
        RIGHT.secure_client(raw, address)
        raw.curve_publickey, raw.curve_secretkey = zmq.curve_keypair()
        raw.connect(address)
        raw.send(msgspec.msgpack.encode(Ping(1)))
        with pytest.raises(queue.Empty):
            node.heard.get(timeout=0.5)
    router.dialled("n", address)


def test_a_client_with_a_key_talks_to_no_server_without_it(party: MakeParty) -> None:
    """A process that took a dead node's address must not get its prompts."""
    impostors = [party("wrong", WRONG), party("keyless")]
    router = party("router-1", RIGHT).start()
    for i, impostor in enumerate(impostors):
        router.dial(f"n{i}", impostor.listen())
        router.send(f"n{i}", Ping(1))
    with pytest.raises(queue.Empty):
        router.connected.get(timeout=0.5)
    assert all(impostor.heard.empty() for impostor in impostors)


@pytest.mark.parametrize(
    ("server", "client"),
    list(itertools.pairwise(ROTATION)) + [(later, sooner) for sooner, later in itertools.pairwise(ROTATION)],
)
def test_while_a_key_is_replaced_neighbours_in_the_order_connect(
    party: MakeParty, server: FleetKey, client: FleetKey
) -> None:
    """After one refusal at the most, which is forgotten for no other address."""
    node, router = party("node", server), party("router-1", client).start()
    address = node.listen()
    router.dial("n", address)
    if not connects(router):
        router.dial("n", address)
        assert connects(router)
    router.control.hang_up("n")
    router.dial("n", address)
    assert connects(router), "it knows the key of the address now"


def connects(router: Party) -> bool:
    """Whether the dial under way ends well."""
    until(lambda: not (router.connected.empty() and router.disconnected.empty()), "the dial has ended")
    if router.connected.empty():
        assert "handshake failed" in router.disconnected.get()[1]
        return False
    assert router.connected.get() == "n"
    return True


def test_a_key_that_was_replaced_admits_no_router(party: MakeParty) -> None:
    node, router = party("node", NEW), party("router-1", OLD).start()
    address = node.listen()
    for _ in range(3):
        router.dial("n", address)
        assert not connects(router)


def test_a_key_is_read_from_its_file(tmp_path: Path) -> None:
    """White space around it is no part of it."""
    path, shortest = tmp_path / "key", b"x" * MIN_KEY_BYTES
    path.write_bytes(b"  " + shortest + b"\n")
    assert FleetKey.load([str(path)]).derive(b"a") == FleetKey(shortest).derive(b"a")


@pytest.mark.parametrize("content", [b"", b"short", b"x" * (MIN_KEY_BYTES - 1) + b"\n\n\n"])
def test_a_short_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--fleet-key {path}: {len(content.strip())} bytes"):
        FleetKey.load([str(path)])


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--fleet-key {tmp_path / 'none'}: "):
        FleetKey.load([str(tmp_path / "none")])


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    require_key_beyond_loopback("--host", host, has_key=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-7", "*", ""])
def test_beyond_loopback_needs_a_key_or_consent(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match=r"^--some-host .*--fleet-key FILE.*--insecure"):
        require_key_beyond_loopback("--some-host", host, has_key=False, insecure=False)
    require_key_beyond_loopback("--some-host", host, has_key=True, insecure=False)
    require_key_beyond_loopback("--some-host", host, has_key=False, insecure=True)


def test_keys_for_other_purposes_follow_the_first_secret() -> None:
    key = FleetKey(b"a secret of 16 b", b"an older one 16b")
    derived = key.derive(b"baton-log")
    assert len(derived) == 32 and derived == FleetKey(b"a secret of 16 b").derive(b"baton-log")
    assert derived not in (key.derive(b"other"), FleetKey(b"an older one 16b").derive(b"baton-log"))
