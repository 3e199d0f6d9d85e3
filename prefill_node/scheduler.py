"""The prefill node's loop.

Life of a request here:

    bootstrap_queue    until the decode node has reserved pages for it (Ready)
    grammar_queue      meanwhile, until its grammar is compiled, if it has one
    waiting_queue      until the PrefillAdder finds pages, budget and a slot
    chunked_req        while its prompt is computed chunk by chunk; whole pages are offered as chunks are committed
    (sampled)          its first token goes to the router at once, the handoff to the decode node; with them go
                       the tokens jumped over behind it, if any
    inflight_queue     until the decode node has every page, or the transfer has ended otherwise

A request that nobody continues (`decode` is None) skips the first and the last.
"""

from __future__ import annotations

import threading
from functools import partial

from prefill_node.bootstrap_queue import BootstrapQueue
from prefill_node.inflight_queue import InflightQueue
from prefill_node.peering import Peering
from shared import log
from shared.config import ScheduleOptions
from shared.engine.build import Engine
from shared.engine.loop_parts import new_grammar_queue, new_launcher
from shared.engine.vitals import Vitals
from shared.errors import RequestError
from shared.kvtransfer.sender import SendSide
from shared.kvtransfer.states import SendEnded
from shared.protocol.messages import (
    Cancel,
    Finish,
    Flush,
    Peers,
    Prefill,
    Ready,
    ReqKey,
    RouterHello,
    StartProfile,
    Stop,
    StopProfile,
)
from shared.protocol.router_port import RouterPort
from shared.scheduling.admission import accept
from shared.scheduling.batcher import Batcher
from shared.scheduling.commit import Committed
from shared.scheduling.grammar_queue import stuck
from shared.scheduling.req import Req
from shared.timeline import ReqStage

IDLE_WAIT_S = 0.05


