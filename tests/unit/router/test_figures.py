"""What becomes of figures that no node can have: requests are served, and the other nodes keep their share."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest

from router.dispatch.node import MAX_FIGURE, believed
from router.dispatch.placement import POLICIES
from shared.protocol.messages import Finish, Load, ReqReport, Role, Stamp
from tests.patience import eventually
from tests.unit.router.dispatched import SeenFleet
from tests.unit.router.fake_node import FakeNode
from tests.unit.router.test_membership import dialled, new_membership

ABSURD = (math.nan, math.inf, -math.inf, -1.0, 1e308)


def test_what_a_node_can_have_is_believed() -> None:
    load = Load(progress=7, num_queued_tokens=10**9, gen_throughput=1e6, schedule_policy="fcfs")
    assert believed(load) == (load, {})


@pytest.mark.parametrize("absurd", [*ABSURD, 1 << 63, -(1 << 63)])
def test_each_figure_that_is_absurd_counts_as_0(absurd: float) -> None:
    for told in (Load(), ReqReport()):
        names = [field.name for field in msgspec.structs.fields(type(told)) if field.type in (int, float)]
        assert len(names) >= 4
        for name in names:
            taken, wrong = believed(msgspec.structs.replace(told, **{name: absurd}))
            assert taken == told and list(wrong) == [name]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "boast", ["prefill_tokens_per_s", "gen_throughput", "kv_bytes_per_s", "num_free_pages"]
)
def test_a_node_that_boasts_does_not_get_every_request(policy: str, boast: str) -> None:
    """It never ends one, and the others do nothing else than before."""
    fleet = SeenFleet(2, 0, num_prefill=2, prefill=policy, decode=policy)
    told = {"prefill_tokens_per_s": 2e3, "gen_throughput": 1e3, "kv_bytes_per_s": 1e9}
    for node in (*fleet.prefills, *fleet.decodes):
        node.load = Load(**told)  # type: ignore[arg-type]
    for boaster in (fleet.prefills[0], fleet.decodes[0]):
        boaster.load = msgspec.structs.replace(boaster.load, **{boast: MAX_FIGURE})
    got = Counter(node.ref.node_id for _ in range(6000) for node in fleet.start().nodes)
    assert min(got[name] for name in ("p0", "p1", "d000", "d001")) > 0


async def test_a_load_of_absurd_figures_is_taken_without_them(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeNode(Role.DECODE) as fake, new_membership() as (membership, _):
        fake.load = Load(num_queued_tokens=-(10**6), gen_throughput=math.nan, num_running=2)
        node = (await dialled(membership, fake)).node
        assert node is not None
        await eventually(lambda: node.load_at)
        assert node.load == Load(progress=node.load.progress, num_running=2)
    assert 'node=decode-0 figures="gen_throughput=nan, num_queued_tokens=-1e+06"' in caplog.text


def test_a_report_of_absurd_figures_costs_the_request_nothing() -> None:
    fleet = SeenFleet(1)
    req = fleet.start(max_new_tokens=2)
    fleet.tell(req, 5, 6, finish=Finish("length"), report=ReqReport(-5, (), -1, -1, 1 << 63))
    assert (req.output_ids, req.error, req.cached_tokens, req.kv_pages_transferred) == ([5, 6], None, 0, 0)


@pytest.mark.parametrize("time", ABSURD)
def test_a_stamp_of_no_time_is_refused(time: float) -> None:
    told = msgspec.msgpack.encode(Stamp(Role.DECODE, "queued", time))
    with pytest.raises(msgspec.ValidationError, match="float"):
        msgspec.msgpack.decode(told, type=Stamp)
