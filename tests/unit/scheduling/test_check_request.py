"""Every refusal names its field, and every boundary is accepted."""

from __future__ import annotations

import pytest

from shared.errors import RequestError
from shared.protocol.messages import Decode, NodeLimits, Prefill, ReqKey, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.req import Req, accept

LIMITS = NodeLimits(context_length=64, max_total_num_tokens=100, max_running_requests=4)
VOCAB_SIZE = 50


def accepted(
    ids: tuple[int, ...] = (1, 2, 3),
    outs: tuple[int, ...] = (),
    *,
    role: type[Prefill] | type[Decode] = Decode,
    limits: NodeLimits = LIMITS,
    **params: object,
) -> Req:
    sampling = SamplingParams(**{"max_new_tokens": 8, **params})  # type: ignore[arg-type]
    return accept(role(ReqKey("router", "r"), Work(ids, sampling, outs, "tenant"), None), limits, VOCAB_SIZE)


def test_a_decode_node_samples_all_that_is_wanted() -> None:
    req = accepted((1, 2, 3), (4, 5))
    assert (req.ids, req.num_input_ids, req.num_sampled, req.max_output_len) == ([1, 2, 3, 4, 5], 3, 2, 8)
    assert (req.extra_key, req.timeline.role) == ("tenant", "decode")


@pytest.mark.parametrize(("outs", "wanted", "expected"), [((), 8, 1), ((4, 5), 8, 3), ((), 0, 0), ((), 1, 1)])
def test_a_prefill_node_samples_one(outs: tuple[int, ...], wanted: int, expected: int) -> None:
    req = accepted((1, 2, 3), outs, role=Prefill, max_new_tokens=wanted)
    assert (req.max_output_len, req.timeline.role) == (expected, "prefill")


def test_a_prefill_node_needs_no_room_for_what_others_will_decode() -> None:
    """Its pool may be far smaller than the decode node's, to which the router clips."""
    assert accepted((1,) * 57, role=Prefill, max_new_tokens=1000).max_output_len == 1
    with pytest.raises(RequestError, match="make 65"):
        accepted((1,) * 64, role=Prefill, max_new_tokens=1000)


@pytest.mark.parametrize(
    ("ids", "param", "message"),
    [
        ((), "input_ids", "the prompt is empty"),
        ((1, 50), "input_ids", "token id 50 is not between 0 and 49"),
        ((-1,), "input_ids", "token id -1"),
        ((1,) * 57, "max_new_tokens", "57 tokens and 8 of output make 65"),
    ],
)
def test_refusals(ids: tuple[int, ...], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        accepted(ids)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_known_outputs_are_checked_too() -> None:
    with pytest.raises(RequestError, match="token id 99"):
        accepted((1,), (99,))
    with pytest.raises(RequestError, match="make 65"):
        accepted((1,) * 5, (2,) * 60)


def test_the_boundary_fits() -> None:
    assert len(accepted((1,) * 56).ids) == 56


def test_a_small_pool_limits_as_the_context_does() -> None:
    small = NodeLimits(context_length=64, max_total_num_tokens=20, max_running_requests=4)
    accepted((1,) * 12, limits=small)
    with pytest.raises(RequestError, match="leave room for 20"):
        accepted((1,) * 13, limits=small)
