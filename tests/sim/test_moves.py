"""A running request moves from one decode node to another, over the real transfer and a fake network."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from decode_node.scheduler import DecodeScheduler
from shared.config import NodeConfig, TransferOptions
from shared.kvcache.audit import audit_idle
from shared.protocol.messages import Cancel, ReqKey, Role, Struct, Tokens
from shared.protocol.sampling_params import SamplingParams
from shared.protocol.transfer_messages import CancelTransfer, Done, Grant, Handoff, Ready
from shared.timeline import ReqStage
from tests.cluster import AnsweredMove, Cluster, ref, sender_of, small_config
from tests.fake_network import Faults
from tests.sim.test_grammars import Late, grammar_engine
from tests.token_engine import reference_tokens, token_engine
from tests.token_grammar import token_grammar

both_overlaps = pytest.mark.parametrize("overlap", [False, True])


config = small_config


def params(num_new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)


def prompt(seed: int, length: int = 30) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(8, 900) for _ in range(length)]


def wanted(ids: list[int], num_new: int) -> list[int]:
    return reference_tokens(ids, num_new, eos=None)


class Run:
    """One request on d0, of which some tokens have come."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        num_new: int = 100,
        seed: int = 1,
        after: int = 5,
        sampling: SamplingParams | None = None,
    ) -> None:
        self.cluster, self.num_new, self.ids = cluster, num_new, prompt(seed)
        self.key = cluster.router.submit(f"r{seed}", self.ids, sampling or params(num_new), "p0", "d0")
        self.until(lambda: len(self.tokens) >= after)

    @property
    def tokens(self) -> list[int]:
        return self.cluster.router.answers[self.key].token_ids

    def until(self, condition: Callable[[], bool]) -> None:
        self.cluster.run(condition, check=True, max_steps=3000)

    def move(self) -> AnsweredMove:
        return self.cluster.router.move(self.key, "d0", "d1")

    def stage(self, name: str = "d0", key: ReqKey | None = None) -> ReqStage | None:
        req = self.cluster.nodes[name].scheduler.reqs.get(key or self.key)
        return None if req is None else req.timeline.stage

    def check_end(self) -> None:
        """The output is what one node would have made of it, each position was sent, and every page is home."""
        self.cluster.run_all(check=True)
        assert self.cluster.tokens(self.key) == wanted(self.ids, self.num_new)
        self.cluster.assert_idle()


def test_the_decode_node_reports_what_the_prefill_node_had_cached() -> None:
    with Cluster(1, 2, token_engine, config()) as cluster:
        before = cluster.router.submit("before", prompt(1), params(4), "p0", "d1")
        cluster.run(lambda: cluster.router.answers[before].ended)
        run = Run(cluster, num_new=8)
        run.check_end()
        reports = cluster.router.answers[run.key].reports
        assert len(reports) > 1 and {report.cached_tokens for report in reports} == {28}


@both_overlaps
def test_a_request_moves_while_it_runs(overlap: bool) -> None:
    with Cluster(1, 2, token_engine, config(overlap=overlap)) as cluster:
        run = Run(cluster)
        move = halt(run, "landed")
        for _ in range(3):  # the source does not know yet that the target has it
            cluster.step()
        cluster.network.release(Done)
        run.until(lambda: move.arrived and not cluster.nodes["d0"].scheduler.reqs)
        assert len(run.tokens) < run.num_new - 20, "it goes on at the target"
        assert not cluster.nodes["d0"].scheduler.reqs
        assert run.stage("d1", move.to_key) is ReqStage.DECODING
        run.check_end()
        assert not move.failures
        positions = cluster.router.answers[run.key].positions
        twice = sorted(position for position, count in Counter(positions[1:]).items() if count > 1)
        assert twice == list(move.repeated), "the source computes nothing behind what it hands off"


