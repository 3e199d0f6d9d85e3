"""Every message of every link survives its encoding, and what is no message of a link is refused by it."""

from __future__ import annotations

import operator
import typing
from functools import reduce
from types import UnionType

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from shared.protocol import messages, transfer_messages
from shared.protocol.logprobs import Logprobs
from shared.protocol.messages import (
    FRAME_ERRORS,
    Announcement,
    NodeToRouter,
    Record,
    RouterNews,
    RouterToNode,
    Struct,
)
from shared.protocol.sampling_params import SamplingParams
from shared.protocol.transfer_messages import ReceiverToSender, SenderToReceiver

UNIONS: dict[str, UnionType] = {
    "RouterToNode": RouterToNode,
    "NodeToRouter": NodeToRouter,
    "Announcement": Announcement,
    "SenderToReceiver": SenderToReceiver,
    "ReceiverToSender": ReceiverToSender,
    "RouterNews": RouterNews,
}
DECLARED = [*vars(messages).values(), *vars(transfer_messages).values()]
ENCODER = msgspec.msgpack.Encoder()
DECODERS = {name: msgspec.msgpack.Decoder(union) for name, union in UNIONS.items()}
CASES = [(name, cls) for name, union in UNIONS.items() for cls in typing.get_args(union)]
INT64 = st.integers(-(2**63), 2**64 - 1)

every_message = pytest.mark.parametrize(
    ("union", "cls"), CASES, ids=[f"{name}-{cls.__name__}" for name, cls in CASES]
)


def values(annotation: object) -> st.SearchStrategy[object]:
    """Any value of a field's type."""
    if annotation is Logprobs:
        parts = st.tuples(*(st.integers(0, 3) for _ in range(3)))
        return parts.map(lambda n: Logprobs(*(bytes(4 * n[0] * width) for width in (1, n[1], n[1], n[2]))))
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return instances(annotation)
    if isinstance(annotation, type) and issubclass(annotation, messages.Role):
        return st.sampled_from(messages.Role)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is UnionType or origin is typing.Union:
        return st.one_of([values(arg) for arg in args])
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is typing.Annotated:
        return st.floats(args[1].ge, args[1].le) if args[0] is float else values(args[0])
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    scalars: dict[object, st.SearchStrategy[object]] = {
        str: st.text(max_size=8),
        int: INT64,
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        bytes: st.binary(max_size=8),
        type(None): st.none(),
    }
    return scalars[annotation]


def instances(cls: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{name: values(hints[name]) for name in cls.__struct_fields__})


@every_message
@given(data=st.data())
@settings(max_examples=15)
def test_a_message_survives_the_wire_and_what_was_made_of_it_does_not(
    union: str, cls: type[Struct], data: st.DataObject
) -> None:
    """Its link refuses every part of the frame, the other links refuse all of it, and damage makes nothing else."""
    message = data.draw(instances(cls))
    frame = ENCODER.encode(message)
    decoded = DECODERS[union].decode(frame)
    assert type(decoded) is cls
    assert decoded == message
    for length in range(len(frame)):
        with pytest.raises(msgspec.DecodeError):
            DECODERS[union].decode(frame[:length])
    for other, decoder in DECODERS.items():
        if cls not in typing.get_args(UNIONS[other]):
            with pytest.raises(msgspec.ValidationError):
                decoder.decode(frame)
    damaged = bytearray(frame)
    damaged[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    check_refused_or_a_message(bytes(damaged), union)


def check_refused_or_a_message(frame: bytes, union: str) -> None:
    """Nothing else can come of bytes from a socket: no other exception, no other type."""
    try:
        decoded = DECODERS[union].decode(frame)
    except FRAME_ERRORS:
        return
    assert isinstance(decoded, typing.get_args(UNIONS[union]))


@given(noise=st.binary(max_size=64), union=st.sampled_from(sorted(UNIONS)))
@settings(max_examples=300)
def test_noise_is_refused_or_is_a_message(noise: bytes, union: str) -> None:
    check_refused_or_a_message(noise, union)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x92\xabRouterHello\xa2\xff\xfe",
        b"\x93\xa4Ping\x01" + b"\x91" * 100_000 + b"\x00",
        b"\x92\xabRouterHello\xdb\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
    ],
    ids=["not UTF-8", "nested without end", "a string of 4 GiB", "an array of 4 G entries"],
)
def test_malicious_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(FRAME_ERRORS):
        DECODERS["RouterToNode"].decode(frame)


def test_every_message_belongs_to_a_link() -> None:
    declared = {
        cls for cls in DECLARED if isinstance(cls, type) and issubclass(cls, Struct) and cls is not Struct
    }
    assert declared == set(typing.get_args(reduce(operator.or_, UNIONS.values())))


def test_messages_are_frozen_and_tagged_and_parts_are_not_tagged() -> None:
    for cls in DECLARED:
        if isinstance(cls, type) and issubclass(cls, (Struct, Record)):
            assert cls.__struct_config__.frozen, cls
            assert cls.__struct_config__.array_like, cls
            assert (cls.__struct_config__.tag is not None) == issubclass(cls, Struct), cls


def test_sampling_params_leave_defaults_off_the_wire() -> None:
    assert msgspec.msgpack.decode(ENCODER.encode(SamplingParams(seed=5))) == {"seed": 5}


def test_a_hello_that_has_no_version_is_read() -> None:
    """What lets a peer of the first version be refused with a reason, instead of as noise."""
    hello = DECODERS["RouterToNode"].decode(ENCODER.encode(["RouterHello", "router"]))
    assert hello == messages.RouterHello("router", 0)
