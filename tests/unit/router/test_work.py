"""Of a Work only what is meant to change changes: a field that a later release adds reaches the nodes, too."""

from __future__ import annotations

import msgspec

from router.request.prompt import Prompt
from shared.protocol.messages import Decode, TokenEntry
from shared.protocol.sampling_params import SamplingParams
from tests.later_work import assert_kept, later_work
from tests.unit.router.dispatched import IDS, FakeNode, Fleet
from tests.unit.router.test_failover import decode_of, kill, latest, tell

PARAMS = SamplingParams(max_new_tokens=8, seed=5)


def sent(node: FakeNode) -> Decode:
    message = latest(node, Decode)
    assert isinstance(message, Decode)
    return message


def test_to_the_first_node_and_to_the_next_one() -> None:
    fleet, work = Fleet(2), later_work(IDS, PARAMS)
    req = fleet.dispatcher.start(work, lambda: None, in_time=True, rid="named")
    assert_kept(sent(decode_of(req)).work, work, rid="named")
    tell(fleet, req, 0, 7)
    kill(fleet, decode_of(req))
    assert_kept(sent(decode_of(req)).work, work, rid="named", output_ids=(7,))


def test_to_the_target_of_a_move() -> None:
    fleet, work = Fleet(2), later_work(IDS, PARAMS)
    req = fleet.dispatcher.start(work, lambda: None, in_time=True, rid="named")
    source = decode_of(req)
    entry = TokenEntry(req.key, 0, (7, 8))
    fleet.dispatcher.on_tokens(source, [entry])
    fleet.dispatcher.move_held(source)
    (target,) = (node for node in fleet.decodes if node is not source)
    assert sent(target).moving
    assert_kept(sent(target).work, work, rid="named", output_ids=(7, 8))


def test_to_the_nodes_of_a_further_choice() -> None:
    work = later_work(IDS, PARAMS)
    further = Prompt(rid="r", work=work).work_of(2)
    assert_kept(further, work, params=msgspec.structs.replace(PARAMS, seed=7))
