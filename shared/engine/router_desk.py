"""What both roles do alike when they hear messages of routers, and when they speak to routers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shared import log
from shared.engine.cache_announcer import CacheAnnouncer
from shared.engine.loop_parts import NodeParts
from shared.engine.req_table import ReqTable
from shared.errors import RequestError
from shared.protocol.messages import (
    CacheResync,
    Cancel,
    Decode,
    Flush,
    Leaving,
    Load,
    Peers,
    Prefill,
    RouterHello,
    StartProfile,
    Stop,
    StopProfile,
    TokenEntry,
)
from shared.protocol.router_port import FromRouter
from shared.scheduling.batcher import Batcher
from shared.scheduling.commit import Outcome
from shared.scheduling.grammar_queue import GrammarQueue
from shared.scheduling.plan import Plan
from shared.scheduling.req import Req, accept


class RouterDesk:
    """Runs on the scheduler thread, at the beginning and at the end of every turn."""

    def __init__(
        self,
        parts: NodeParts,
        reqs: ReqTable,
        grammar_queue: GrammarQueue,
        batcher: Batcher,
    ) -> None:
        self._engine = parts.engine
        self._reqs = reqs
        self._grammar_queue = grammar_queue
        self._batcher = batcher
        self._router_port = parts.router_port
        self._vitals = parts.vitals
        self._router_timeout_s = parts.config.net.router_timeout_s
        self._announcer = CacheAnnouncer(parts.engine.ledger, parts.router_port)

    def hear(self) -> Iterator[FromRouter]:
        """Act on the messages that both roles treat alike, and yield the others to the role, in order."""
        self._engine.progress.turns += 1
        for heard in self._router_port.take():
            match heard.message:
                case Cancel(key) | Stop(key) if key in self._reqs:
                    self._reqs.end(key, "cancelled by the router")
                case Flush(call_id):
                    flushed = not self._reqs and self._engine.ledger.flush()
                    self._router_port.answer(heard.router, call_id, flushed)
                case StartProfile(call_id) | StopProfile(call_id):
                    done = self._engine.profiler.obey(heard.message)
                    self._router_port.answer(heard.router, call_id, *done)
                case RouterHello():
                    self._reqs.fail_all(heard.router, "the router connected anew")
                    self._announcer.tell_all(heard.router)
                case CacheResync():
                    self._announcer.tell_all(heard.router)
                case Leaving(reason):
                    log.event("router_left", router=heard.router, reason=reason)
                    self._router_port.forget(heard.router)
                    yield self._lost(heard.router, "the router has left")
                case _:
                    yield heard
        timeout_s = self._router_timeout_s
        for router in self._router_port.take_silent(timeout_s):
            log.warn("router_silent", router=router)
            yield self._lost(router, f"this node had not heard of the router for {timeout_s:g} s")
        for over in self._grammar_queue.take():
            if over.error is None:
                over.go_on()
            else:
                self._reqs.fail(over.req, over.error)

    def _lost(self, router: str, reason: str) -> FromRouter:
        """End what a router wanted. Returns what tells the role that it wants no links to decode nodes either."""
        self._reqs.fail_all(router, reason)
        return FromRouter(router, Peers(()))

    def accept(self, message: Prefill | Decode) -> Req | None:
        """The request that a message describes. None when it can never be served here; its router has been told."""
        try:
            engine = self._engine
            return accept(message, engine.limits, engine.model_config.vocab_size, engine.stamp_clock)
        except RequestError as error:
            self._router_port.fail(message.key, error.status, error.message, error.param)
            return None

    def say_tokens(self, req: Req, token_ids: tuple[int, ...], *, with_report: bool = True) -> None:
        """Tell the router of `req` its newest tokens, if there are any, and that it has finished, if it has."""
        report = req.report() if with_report else None
        logprobs = req.last_logprobs, req.input_logprobs
        at = req.output_len - len(token_ids)
        self._router_port.say_tokens(TokenEntry(req.key, at, token_ids, req.finish, report, *logprobs))

    def fail(self, plan: Plan, outcome: Outcome) -> None:
        """End the requests that a turn found unable to go on, and tell their routers why."""
        for req, error in outcome.failed.items():
            self._reqs.fail(req, error)
        for req in [self._reqs[key] for key in plan.unservable if key in self._reqs]:
            self._reqs.fail(req, self._too_large(req))

    def _too_large(self, req: Req) -> RequestError:
        ledger = self._engine.ledger
        return RequestError(
            f"the sequence has {len(req.ids)} tokens and needs {ledger.pages_for(len(req.ids))} KV pages of "
            f"{ledger.page_size}; this node has {ledger.allocator.num_pages} in all"
        )

    def speak(self, outcome: Outcome, load: Load, *, has_loans: bool) -> None:
        """End a turn: send its tokens and cache changes, publish the node's load, count the step of a profile.

        `load` has what the role knows of its queues and links. A node that `has_loans` keeps pages for other reasons
        than its requests.
        """
        self._router_port.flush()
        if outcome.prefilled is not None:
            self._vitals.count_prefill(*outcome.prefilled)
        num_waiting = len(self._grammar_queue) + self._batcher.num_waiting
        policy = self._batcher.schedule_policy
        load = msgspec.structs.replace(load, num_waiting=num_waiting, schedule_policy=policy)
        idle = not self._reqs and not has_loans and not outcome.worked
        self._vitals.publish(load, self._batcher.retraction.count, idle=idle)
        self._router_port.tell_unreachable()
        self._announcer.tell_changes()
        self._engine.profiler.step_done(outcome.worked)

    def close(self, reason: str) -> None:
        """Fail every request and tell the routers that this node goes away. Transfers may still be ending."""
        for req in self._reqs.values():
            if req.finish is None:
                self._router_port.fail(req.key, 503, reason)
        self._router_port.leave(reason)
        for key in list(self._reqs):
            self._reqs.end(key, reason)