@both_overlaps
def test_a_move_hands_off_no_less_than_its_target_knows(overlap: bool) -> None:
    """Beside long prompts the source makes no step between the start of the move and its end."""
    with Cluster(1, 2, token_engine, config(overlap=overlap)) as cluster:
        run = Run(cluster)
        for seed in range(2, 7):
            cluster.router.submit(f"local{seed}", prompt(seed, 100), params(4), None, "d0")
        for _ in range(3):
            cluster.step()
        move = run.move()
        run.until(lambda: move.arrived or bool(move.failures))
        assert not move.failures
        run.check_end()


STAGES: dict[str, type[Struct]] = {"opened": Ready, "in flight": Grant, "stopped": Handoff, "landed": Done}
"""Where a move stands while messages of this type are held back."""

every_stage = pytest.mark.parametrize("stage", STAGES)


def halt(run: Run, stage: str) -> AnsweredMove:
    """Move the request of `run` up to `stage`, and no further until the message type is released."""
    network = run.cluster.network
    network.hold(STAGES[stage])
    move = run.move()
    run.until(lambda: network.num_held(STAGES[stage]) > 0)
    return move


@both_overlaps
def test_a_request_whose_pages_leave_corrupt_ends_here_and_its_pages_are_evicted(overlap: bool) -> None:
    """The source is at fault, and tells the router so: another node computes the request anew."""
    with Cluster(1, 2, token_engine, config(overlap=overlap)) as cluster:
        run = Run(cluster)
        cluster.network.corrupt_payloads()
        move = run.move()
        run.until(lambda: bool(move.failures) and cluster.router.answers[run.key].ended)
        assert (move.failures[0].status, move.failures[0].blames) == (500, sender_of("d0"))
        (failure,) = cluster.router.answers[run.key].failures
        assert (failure.status, "corrupt" in failure.message) == (500, True)
        cluster.run_all(check=True)
        cluster.assert_idle()
        assert cluster.nodes["d0"].engine.ledger.radix_cache.pages() == []
        assert run.tokens == wanted(run.ids, run.num_new)[: len(run.tokens)]


def num_moves(cluster: Cluster) -> int:
    """Moves that leave d0."""
    scheduler = cluster.nodes["d0"].scheduler
    assert isinstance(scheduler, DecodeScheduler)
    return len(scheduler.moves)


@every_stage
@both_overlaps
def test_a_move_that_is_given_up_leaves_the_request_running(stage: str, overlap: bool) -> None:
    """Landed, the target has the request: giving up comes too late, and its tokens go on from there.

    Until then all its window pages stay, and from then on those of its window alone.
    """
    with Cluster(1, 2, partial(token_engine, window=9), config(overlap=overlap)) as cluster:
        run = Run(cluster)
        move = halt(run, stage)
        if stage == "stopped":
            assert run.stage() is ReqStage.TRANSFERRING
        cluster.router.outbox.send("d0", Cancel(move.to_key))
        run.until(lambda: not num_moves(cluster))
        cluster.network.release(STAGES[stage])
        run.until(lambda: len(run.tokens) > 60)
        assert cluster.nodes["d0"].engine.ledger.count_windows().held < 6
        run.check_end()
        assert move.arrived == (stage == "landed")
        assert not move.left


@pytest.mark.parametrize("stage", ["opened", "in flight", "stopped"])
def test_the_target_dies(stage: str) -> None:
    """The request runs on where it was."""
    with Cluster(1, 2, token_engine, config()) as cluster:
        run = Run(cluster)
        move = halt(run, stage)
        cluster.kill("d1")
        run.until(lambda: not num_moves(cluster))
        cluster.network.release(STAGES[stage])
        run.check_end()
        assert not move.arrived


def test_the_target_dies_when_the_source_has_let_go() -> None:
    """The source has said so: the router knows that no node has the request any more."""
    with Cluster(1, 2, token_engine, config()) as cluster:
        run = Run(cluster)
        cluster.network.hold(Tokens)
        move = run.move()
        run.until(lambda: move.left)
        cluster.kill("d1")
        run.until(lambda: not cluster.nodes["d0"].scheduler.reqs)
        assert not move.arrived
        audit_idle(cluster.nodes["d0"].engine.ledger)
        cluster.network.release(Tokens)


