"""Of a Work only what is meant to change changes: a field that a later release adds reaches the nodes, too."""

from __future__ import annotations

import msgspec

from router.request.prompt import Prompt
from shared.protocol.messages import Decode
from shared.protocol.sampling_params import SamplingParams
from tests.later_work import assert_kept, later_work
from tests.unit.router.dispatched import IDS, SeenFleet, decode_of

PARAMS = SamplingParams(max_new_tokens=8, seed=5)


def test_to_the_nodes_that_a_sequence_goes_through() -> None:
    """The first, the target of a move, and the next when that is lost."""
    fleet, work = SeenFleet(3), later_work(IDS, PARAMS)
    req = fleet.dispatcher.start(work, lambda: None, in_time=True, rid="named")
    source = decode_of(req)
    assert_kept(source.last(Decode).work, work, rid="named")
    fleet.tell(req, 7, 8)
    fleet.dispatcher.move_held(source)
    (target,) = (node for node in fleet.decodes if node is not source and node.sent)
    assert target.last(Decode).moving
    assert_kept(target.last(Decode).work, work, rid="named", output_ids=(7, 8))
    fleet.kill(source)
    assert not decode_of(req).last(Decode).moving
    assert_kept(decode_of(req).last(Decode).work, work, rid="named", output_ids=(7, 8))


def test_to_the_nodes_of_a_further_choice() -> None:
    work = later_work(IDS, PARAMS)
    further = Prompt(rid="r", work=work).work_of(2)
    assert_kept(further, work, params=msgspec.structs.replace(PARAMS, seed=7))
