"""The prefill node's loop.

Life of a request here:

    bootstrap_queue    until the decode node has reserved pages for it (Ready)
    grammar_queue      meanwhile, until its grammar is compiled, if it has one
    waiting_queue      until the PrefillAdder finds pages, budget and a slot
    chunked_req        while its prompt is computed chunk by chunk; whole pages are offered as chunks are committed
    (sampled)          its first token goes to the router at once, the handoff to the decode node; with them go
                       the tokens jumped over behind it, if any
    inflight_queue     until the decode node has every page, or the transfer has ended otherwise

A request without a decode node (`Prefill.decode` is None) skips the first and the last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shared.config import ScheduleOptions
from shared.engine.build import Engine
from shared.engine.loop_parts import new_grammar_queue, new_launcher
from shared.engine.req_table import ReqTable
from shared.engine.router_desk import RouterDesk
from shared.engine.vitals import Vitals
from shared.errors import RequestError
from shared.kvtransfer.peering import Peering
from shared.kvtransfer.queues import BootstrapQueue, InflightQueue, evict_corrupt
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.states import SendEnded
from shared.protocol.messages import Peers, Prefill, ReqKey
from shared.protocol.router_port import RouterPort
from shared.protocol.transfer_messages import Ready
from shared.scheduling.batcher import Batcher
from shared.scheduling.commit import Outcome
from shared.scheduling.plan import Plan
from shared.scheduling.queued_tokens import QueuedTokens
from shared.scheduling.req import Req
from shared.timeline import ReqStage


class PrefillScheduler:
    """Decides for every request, page and row of a prefill node. Runs on one thread."""

    def __init__(
        self,
        engine: Engine,
        options: ScheduleOptions,
        sender: KVSender,
        peering: Peering,
        router_port: RouterPort,
        vitals: Vitals,
        wake: Callable[[], None],
        router_timeout_s: float,
    ) -> None:
        self._ledger = engine.ledger
        self._sender = sender
        self._peering = peering
        self._router_port = router_port
        self._vitals = vitals
        self._launcher = new_launcher(engine, options)
        self.grammar_queue = new_grammar_queue(engine, options, wake)
        self.batcher = Batcher(engine.ledger, options)
        self.bootstrap_queue = BootstrapQueue()
        self.inflight_queue = InflightQueue(engine.ledger, sender)
        self._opened: dict[ReqKey, str] = {}
        """Requests whose transfer has not ended, with the incarnation of their decode node; their KV is not released
        before it has."""
        self.queued_tokens = QueuedTokens(engine.ledger)
        queues = (self.bootstrap_queue, self.grammar_queue, self.batcher, self.queued_tokens)
        self.reqs = ReqTable(engine.ledger, router_port, queues, self._cancel_transfer)
        self._desk = RouterDesk(
            engine, self.reqs, self.grammar_queue, self.batcher, router_port, vitals, router_timeout_s
        )

    def step(self) -> bool:
        """Take one turn. False when there was nothing to compute."""
        self._hear()
        plan = self._plan()
        outcome = self._launcher.turn(plan)
        self._account(plan, outcome)
        self._speak(outcome)
        return outcome.worked

    # ------------------------------------------------------------------------------------------- hear
    def _hear(self) -> None:
        for heard in self._desk.hear():
            match heard.message:
                case Peers(decode_nodes):
                    self._peering.set_peers(heard.router, decode_nodes)
                case Prefill():
                    self._start(heard.message)
        if self._router_port.is_draining:
            self._hand_back()
        self._sender.tick()
        self._hear_transfers()

    def _hear_transfers(self) -> None:
        for event in self._sender.poll():
            match event:
                case Ready(key, prefix_pages):
                    self._admit(key, prefix_pages)
                case SendEnded():
                    self._transfer_ended(event)

    def _hand_back(self) -> None:
        """Let go of the requests of which nothing is computed yet: their routers send them to other nodes."""
        for req in [req for req in self.reqs.values() if req.timeline.stage is ReqStage.QUEUED]:
            self._router_port.hand_back(req.key, "this node is draining")
            self.reqs.end(req.key, "handed back")

    def _start(self, message: Prefill) -> None:
        req = self._desk.accept(message)
        if req is None:
            return
        self.reqs.add(req)
        self.queued_tokens.add(req)
        if message.decode is not None:
            self._peering.ensure(message.decode)
            self._opened[req.key] = message.decode.incarnation
            self.bootstrap_queue.add(req)
            self._sender.open(req.key, message.decode.incarnation)
        if req.params.grammar is not None:
            self.grammar_queue.add(req, partial(self._enqueue, req))
        self._enqueue(req)

    def _enqueue(self, req: Req) -> None:
        """Have `req` computed, once its pages are reserved elsewhere and its grammar is compiled, in either order."""
        if req.key not in self.bootstrap_queue and req.key not in self.grammar_queue:
            self.batcher.add(req)

    def _admit(self, key: ReqKey, prefix_pages: int) -> None:
        req = self.bootstrap_queue.take(key)
        if req is None:
            return
        if not 0 <= prefix_pages <= self._ledger.pages_for(len(req.ids)):
            reason = f"the decode node claims to hold {prefix_pages} pages of this prompt"
            self.reqs.fail(req, RequestError(reason, status=500))
            return
        self.inflight_queue.add(key, req, prefix_pages, len(req.ids))
        self._enqueue(req)

    # ------------------------------------------------------------------------------------------- plan
    def _plan(self) -> Plan:
        with self._launcher.planning():
            return self.batcher.plan()

    # ---------------------------------------------------------------------------------------- account
    def _account(self, plan: Plan, outcome: Outcome) -> None:
        self.queued_tokens.computed(outcome.computed)
        for req in outcome.computed:
            if req.finish is None and req.key in self.inflight_queue:
                self.inflight_queue.offer_computed(req.key)
        self._vitals.count_generated(len(outcome.sampled), sum(req.num_jumped for req in outcome.sampled))
        for req in outcome.sampled:
            self._vitals.count_prompt(req.num_input_ids, req.cached_tokens)
            if req.finish is None:
                if req.key in self.inflight_queue:
                    req.timeline.move_to(ReqStage.TRANSFERRING)
                    self.inflight_queue.hand_off(req.key)
                self._desk.say_tokens(req, req.newest_ids)
        for req in outcome.finished:
            # The first token, or a jump after it, ended the request, so no decode node is needed.
            if not req.output_len:  # max_new_tokens 0
                self._vitals.count_prompt(req.num_input_ids, req.cached_tokens)
            self._desk.say_tokens(req, req.newest_ids if req in outcome.sampled else ())
            self.reqs.end(req.key, "finished")
        for req in outcome.sampled:
            if req.finish is None and req.key not in self._opened:
                self.reqs.end(req.key, "no decode node continues this request")
        self._desk.fail(plan, outcome)

    def _transfer_ended(self, ended: SendEnded) -> None:
        decode_node = self._opened.pop(ended.key)
        self.inflight_queue.remove(ended.key)
        self._vitals.count_transfer(ended.nbytes, ended.seconds if ended.ok else 0.0)
        req = self.reqs.get(ended.key)
        if req is None:
            return
        if not ended.handed_off and not ended.corrupt:
            # Before the handoff this node tells the router, since the decode node may be gone. The stage of the
            # request does not say whether the handoff was sent: it may be that of the step in flight.
            reason = f"KV transfer to the decode node failed: {ended.reason}"
            self.reqs.fail(req, RequestError(reason, status=503), blames=decode_node)
        self.reqs.end(ended.key, ended.reason)
        if ended.corrupt:
            evict_corrupt(req, ended, self._ledger)

    def _cancel_transfer(self, key: ReqKey, reason: str) -> bool:
        """End the transfer of a request; False when none is under way. `_transfer_ended` follows."""
        if key not in self._opened:
            return False
        self._sender.cancel(key, reason)
        return True

    # ------------------------------------------------------------------------------------------ speak
    def _speak(self, outcome: Outcome) -> None:
        in_flight = self._launcher.in_flight
        self._desk.speak(
            outcome,
            num_running=len(in_flight.batch.items) if in_flight is not None else 0,
            num_transferring=len(self.inflight_queue),
            num_bootstrapping=len(self.bootstrap_queue),
            num_queued_tokens=self.queued_tokens.total,
            links=self._sender.link_reports,
            unreachable=self._sender.unreachable | self._peering.unreachable,
        )

    def close(self, reason: str) -> None:
        """Fail every request, end every transfer and wait for what is in flight: then every page is home."""
        self._desk.close(reason)
        self._sender.close()
        self._hear_transfers()
        self._launcher.close()
