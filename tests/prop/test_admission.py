"""Every place in the queue is given back, whatever becomes of who held it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.admission import Admission, Ticket
from router.generation import GenerationGroup, Generator, Prompt
from router.live_rids import LiveRids
from router.running_req import RunningReq
from router.sampling import Sampling
from router.tokenizer import Tokenizer
from shared.errors import RequestError
from shared.protocol.messages import Failed, Finish, Role, TokenEntry
from shared.protocol.sampling_params import SamplingParams
from tests.unit.router.fakes import byte_level_tokenizer
from tests.unit.router.test_placement import Fleet

MAX_QUEUED = 6
TOO_LONG = 100_000
WHICH = st.integers(0, 3)
TOKENIZER = Tokenizer(byte_level_tokenizer())

EVENTS = (
    *["first token"] * 4,
    *["late token", "last token", "no token at all"],
    *["failed", "not cached", "abort", "expire", "stop", "prefill node lost", "decode node lost"],
)


class AdmissionMachine(RuleBasedStateMachine):
    """`held` are requests that tokenize, `groups` those that were dispatched and whose clients still wait."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(2)
        self.dispatcher = self.fleet.dispatcher
        self.num_rejected = 0
        self.admission = Admission(self.dispatcher.queue, MAX_QUEUED, self.on_rejected)
        self.generator = Generator(self.dispatcher, LiveRids())
        self.held: list[tuple[Ticket, int]] = []
        self.groups: list[GenerationGroup] = []
        self.names = itertools.count()

    def on_rejected(self) -> None:
        self.num_rejected += 1

    @property
    def reqs(self) -> list[RunningReq]:
        return [g.req for group in self.groups for g in group.generations if not g.req.ended]

    @property
    def num_waiting(self) -> int:
        return sum(n for _, n in self.held) + sum(req.first_token_at is None for req in self.reqs)

    @rule(num_sequences=st.integers(1, MAX_QUEUED + 1), tokenizes=st.booleans())
    def arrive(self, num_sequences: int, tokenizes: bool) -> None:
        waiting, rejected = self.num_waiting, self.num_rejected
        if waiting + num_sequences <= MAX_QUEUED:
            ticket = self.admission.ticket()
            ticket.take(num_sequences)
            self.held.append((ticket, num_sequences))
            assert self.num_rejected == rejected
            if not tokenizes:
                self.dispatch(len(self.held) - 1)
            return
        with pytest.raises(RequestError) as caught, self.admission.ticket() as ticket:
            ticket.take(num_sequences)
        assert self.num_waiting == waiting
        if num_sequences > MAX_QUEUED and waiting < MAX_QUEUED:
            assert (caught.value.status, self.num_rejected) == (400, rejected)
        else:
            assert (caught.value.status, self.num_rejected) == (429, rejected + 1)
            assert 1 <= (caught.value.retry_after_s or 0) <= 60

    @rule(which=WHICH, what=st.sampled_from(["dispatched", "refused", "gone"]))
    def tokenized(self, which: int, what: str) -> None:
        if which < len(self.held):
            if what == "gone":
                self.held.pop(which)[0].__exit__(None, None, None)
            else:
                self.dispatch(which, refused=what == "refused")

    @rule(which=WHICH, what=st.sampled_from(EVENTS))
    def something_happens(self, which: int, what: str) -> None:
        for req in self.reqs[which : which + 1]:
            node = req.nodes[which % 2]
            match what:
                case "first token":
                    self.tokens(req, TokenEntry(req.key, 0, (7,)))
                case "late token":
                    self.tokens(req, TokenEntry(req.key, 1, (7,)))
                case "last token":
                    self.tokens(req, TokenEntry(req.key, 0, (7,), Finish("length")))
                case "no token at all":
                    self.tokens(req, TokenEntry(req.key, 0, (), Finish("length")))
                case "failed":
                    self.dispatcher.on_failed(node, Failed(req.key, 500, "broken"))
                case "not cached" if req.first_token_at is None:
                    self.dispatcher.on_not_cached(node, req.key)
                case "abort":
                    self.dispatcher.abort(req, "called off")
                case "expire":
                    self.dispatcher.expire(req)
                case "stop":
                    self.dispatcher.stop(req, 1)
                case "prefill node lost" | "decode node lost":
                    role = Role.PREFILL if what.startswith("prefill") else Role.DECODE
                    self.dispatcher.on_node_lost(self.fleet.live(role)[0], "it died")

    @rule(which=WHICH)
    def client_goes(self, which: int) -> None:
        for group in self.groups[which : which + 1]:
            del self.groups[which]
            group.__exit__(None, None, None)

    def tokens(self, req: RunningReq, entry: TokenEntry) -> None:
        """From both nodes, and twice: the router takes each position once."""
        for node in (*req.nodes, req.nodes[0]):
            self.dispatcher.on_tokens(node, (entry,))

    def dispatch(self, at: int, *, refused: bool = False) -> None:
        """As one prompt or as several; that one is too long is found out after those before it were sent."""
        ticket, num_sequences = self.held.pop(at)
        n = num_sequences if num_sequences % 2 else 1
        sampling = Sampling(params=SamplingParams(max_new_tokens=4), n=n)
        lengths = [3] * (num_sequences // n - 1) + [TOO_LONG if refused else 3]
        prompts = [
            Prompt(rid=f"{next(self.names)}", input_ids=(1,) * length, sampling=sampling, split=True)
            for length in lengths
        ]
        group = self.generator.open(prompts, TOKENIZER, ticket)
        if refused:
            with pytest.raises(RequestError), ticket:
                group.__enter__()
        else:
            group.__enter__()
            self.groups.append(group)

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.admission.num_queued == self.num_waiting <= MAX_QUEUED

    def teardown(self) -> None:
        for ticket, _ in self.held:
            ticket.__exit__(None, None, None)
        for group in self.groups:
            group.__exit__(None, None, None)
        assert self.admission.num_queued == self.dispatcher.num_running == 0
        with self.admission.ticket() as ticket:
            ticket.take(MAX_QUEUED)
            with pytest.raises(RequestError):
                self.admission.ticket()


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
