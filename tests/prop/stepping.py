"""One Batcher over the token engine, step by step; requests are released when they finish, and counted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.engine.launcher import Launcher
from shared.kvcache.audit import audit, audit_idle
from shared.protocol.messages import Finish, ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.plan import ScheduleBatch
from shared.scheduling.req import Req
from shared.timeline import Timeline
from tests.plan_records import PlanRecord, plan_of, record_of
from tests.token_engine import EOS, reference_tokens, token_engine

PLANS = msgspec.msgpack.Decoder(PlanRecord)


def new_req(
    rid: str,
    ids: Sequence[int],
    num_new: int,
    *,
    ignore_eos: bool = True,
    priority: int = 0,
    routing_key: str = "",
    extra_key: str = "",
) -> Req:
    params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=ignore_eos)
    work = Work(tuple(ids), params, extra_key=extra_key, priority=priority, routing_key=routing_key)
    return Req(ReqKey("router", rid), work, Timeline(Role.DECODE), num_new)


class Stepping:
    """What the decode node's loop does with a Batcher, and nothing else.

    Each plan crosses as bytes: nothing but its ints and keys reaches the Launcher. With `may_fail`, requests may fail
    alone, whose ids are then in `failed` and `unservable`.
    """

    def __init__(
        self,
        *,
        num_tokens: int = 1024,
        page_size: int = 4,
        host_tokens: int = 0,
        overlap: bool = True,
        disable_radix_cache: bool = False,
        may_fail: bool = False,
        window: int | None = None,
        window_tokens: int = 0,
        **schedule: object,
    ) -> None:
        options = ScheduleOptions(**{"retract_policy": "recompute", **schedule})  # type: ignore[arg-type]
        cache = CacheOptions(
            page_size=page_size,
            max_total_tokens=num_tokens,
            host_kv_tokens=host_tokens,
            disable_radix_cache=disable_radix_cache,
        )
        config = NodeConfig(cache=cache, schedule=options, model=ModelOptions(context_length=1024))
        self.engine = token_engine(config, window, window_tokens)
        self.ledger = self.engine.ledger
        self.batcher = Batcher(self.ledger, options)
        self.retraction = self.batcher.retraction
        self.launcher = Launcher(
            self.engine.stream, self.ledger, frozenset({EOS}), overlap=overlap, debug_checks=True
        )
        self.live: dict[str, Req] = {}
        self.done: dict[str, Req] = {}
        self.failed: list[str] = []
        self.unservable: list[str] = []
        self.num_copies_back = 0
        self.worked = False
        """Whether the last step had anything to do."""
        self._may_fail = may_fail
        self.admitted_at: dict[str, int] = {}
        """The step in which each request was first part of a forward."""
        self.num_steps = 0

    def add(self, *reqs: Req) -> None:
        for req in reqs:
            self.live[req.key.rid] = req
            self.batcher.add(req)

    def step(self) -> ScheduleBatch | None:
        """One turn of a role's loop; returns what was launched."""
        with self.launcher.planning():
            record = record_of(self.batcher.plan())
        reqs = {req.key: req for req in self.live.values()}
        plan = plan_of(PLANS.decode(msgspec.msgpack.encode(record)), reqs)
        assert record_of(plan) == record
        batch = plan.batch
        self.check_places(plan.unservable)
        for copy in plan.copies:
            assert copy.pages.to_host or copy.req.kv.kv_committed_len < copy.kv_len, (
                "counted before it landed"
            )
        self.num_steps += 1
        for item in batch.items if batch else ():
            self.admitted_at.setdefault(item.req.key.rid, self.num_steps)
        outcome = self.launcher.turn(plan)
        assert self._may_fail or not (outcome.failed or plan.unservable)
        self.num_copies_back += sum(not copy.pages.to_host for copy in plan.copies)
        self.worked = outcome.worked or bool(plan.copies)
        self.batcher.observe(outcome)
        for req in outcome.computed:  # as a decode node does: no transfer reads them
            if req.kv is not None:
                self.ledger.release_superseded(req.kv)
        for req in outcome.finished:
            self.end(req)
        for req in outcome.failed:
            self.failed.append(req.key.rid)
            self.end(req)
        for key in plan.unservable:
            self.unservable.append(key.rid)
            self.end(self.live[key.rid])
        audit(self.ledger)
        self.check_host()
        return batch

    def check_host(self) -> None:
        """Host pages belong to live requests alone, each to one."""
        held = [page for req in self.live.values() for page in req.host_pages]
        assert len(held) == len(set(held)) == self.ledger.host.num_held

    def check_places(self, unservable: Sequence[ReqKey] = ()) -> None:
        """Every live request is in exactly one place, and holds KV exactly where it should."""
        b = self.batcher
        in_last = [item.req for item in b.last_batch.extends] if b.last_batch else []
        without_kv = [*b.waiting_queue, *b.retraction._queue]
        with_kv = [*([b.chunked_req] if b.chunked_req else []), *b.running_batch]
        with_kv += [
            req for req in in_last if req not in with_kv and req.finish is None and req not in without_kv
        ]
        seen = [id(req) for req in (*without_kv, *with_kv)]
        assert len(seen) == len(set(seen)), "a request is in two places"
        # A request whose last token is in flight has left the batches and waits for its commit.
        awaited = {id(req) for req in self.live.values() if not req.wants_decode or req.key in unservable}
        assert {id(req) for req in self.live.values()} - awaited <= set(seen), "a request is nowhere"
        assert all(req.kv is None for req in without_kv)
        assert all(req.kv is not None for req in with_kv)

    def end(self, req: Req) -> None:
        self.batcher.remove(req)
        if req.finish is None:
            req.end(Finish("abort"))
        if req.kv is not None:
            self.ledger.cache_finished_req(req.kv, req.ids)
            req.kv = None
        assert not req.host_pages
        self.done[req.key.rid] = self.live.pop(req.key.rid)

    def outputs(self, rid: str) -> list[int]:
        """The tokens of a request that has ended."""
        req = self.done[rid]
        return req.ids[req.num_input_ids :]

    def run(self, max_steps: int = 4000) -> None:
        """Until all have ended, with the right outputs and nothing held."""
        for _ in range(max_steps):
            self.step()
            if not self.live and not self.worked:
                break
        assert not self.live, f"{sorted(self.live)} starve: {self.retraction.count}"
        for req in self.done.values():
            eos = None if req.params.ignore_eos else EOS
            expected = reference_tokens(req.ids[: req.num_input_ids], req.max_output_len, eos)
            outputs = req.ids[req.num_input_ids :]
            was_aborted = req.finish is not None and req.finish.type == "abort"
            assert outputs == (expected[: len(outputs)] if was_aborted else expected), req.key
        audit_idle(self.ledger)


def rids(batch: ScheduleBatch | None) -> list[str]:
    """Who is part of a forward."""
    return [item.req.key.rid for item in batch.items] if batch is not None else []