class PrefillScheduler:
    """Owns every request, page and row of a prefill node. Runs on one thread."""

    def __init__(
        self,
        engine: Engine,
        options: ScheduleOptions,
        sender: SendSide,
        peering: Peering,
        router_port: RouterPort,
        vitals: Vitals,
        wake: threading.Event,
        router_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._ledger = engine.ledger
        self._sender = sender
        self._peering = peering
        self._router_port = router_port
        self._vitals = vitals
        self._wake = wake
        self._router_timeout_s = router_timeout_s
        self._launcher = new_launcher(engine, options)
        self.grammar_queue = new_grammar_queue(engine, options, wake)
        self.batcher = Batcher(engine.ledger, options)
        self.bootstrap_queue = BootstrapQueue()
        self.inflight_queue = InflightQueue(engine.ledger, sender)
        self.reqs: dict[ReqKey, Req] = {}
        self._opened: set[ReqKey] = set()
        """Requests whose transfer has not ended; their KV is not released before it has."""

    # --------------------------------------------------------------------------------------- the loop
    def run(self, stop: threading.Event) -> None:
        """Step until `stop`; sleep while there is nothing to do."""
        while not stop.is_set():
            if not self.step():
                self._wake.wait(IDLE_WAIT_S)
                self._wake.clear()

    def step(self) -> bool:
        """One turn: hear, plan, run, account, speak. False when there was nothing to compute."""
        self._hear()
        with self._launcher.planning():
            batch = self.batcher.get_next_batch()
        was_in_flight = self._launcher.in_flight
        committed, failed = self._launcher.turn(batch)
        self._account(committed)
        for req in failed:
            self._fail(req, 500, "the forward of this request failed on the prefill node")
        for req in committed.stuck:
            self._fail(req, 400, *stuck(req))
        self._router_port.flush()
        worked = batch is not None or was_in_flight is not None
        self._publish(busy=worked)
        self._engine.profiler.step_done(worked)
        return worked

    # ------------------------------------------------------------------------------------------- hear
    def _hear(self) -> None:
        self._engine.progress.steps += 1
        for heard in self._router_port.take():
            match heard.message:
                case RouterHello():  # it has given up what it sent over an earlier connection
                    self._fail_all(heard.router, "the router connected anew")
                case Peers(decode_nodes):
                    for node in decode_nodes:
                        self._peering.ensure(node)
                case Prefill():
                    self._start(heard.message)
                case Cancel(key) | Stop(key):
                    self._end(key, "cancelled by the router")
                case Flush(call_id):
                    ok = not self.reqs
                    if ok:
                        self._ledger.flush()
                    self._router_port.answer(heard.router, call_id, ok)
                case StartProfile() | StopProfile():
                    self._router_port.answer(
                        heard.router, heard.message.call_id, *self._engine.profiler.obey(heard.message)
                    )
        for router in self._router_port.take_silent(self._router_timeout_s):
            log.warn("router_silent", router=router)
            self._fail_all(router, f"this node had not heard of the router for {self._router_timeout_s:g} s")
        for over in self.grammar_queue.take():
            if over.error is None:
                over.go_on()
            else:
                self._fail(over.req, over.error.status, over.error.message, over.error.param)
        self._sender.tick()
        for event in self._sender.poll():
            match event:
                case Ready(key, prefix_pages):
                    self._admit(key, prefix_pages)
                case SendEnded():
                    self._transfer_ended(event)

    def _start(self, message: Prefill) -> None:
        try:
            req = accept(message, self._engine.limits, self._engine.model_config.vocab_size)
        except RequestError as error:
            self._router_port.fail(message.key, error.status, error.message, error.param)
            return
        self.reqs[req.key] = req
        if message.decode is not None:
            self._peering.ensure(message.decode)
            self._opened.add(req.key)
            self.bootstrap_queue.add(req)
            self._sender.open(req.key, message.decode.incarnation)
        if req.params.grammar is not None:
            self.grammar_queue.add(req, partial(self._enqueue, req))
        self._enqueue(req)

    def _enqueue(self, req: Req) -> None:
        """To be computed, once its pages are reserved elsewhere and its grammar is compiled, in either order."""
        if req.key not in self.bootstrap_queue and req.key not in self.grammar_queue:
            self.batcher.add(req)

    def _admit(self, key: ReqKey, prefix_pages: int) -> None:
        req = self.bootstrap_queue.take(key)
        if req is None:
            return
        if not 0 <= prefix_pages <= self._ledger.pages_for(len(req.ids)):
            self._fail(req, 500, f"the decode node claims to hold {prefix_pages} pages of this prompt")
            return
        self.inflight_queue.add(req, prefix_pages)
        self._enqueue(req)

    # ---------------------------------------------------------------------------------------- account
    def _account(self, committed: Committed) -> None:
        for req in committed.computed:
            if req.finish is None and req.key in self.inflight_queue:
                self.inflight_queue.offer_computed(req)
        self._vitals.count_generated(len(committed.sampled), sum(req.num_jumped for req in committed.sampled))
        for req in committed.sampled:
            self._vitals.count_prompt(req.num_input_ids, req.cached_tokens)
            if req.finish is None:
                if req.key in self.inflight_queue:
                    req.timeline.move_to(ReqStage.TRANSFERRING)
                    self.inflight_queue.hand_off(req)
                self._router_port.say_token(
                    req.key,
                    req.output_len - len(req.newest_ids),
                    req.newest_ids,
                    None,
                    req.report(),
                    req.last_logprobs,
                    req.input_logprobs,
                )
        for req in committed.finished:
            # The first token, or a jump after it, ended it: this node says so, and the decode node is not needed.
            tokens = req.newest_ids if req in committed.sampled else ()
            if not req.output_len:  # max_new_tokens 0
                self._vitals.count_prompt(req.num_input_ids, req.cached_tokens)
            self._router_port.say_token(
                req.key,
                req.output_len - len(tokens),
                tokens,
                req.finish,
                req.report(),
                req.last_logprobs,
                req.input_logprobs,
            )
            self._end(req.key, "finished")
        for req in committed.sampled:
            if req.finish is None and req.key not in self._opened:
                self._end(req.key, "nobody continues this request")

    def _transfer_ended(self, ended: SendEnded) -> None:
        self._opened.discard(ended.key)
        self._vitals.count_transfer(ended.nbytes, ended.seconds if ended.ok else 0.0)
        req = self.reqs.get(ended.key)
        if req is None:
            return
        if req.finish is None and not ended.handed_off:
            # Nobody else can tell the router: the decode node may be gone, or think that this node tells it. The
            # request's stage does not say: a transfer may break while the step runs that ends in its handoff.
            self._router_port.fail(req.key, 503, f"KV transfer to the decode node failed: {ended.reason}")
        self._end(ended.key, ended.reason)

    def _fail(self, req: Req, status: int, message: str, param: str | None = None) -> None:
        self._router_port.fail(req.key, status, message, param)
        self._end(req.key, message)

    def _fail_all(self, router: str, reason: str) -> None:
        for req in [req for req in self.reqs.values() if req.key.router == router and req.finish is None]:
            self._fail(req, 503, reason)

    def _end(self, key: ReqKey, reason: str) -> None:
        """End a request in any stage. Its KV is released now, or when its transfer has ended."""
        req = self.reqs.get(key)
        if req is None:
            return
        self.bootstrap_queue.take(key)
        self.grammar_queue.remove(key)
        self.batcher.remove(req)
        if req.finish is None:
            req.end(Finish("abort"))
        if key in self._opened:
            self._sender.cancel(key, reason)  # _transfer_ended comes back here
            return
        self.inflight_queue.remove(key)
        if req.kv is not None:
            self._ledger.cache_finished_req(req.kv, req.ids)
            req.kv = None
        del self.reqs[key]

    # ------------------------------------------------------------------------------------------ speak
    def _publish(self, *, busy: bool) -> None:
        in_flight = len(launched.batch.items) if (launched := self._launcher.in_flight) is not None else 0
        self._vitals.publish(
            idle=not self.reqs and not busy,
            busy=busy,
            num_running=in_flight,
            num_waiting=len(self.grammar_queue)
            + len(self.batcher.waiting_queue)
            + (self.batcher.chunked_req is not None),
            num_transferring=len(self.inflight_queue),
            num_bootstrapping=len(self.bootstrap_queue),
            num_retractions=self.batcher.num_retractions,
            links=self._sender.links_by_transport,
            schedule_policy=self.batcher.schedule_policy,
        )

    def close(self, reason: str) -> None:
        """Fail every request and let go of everything; the loop has ended."""
        for req in list(self.reqs.values()):
            if req.finish is None:
                self._router_port.fail(req.key, 503, reason)
        self._router_port.leave(reason)
        self._sender.close()
        self._engine.stream.close()
        self._engine.grammars.close()
        self._engine.profiler.close()
