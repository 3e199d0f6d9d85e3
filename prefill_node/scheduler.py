"""The prefill node's loop.

Life of a request here:

    bootstrap_queue    until the decode node has reserved pages for it (Ready); if that takes long and this node has
                       nothing else to compute, its prompt is computed ahead (`run_ahead`)
    grammar_queue      meanwhile, until its grammar is compiled, if it has one
    fetches            meanwhile, until cached pages of its prompt have come from another node, if one lends them
    waiting_queue      until the PrefillAdder finds pages, budget and a slot
    chunked_req        while its prompt is computed chunk by chunk; whole pages are offered as chunks are committed
    (sampled)          its first token goes to the router at once, the handoff to the decode node; with them go
                       the tokens jumped over behind it, if any
    inflight_queue     until the decode node has every page, or the transfer has ended otherwise

A request without a decode node (`Prefill.decode` is None) skips the first and the last. `lending` has what this node
lends to others, which is for none of its own requests.
"""

from __future__ import annotations

from functools import partial

from prefill_node.fetches import Fetches
from prefill_node.run_ahead import RunAhead
from shared.engine.loop_parts import NodeParts, new_grammar_queue, new_launcher
from shared.engine.req_table import ReqTable
from shared.engine.router_desk import RouterDesk
from shared.engine.vitals import QueuedTokens
from shared.errors import RequestError
from shared.kvtransfer.lending import Lending
from shared.kvtransfer.queues import BootstrapQueue, InflightQueue, evict_corrupt
from shared.kvtransfer.states import ReadyOverdue, Received, ReceiveFailed, SendEnded
from shared.protocol.messages import Lend, Load, Peers, Prefill, ReqKey
from shared.protocol.transfer_messages import Ready
from shared.scheduling.batcher import Batcher
from shared.scheduling.commit import Outcome
from shared.scheduling.plan import Plan
from shared.scheduling.req import Req
from shared.timeline import ReqStage