@every_stage
def test_the_source_dies(stage: str) -> None:
    """Until all of the request has come, the target gives its room back and says why; then it goes on alone."""
    with Cluster(1, 2, token_engine, config()) as cluster:
        run = Run(cluster)
        move = halt(run, stage)
        cluster.kill("d0")
        if stage == "landed":
            run.until(lambda: cluster.router.answers[run.key].ended)
            assert run.tokens == wanted(run.ids, run.num_new)
        else:
            run.until(lambda: bool(move.failures))
            assert move.failures[0].status == 503
        cluster.network.release(STAGES[stage])
        run.until(lambda: not cluster.nodes["d1"].scheduler.reqs)
        cluster.assert_idle()


@every_stage
def test_their_link_is_lost(stage: str) -> None:
    with Cluster(1, 2, token_engine, config()) as cluster:
        run = Run(cluster)
        move = halt(run, stage)
        cluster.network.hold(CancelTransfer)  # it does not overtake what is held back
        cluster.network.disconnect(sender_of("d0"), "d1")
        run.until(lambda: move.arrived or bool(move.failures))
        cluster.network.release(STAGES[stage])
        cluster.network.release(CancelTransfer)
        run.check_end()
        assert move.arrived == (stage == "landed")


@pytest.mark.parametrize("stage", ["opened", "in flight"])
def test_the_request_ends_while_it_moves(stage: str) -> None:
    with Cluster(1, 2, token_engine, config()) as cluster:
        run = Run(cluster, num_new=14)
        move = halt(run, stage)
        run.until(lambda: cluster.router.answers[run.key].ended)
        cluster.network.release(STAGES[stage])
        run.check_end()
        assert not move.arrived


@every_stage
def test_the_client_goes_away_while_it_moves(stage: str) -> None:
    with Cluster(1, 2, token_engine, config()) as cluster:
        run = Run(cluster)
        move = halt(run, stage)
        cluster.router.outbox.send("d0", Cancel(run.key))
        cluster.router.outbox.send("d1", Cancel(move.to_key))
        cluster.network.release(STAGES[stage])
        run.until(lambda: not any(node.scheduler.reqs for node in cluster.nodes.values()))
        cluster.assert_idle()


def test_a_full_target_refuses_at_once() -> None:
    """What it has free is room that its own request is about to use."""
    with Cluster(1, 2, token_engine, config(tokens=140)) as cluster:
        run = Run(cluster)
        ids = prompt(9, 90)
        other = cluster.router.submit("other", ids, params(40), "p0", "d1")
        run.until(lambda: len(cluster.router.answers[other].token_ids) > 2)
        move = run.move()
        run.until(lambda: bool(move.failures))
        assert "no room" in move.failures[0].message
        assert move.failures[0].status == 503
        run.check_end()
        assert cluster.tokens(other) == wanted(ids, 40)


def test_a_target_where_a_request_waits_for_room_refuses() -> None:
    """It fits; but what is free is for the one that came first."""
    with Cluster(1, 2, token_engine, config(tokens=240)) as cluster:
        run = Run(cluster)
        large = cluster.router.submit("large", prompt(9, 140), params(60), "p0", "d1")
        run.until(lambda: len(cluster.router.answers[large].token_ids) > 2)
        waits = cluster.router.submit("waits", prompt(8, 150), params(4), "p0", "d1")
        run.until(lambda: waits in cluster.nodes["d1"].scheduler.reqs)
        cluster.step()
        move = run.move()
        run.until(lambda: bool(move.failures))
        assert cluster.router.answers[waits].token_ids == []
        run.check_end()


def test_a_request_that_does_not_run_is_not_moved() -> None:
    with Cluster(1, 2, token_engine, config()) as cluster:
        run = Run(cluster)
        move = cluster.router.move(run.key, "d1", "d0")
        run.until(lambda: bool(move.failures))
        assert "does not run" in move.failures[0].message
        run.check_end()


def test_a_request_is_moved_once_at_a_time() -> None:
    with Cluster(1, 3, token_engine, config()) as cluster:
        run = Run(cluster)
        first = halt(run, "opened")
        second = cluster.router.move(run.key, "d0", "d2")
        run.until(lambda: bool(second.failures))
        assert "on its way" in second.failures[0].message
        cluster.network.release(Ready)
        run.check_end()
        assert first.arrived


