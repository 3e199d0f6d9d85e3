"""What keeps a release able to talk to the one before it: messages only ever grow at their end."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.protocol import messages, transfer_messages
from shared.protocol.messages import (
    PROTOCOL_VERSION,
    Load,
    Pong,
    Role,
    other_version,
)

RECORD = Path(__file__).with_name("wire.json")
"""The messages of the version before this one. Replaced by what `described()` gives when a version is released."""


def described() -> dict[str, list[list[Any]]]:
    """Every message and part of one: name, type and whether there is a default, of each field in order."""
    types = [
        one
        for module in (messages, transfer_messages)
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, msgspec.Struct) and one.__module__ == module.__name__
        if one.__struct_config__.array_like  # objects may also lose fields that have a default
    ]
    return {
        one.__name__: [
            [field.name, str(field.type), not field.required] for field in msgspec.structs.fields(one)
        ]
        for one in types
    }


def test_messages_only_grow_at_their_end() -> None:
    now = described()
    for name, before in json.loads(RECORD.read_text()).items():
        fields = now.get(name, [])
        assert fields[: len(before)] == before, f"{name} is not what the version before sends and takes"
        assert all(has_default for _, _, has_default in fields[len(before) :]), (
            f"a new field of {name} is required"
        )


def test_a_new_type_of_message_says_since_when() -> None:
    """What is sent depends on it, so that a process of the version before gets no message that it cannot decode."""
    before = json.loads(RECORD.read_text())
    links = (messages.RouterToNode, messages.NodeToRouter, messages.Announcement)
    peers = (transfer_messages.SenderToReceiver, transfer_messages.ReceiverToSender)
    for one in (one for union in (*links, *peers) for one in typing.get_args(union)):
        assert one.since_version == (0 if one.__name__ in before else PROTOCOL_VERSION), one


def test_every_message_has_its_fields_by_position() -> None:
    """So a tail can be missing or unknown. Records that routers show as they come are objects, and may grow too."""
    for union in (messages.RouterToNode, messages.NodeToRouter, transfer_messages.SenderToReceiver):
        for one in typing.get_args(union):
            assert one.__struct_config__.array_like and not one.__struct_config__.forbid_unknown_fields


def test_a_tail_that_is_unknown_is_skipped_and_a_missing_one_filled_in() -> None:
    pong = Pong(1, Load(num_running=3), cache_seq=7)
    name, seq, load, cache_seq = msgspec.msgpack.decode(msgspec.msgpack.encode(pong))
    decode = msgspec.msgpack.Decoder(messages.NodeToRouter).decode
    assert decode(msgspec.msgpack.encode([name, seq, [*load, 5, "new"], cache_seq, {"new": 1}])) == pong
    assert decode(msgspec.msgpack.encode([name, seq, load[:2]])) == Pong(1, Load(num_running=3))


@pytest.mark.parametrize(
    ("version", "spoken"),
    [(PROTOCOL_VERSION + by, abs(by) <= 1) for by in range(-3, 4)],
)
def test_a_version_is_spoken_beside_the_next_ones(version: int, spoken: bool) -> None:
    why = other_version("node", version)
    assert (why == "") is spoken
    if not spoken:
        assert f"version {version}" in why and f"version {PROTOCOL_VERSION}" in why


def test_roles_are_words_on_the_wire() -> None:
    assert [role.value for role in Role] == ["prefill", "decode"]