class PrefillScheduler:
    """Decides for every request, page and row of a prefill node. Runs on one thread."""

    def __init__(self, parts: NodeParts) -> None:
        engine, transfer, options = parts.engine, parts.transfer, parts.config.schedule
        receiver, sender, peering = transfer.receiver, transfer.sender, transfer.peering
        router_port, vitals = parts.router_port, parts.vitals
        self._ledger = engine.ledger
        self._receiver = receiver
        self._sender = sender
        self._peering = peering
        self._router_port = router_port
        self._vitals = vitals
        self._launcher = new_launcher(engine, options)
        self.grammar_queue = new_grammar_queue(parts)
        self.batcher = Batcher(engine.ledger, options)
        self.bootstrap_queue = BootstrapQueue()
        self.inflight_queue = InflightQueue(engine.ledger, sender)
        self._opened: dict[ReqKey, str] = {}
        """Requests whose transfer has not ended, with the incarnation of their decode node; their KV is not released
        before it has."""
        self.fetches = Fetches(engine.ledger, receiver, self.batcher, engine.clock)
        self.run_ahead = RunAhead(engine.ledger, options, self.batcher, self.fetches, vitals)
        self.lending = Lending(engine.ledger, sender, peering, engine.clock)
        self.queued_tokens = QueuedTokens(engine.ledger)
        queues = (
            self.bootstrap_queue,
            self.run_ahead,
            self.grammar_queue,
            self.fetches,
            self.batcher,
            self.queued_tokens,
        )
        self.reqs = ReqTable(engine.ledger, router_port, queues, self._cancel_transfer)
        self._desk = RouterDesk(parts, self.reqs, self.grammar_queue, self.batcher)

    def step(self) -> bool:
        """Take one turn. False when it has nothing left to do."""
        self._hear()
        plan = self._plan()
        outcome = self._launcher.turn(plan)
        self._account(plan, outcome)
        self._speak(outcome)
        return outcome.worked or self.lending.offers_more

    # ------------------------------------------------------------------------------------------- hear
    def _hear(self) -> None:
        self.fetches.advance()
        for heard in self._desk.hear():
            match heard.message:
                case Peers(decode_nodes):
                    self._peering.set_peers(heard.router, decode_nodes)
                case Lend():
                    self.lending.start(heard.message)
                case Prefill():
                    self._start(heard.message)
        if self._router_port.is_draining:
            self._hand_back()
        self._receiver.tick()
        self._sender.tick()
        self._hear_transfers()
        self.lending.advance(beside_handoffs=len(self.inflight_queue) > 0)

    def _hear_transfers(self) -> None:
        for event in self._receiver.poll():
            match event:
                case Received():
                    self._vitals.count_transfer(event.nbytes, event.seconds)
                    self._vitals.num_fetched_tokens += self.fetches.received(event)
                case ReceiveFailed():
                    self.fetches.failed(event)
        for sent in self._sender.poll():
            if isinstance(sent, SendEnded):
                self._vitals.count_transfer(sent.nbytes, sent.seconds, ok=sent.ok)
            if sent.key not in self._opened and self.lending.hear(sent):
                continue
            match sent:
                case Ready(key, prefix_pages):
                    self._admit(key, prefix_pages)
                case ReadyOverdue(key) if (req := self.bootstrap_queue.get(key)) is not None:
                    self.run_ahead.add(req)
                case SendEnded():
                    self._transfer_ended(sent)

    def _hand_back(self) -> None:
        """Let go of the requests that hold no KV yet: their routers send them to other nodes."""
        for req in [req for req in self.reqs.values() if req.timeline.stage is ReqStage.QUEUED]:
            self._router_port.hand_back(req.key, "this node is draining")
            self.reqs.end(req.key, "handed back")

    def _start(self, message: Prefill) -> None:
        req = self._desk.accept(message)
        if req is None:
            return
        self.reqs.add(req)
        if message.decode is not None:
            self._peering.ensure(message.decode)
            self._opened[req.key] = message.decode.incarnation
            self.bootstrap_queue[req.key] = req
            self._sender.open(req.key, message.decode.incarnation)
        if req.params.grammar is not None:
            self.grammar_queue.add(req, partial(self._enqueue, req))
        if message.source is None:
            self._fetched(req)
            return
        size = self._ledger.page_size
        num_cached = self._ledger.peek_prefix(req.matchable_ids, req.extra_key).num_pages * size
        num_tokens = min(message.source.num_pages * size, len(req.ids)) - num_cached
        within_s = self._vitals.prefill_s(self.queued_tokens.total + num_tokens)
        self.fetches.start(req, message.source, within_s, partial(self._fetched, req))

    def _fetched(self, req: Req) -> None:
        """Compute what is not cached of `req`, now that nothing more of it comes from another node."""
        self.queued_tokens.add(req)
        self._enqueue(req)

    def _enqueue(self, req: Req) -> None:
        """Have `req` computed, once it waits in none of the first three queues any more."""
        waiting = self.bootstrap_queue, self.grammar_queue.waiting, self.fetches.awaited
        if not any(req.key in queue for queue in waiting):
            self.batcher.add(req)

    def _admit(self, key: ReqKey, prefix_pages: int) -> None:
        req = self.bootstrap_queue.pop(key, None)
        if req is None:
            return
        self.run_ahead.reserved(req)
        if req.key not in self.fetches.awaited:  # else it is counted when it is known what has to be computed
            self.queued_tokens.add(req)
        if not 0 <= prefix_pages <= self._ledger.pages_for(len(req.ids)):
            reason = f"the decode node claims to hold {prefix_pages} pages of this prompt"
            self.reqs.fail(req, RequestError(reason, status=500))
            return
        self.inflight_queue.add(key, req, prefix_pages, len(req.ids))
        self._enqueue(req)

    # ------------------------------------------------------------------------------------------- plan
    def _plan(self) -> Plan:
        with self._launcher.planning():
            if self._launcher.in_flight is None and not self.batcher.num_waiting:
                self.run_ahead.add_chunk()
            return self.batcher.plan()

    # ---------------------------------------------------------------------------------------- account
    def _account(self, plan: Plan, outcome: Outcome) -> None:
        ran_ahead = self.run_ahead.settle(outcome)
        if ran_ahead is not None and ran_ahead.key in self.bootstrap_queue:
            self.queued_tokens.add(ran_ahead)
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
        req = self.reqs.get(ended.key)
        if req is None:
            return
        req.evict_first &= ended.ok  # else nothing says that the decode node has the prompt
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
        load = Load(
            num_running=len(in_flight.batch.items) if in_flight is not None else 0,
            num_transferring=len(self.inflight_queue),
            num_bootstrapping=len(self.bootstrap_queue),
            num_queued_tokens=self.queued_tokens.total,
            links=self._receiver.link_reports + self._sender.link_reports,
            unreachable=self._sender.unreachable | self._peering.unreachable,
        )
        self._desk.speak(outcome, load, has_loans=len(self.lending) + len(self.fetches) > 0)

    def close(self, reason: str) -> None:
        """Fail every request, end every transfer and wait for what is in flight: then every page is home."""
        self._desk.close(reason)
        self._receiver.close()
        self._sender.close()
        self._hear_transfers()
        self._launcher.close()