def test_what_the_target_caches_is_not_sent() -> None:
    """A follow-up of the same conversation is cached at the target: all but the last page stays where it is."""
    with Cluster(1, 2, token_engine, config()) as cluster:
        ids = prompt(1)
        before = cluster.router.submit("before", ids, params(20), "p0", "d1")
        cluster.run(lambda: cluster.router.answers[before].ended)
        run = Run(cluster)
        move = run.move()
        run.until(lambda: move.arrived)
        run.check_end()
        reports = cluster.router.answers[run.key].reports
        assert min(report.kv_pages_transferred for report in reports[1:]) < 8


def test_a_request_that_outgrows_its_reservation_stays() -> None:
    with Cluster(1, 2, token_engine, config()) as cluster:
        run = Run(cluster)
        move = halt(run, "opened")
        run.until(lambda: len(run.tokens) > 40)
        cluster.network.release(Ready)
        run.until(lambda: bool(move.failures))
        assert "outgrown" in move.failures[0].message
        run.check_end()


def test_a_request_is_not_stopped_for_a_link_that_has_sent_nothing() -> None:
    """It would stand still for the whole of its pages. It stays where it is instead, and streams on meanwhile."""
    with Cluster(1, 2, token_engine, config()) as cluster:
        run = Run(cluster)
        move = halt(run, "in flight")
        run.until(lambda: bool(move.failures) or run.stage() is ReqStage.TRANSFERRING)
        assert [failure.message for failure in move.failures] == [
            "no page has left before the pages that its target has reserved were full"
        ]
        cluster.network.release(Grant)
        run.check_end()


def test_a_request_is_stopped_when_the_target_has_no_place_for_another_step() -> None:
    """Its pages are slower than its tokens: it stops while pages are on their way, and waits for them."""
    faults = Faults(link_delay_s=(0.05, 0.06))
    options = TransferOptions(slot_nbytes=4096, num_slots=1)
    with Cluster(1, 2, token_engine, config(), faults=faults, options=options) as cluster:
        run = Run(cluster, num_new=200)
        move = run.move()
        run.until(lambda: move.arrived)
        assert move.left
        run.check_end()


@both_overlaps
def test_a_request_that_moves_is_not_retracted_while_another_can_be(overlap: bool) -> None:
    """Its pages are read by the transfer; the others make room, also where they would not be the first to."""
    with Cluster(1, 2, token_engine, config(tokens=160, overlap=overlap)) as cluster:
        others = {
            cluster.router.submit(f"o{i}", prompt(50 + i, 30), params(40), "p0", "d0"): i for i in range(2)
        }
        run = Run(cluster, num_new=60, after=2)
        halt(run, "opened")
        scheduler = cluster.nodes["d0"].scheduler
        run.until(lambda: scheduler.batcher.num_retractions > 0)
        assert run.stage() is ReqStage.DECODING
        cluster.network.release(Ready)
        run.check_end()
        for key, i in others.items():
            assert cluster.tokens(key) == wanted(prompt(50 + i, 30), 40)


def test_moves_are_given_up_when_no_other_request_is_left_to_retract() -> None:
    with Cluster(1, 2, token_engine, config(tokens=140)) as cluster:
        one = Run(cluster, seed=1, after=1)
        other = Run(cluster, seed=2, after=1)
        halt(one, "opened")
        moves = [other.move(), *cluster.router.moves.values()]
        scheduler = cluster.nodes["d0"].scheduler
        one.until(lambda: scheduler.batcher.num_retractions > 0)
        one.until(lambda: any(move.failures for move in moves))
        failed = [failure.message for move in moves for failure in move.failures]
        assert any("needed for other requests" in message for message in failed), failed
        cluster.network.release(Ready)
        one.check_end()
        other.check_end()


