"""Logprobs packed and unpacked, and parts that do not fit together."""

from __future__ import annotations

import struct

import msgspec
import pytest

from shared.protocol.logprobs import Logprobs, TokenLogprobs


def packed(rows: list[TokenLogprobs]) -> Logprobs:
    floats = lambda values: b"".join(struct.pack("<f", v) for v in values)  # noqa: E731
    return Logprobs(
        floats(row.logprob for row in rows),
        b"".join(struct.pack("<i", i) for row in rows for _, i in row.top),
        floats(x for row in rows for x, _ in row.top),
        floats(x for row in rows for x in row.of_token_ids),
    )


ROWS = [
    TokenLogprobs(-0.5, ((-0.25, 7), (-0.5, 150_000)), (-3.0,)),
    TokenLogprobs(-2.0, ((-0.125, 1), (-1.5, 2)), (-4.0,)),
    TokenLogprobs(float("-inf"), ((0.0, 3), (-8.0, 4)), (-5.0,)),
]


def test_what_is_packed_is_unpacked() -> None:
    assert packed(ROWS).unpack() == ROWS
    plain = [TokenLogprobs(-1.5), TokenLogprobs(-2.5)]
    assert packed(plain).unpack() == plain
    assert packed([]).unpack() == []


def test_runs_of_tokens_are_joined() -> None:
    assert packed(ROWS[:1]).followed_by(packed(ROWS[1:])).unpack() == ROWS


@pytest.mark.parametrize(
    "parts",
    [
        (b"123",),
        (b"", b"1234"),
        (bytes(8), bytes(4), bytes(4)),
        (bytes(8), bytes(8), bytes(16)),
        (bytes(8), b"", b"", bytes(12)),
    ],
    ids=["half_a_float", "no_tokens", "half_a_row", "ids_without_values", "uneven_ids"],
)
def test_parts_that_do_not_fit_are_no_message(parts: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError, match="logprobs with parts of"):
        Logprobs(*parts)
    frame = msgspec.msgpack.encode(parts)
    with pytest.raises(msgspec.ValidationError, match="logprobs with parts of"):
        msgspec.msgpack.decode(frame, type=Logprobs)
