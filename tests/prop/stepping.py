"""One Batcher over the token engine, step by step; requests are released when they finish, and counted."""

from __future__ import annotations

from collections.abc import Sequence

from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.engine.launcher import Launcher
from shared.kvcache.audit import audit, audit_idle
from shared.protocol.messages import Finish, ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.plan import ScheduleBatch
from shared.scheduling.req import Req
from shared.timeline import Timeline
from tests.token_engine import EOS, reference_tokens, token_engine


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
    """What retracted requests lose is computed again: copying to the host is not the matter here."""

    def __init__(
        self,
        *,
        num_tokens: int = 1024,
        page_size: int = 4,
        overlap: bool = True,
        disable_radix_cache: bool = False,
        **schedule: object,
    ) -> None:
        options = ScheduleOptions(retract_policy="recompute", **schedule)  # type: ignore[arg-type]
        cache = CacheOptions(
            page_size=page_size, max_total_tokens=num_tokens, disable_radix_cache=disable_radix_cache
        )
        config = NodeConfig(cache=cache, schedule=options, model=ModelOptions(context_length=1024))
        self.engine = token_engine(config)
        self.ledger = self.engine.ledger
        self.batcher = Batcher(self.ledger, options)
        self.launcher = Launcher(
            self.engine.stream, self.ledger, frozenset({EOS}), overlap=overlap, debug_checks=True
        )
        self.live: dict[str, Req] = {}
        self.done: dict[str, Req] = {}
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
            plan = self.batcher.plan()
        batch = plan.batch
        self.check_places()
        self.num_steps += 1
        for item in batch.items if batch else ():
            self.admitted_at.setdefault(item.req.key.rid, self.num_steps)
        outcome = self.launcher.turn(plan)
        assert not outcome.failed and not plan.copies and not plan.unservable
        for req in outcome.computed:  # as a decode node does: no transfer reads them
            if req.kv is not None:
                self.ledger.release_superseded(req.kv)
        for req in outcome.finished:
            self.end(req)
        audit(self.ledger)
        return batch

    def check_places(self) -> None:
        """Every live request is in exactly one place, and holds KV exactly where it should."""
        b = self.batcher
        in_last = [item.req for item in b.last_batch.extends] if b.last_batch else []
        without_kv = [*b.waiting_queue, *b.retraction.to_prefill()]
        with_kv = [*([b.chunked_req] if b.chunked_req else []), *b.running_batch]
        with_kv += [
            req for req in in_last if req not in with_kv and req.finish is None and req not in without_kv
        ]
        seen = [id(req) for req in (*without_kv, *with_kv)]
        assert len(seen) == len(set(seen)), "a request is in two places"
        # A request whose last token is in flight has left the batches and waits for its commit.
        awaited = {id(req) for req in self.live.values() if not req.wants_decode}
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
        self.done[req.key.rid] = self.live.pop(req.key.rid)

    def run(self, max_steps: int = 3000) -> None:
        """Until all have ended, with the right outputs and nothing held."""
        for _ in range(max_steps):
            if not self.live and self.launcher.in_flight is None:
                break
            self.step()
        assert not self.live, f"somebody starves: {sorted(self.live)}"
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