@both_overlaps
def test_the_stream_pauses_for_a_step(overlap: bool) -> None:
    """While messages are faster than steps. Without overlap the target's first token comes a step after the last."""
    with Cluster(1, 2, token_engine, config(overlap=overlap)) as cluster:
        run = Run(cluster)
        move = run.move()
        num_tokens, num_idle, longest = len(run.tokens), 0, 0
        while not cluster.router.answers[run.key].ended:
            cluster.step(0.02)
            num_idle = num_idle + 1 if len(run.tokens) == num_tokens else 0
            num_tokens, longest = len(run.tokens), max(longest, num_idle)
        assert move.arrived
        assert longest == (1 if overlap else 0)
        run.check_end()


@pytest.mark.parametrize("seed", [0, 1, 2, 4])
@both_overlaps
def test_random_moves_change_no_token(seed: int, overlap: bool) -> None:
    """Among retraction, small pools, lost links, dead nodes, aborts, and moves that are given up."""
    rng = random.Random(seed)
    shape = config(tokens=rng.choice([200, 320]), overlap=overlap, retract_every=rng.choice([0, 7]))
    names = ["d0", "d1", "d2"]
    with Cluster(1, 3, token_engine, shape, seed=seed) as cluster:
        router, at, ids = cluster.router, {}, {}
        for i in range(9):
            ids_of = [*prompt(rng.randrange(2), rng.choice([8, 16])), *prompt(i, rng.randrange(1, 30))]
            key = router.submit(f"r{i}", ids_of, params(40), "p0", f"d{i % 3}")
            at[key], ids[key] = (key, f"d{i % 3}"), ids_of
        for _ in range(400):
            cluster.step()
            if not at:
                break
            key = rng.choice(list(at))
            current, source = at[key]
            pending = [move for move in router.moves.values() if move.key == current and not move.failures]
            for move in pending:
                if move.arrived:
                    at[key] = move.to_key, move.target
                elif rng.random() < 0.05:
                    router.outbox.send(source, Cancel(move.to_key))
            answer = router.answers[key]
            may_move = answer.token_ids and not answer.ended and source in names
            if may_move and not pending and rng.random() < 0.3:
                router.move(current, source, rng.choice([name for name in names if name != source]))
            if rng.random() < 0.01:
                one, other = rng.sample(names, 2)
                cluster.network.disconnect(sender_of(one), other)
            if rng.random() < 0.01:
                del ids[key], at[key]
                router.give_up(key, "its client went away")
            if len(names) == 3 and rng.random() < 0.005:
                cluster.kill(dead := names.pop(rng.randrange(3)))
                lost = {move.to_key.rid for move in router.moves.values() if move.target == dead}
                for key in [key for key, (_, name) in at.items() if name == dead or key.rid in lost]:
                    del ids[key], at[key]
                    router.give_up(key, f"{dead} is dead")
        cluster.run_all(check=True, max_steps=6000)
        for key, ids_of in ids.items():
            assert cluster.tokens(key) == wanted(ids_of, 40)
        assert any(move.left for move in router.moves.values())
        cluster.assert_idle()


def is_over(cluster: Cluster, move: AnsweredMove) -> bool:
    """Whether the move has arrived or failed, or its request has ended. A request that is stopped takes no step."""
    for name in ("d0", "d1"):
        for req in cluster.nodes[name].scheduler.batcher.running_batch:
            assert req.timeline.stage is ReqStage.DECODING
    return move.arrived or bool(move.failures) or cluster.router.answers[move.key].ended


def grammar_params(run_length: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=100, temperature=0.0, grammar=token_grammar(3, 90, run_length))


def grammar_run(cluster: Cluster, run_length: int = 0) -> Run:
    return Run(cluster, after=12, sampling=grammar_params(run_length))


def with_jumps(shape: NodeConfig) -> NodeConfig:
    return replace(shape, schedule=replace(shape.schedule, enable_jump_forward=True))


