"""Figures that no node can have: the other nodes keep their share."""

from __future__ import annotations

import math

import msgspec
import pytest

from shared.protocol.messages import Role, Stamp


@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf, 1e308, -1.0])
def test_a_stamp_of_no_time_is_refused(time: float) -> None:
    told = msgspec.msgpack.encode(Stamp(Role.DECODE, "queued", time))
    with pytest.raises(msgspec.ValidationError, match="float"):
        msgspec.msgpack.decode(told, type=Stamp)