@both_overlaps
@pytest.mark.parametrize("run_length", [0, 5])
def test_a_grammar_goes_with_its_request(overlap: bool, run_length: int) -> None:
    """There and back, many times; with jumps over forced text, which end in the middle of what is handed off."""
    shape = with_jumps(config(overlap=overlap))
    outputs = []
    for moves in (False, True):
        with Cluster(1, 2, grammar_engine, shape) as cluster:
            run = grammar_run(cluster, run_length)
            key, source, target, num_moves = run.key, "d0", "d1", 0
            while moves and not cluster.router.answers[run.key].ended:
                move = cluster.router.move(key, source, target)
                run.until(partial(is_over, cluster, move))
                if move.arrived:
                    key, source, target = move.to_key, target, source
                    num_moves += 1
            cluster.run_all(check=True)
            outputs.append(cluster.tokens(run.key))
            assert num_moves >= (3 if moves else 0)
            for _ in range(20):
                cluster.step()
            cluster.assert_idle()
    assert outputs[0] == outputs[1]


def test_offered_pages_that_the_tree_has_too_stay_until_the_transfer_has_ended() -> None:
    """A twin on the same node puts the same pages into the tree first."""
    with Cluster(1, 2, grammar_engine, with_jumps(config(headroom=16))) as cluster:
        cluster.nodes["d0"].peering.ensure(ref("d1"))
        for _ in range(20):  # the outputs, with their jumps, are there in few steps
            cluster.step()
        twin = cluster.router.submit("twin", prompt(1), grammar_params(5), "p0", "d0")
        run = grammar_run(cluster, 5)
        move = halt(run, "in flight")
        req = cluster.nodes["d0"].scheduler.reqs[run.key]
        run.until(lambda: req.kv is not None and bool(req.kv.superseded))
        cluster.network.release(Grant)
        cluster.run_all(check=True)
        assert move.arrived
        assert cluster.tokens(run.key) == cluster.tokens(twin)
        for _ in range(20):
            cluster.step()
        cluster.assert_idle()


def test_a_target_reserves_when_the_grammar_is_compiled() -> None:
    """Until then the request runs on at the source, and the target holds nothing for it."""
    late = Late()
    with Cluster(1, 1, grammar_engine, config()) as cluster:
        cluster.start("d1", Role.DECODE, replace(token_engine(config()), grammars=late))
        run = grammar_run(cluster)
        move = run.move()
        run.until(lambda: len(run.tokens) > 18)
        ledger = cluster.nodes["d1"].engine.ledger
        assert not ledger.live
        assert move.to_key in cluster.nodes["d1"].scheduler.reqs
        late.go()
        run.until(lambda: move.arrived)
        cluster.run_all(check=True)
        cluster.assert_idle()


class Dear:
    """A MovingRate that stays where it is: nothing is slower."""

    per_second = 1e-9

    def observe(self, work: float, seconds: float) -> None:
        return


SHORT_OF_PAGES = {"moved": "auto", "not moved": "auto", "fixed policy": "recompute", "dear": "auto"}


@pytest.mark.parametrize("case", SHORT_OF_PAGES)
def test_a_node_that_runs_short_of_pages_asks_to_have_its_next_victim_moved(case: str) -> None:
    """Before any is missing. If none is moved, requests are retracted as ever."""
    shape = config(tokens=200, headroom=8)
    shape = replace(shape, schedule=replace(shape.schedule, retract_policy=SHORT_OF_PAGES[case]))
    with Cluster(1, 2, token_engine, shape) as cluster:
        router, batcher = cluster.router, cluster.nodes["d0"].scheduler.batcher
        if case == "dear":
            batcher.retraction.costs.transfer = Dear()  # type: ignore[assignment]
        runs = [Run(cluster, num_new=60, seed=seed, after=1) for seed in range(3)]
        asked: list[ReqKey] = []

        def ended() -> bool:
            if len(router.wanted_moved) > len(asked):
                asked.append(router.wanted_moved[len(asked)])
                assert len(asked) > 1 or not batcher.num_retractions
                if case == "moved":
                    router.move(asked[-1], "d0", "d1")
            return all(router.answers[run.key].ended for run in runs)

        runs[0].until(ended)
        assert len(set(router.wanted_moved)) == len(router.wanted_moved)
        assert bool(asked) == (case in ("moved", "not moved"))
        assert (batcher.num_retractions > 0) == (case != "moved")
        for run in runs:
            run.check_end()
