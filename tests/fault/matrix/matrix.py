"""Runs cells of the matrix on a fleet of one prefill node and two decode nodes, which keeps running between cells.

All four requests are at one decode node, the primary, which has cached what they have in common. The other one is the
spare. A cell is: four requests, held in the stage and seen there; the fault; their answers, against those of the
undisturbed run of the same fleet; what was lost runs again; everything is given back; the four requests once more.
"""

from __future__ import annotations

import contextlib
import functools
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.fault.matrix.cells import LEAVING, Cell, Fault, Transport
from tests.fault.matrix.fleet_nodes import (
    OVER_HOSTILE_NETWORKS,
    Computing,
    HeldNode,
    Served,
    computing_here,
    make_fleet_key,
)
from tests.fault.matrix.four_requests import (
    BODIES,
    NUM_NEW,
    NUM_OWN,
    NUM_SEQS,
    PREFIX,
    Answer,
    answers,
    assert_same,
    finished,
    rids,
    start_four,
)
from tests.fault.matrix.holding import NUM_STREAMED, Sight, Stage
from tests.fault.matrix.namespaces import Namespaces, why_no_namespaces
from tests.fault.matrix.plants import Plant
from tests.fault.matrix.resources import Resources, resources
from tests.patience import PATIENCE_S
from tests.processes import Call, Fleet, Process, Router, is_home, print_logs

T = TypeVar("T")
Links = frozenset[tuple[str, bool]]
"""The node at the other end of each, and whether pages come in over it."""

POLL_S = 0.01
NODES = ("p0", "d0", "d1")
PAGE_SIZE = 4
NODE_TIMEOUT_S, PEER_TIMEOUT_S, ROUTER_TIMEOUT_S = "3", "1.5", "3"
NODE_FLAGS = (
    *("--page-size", str(PAGE_SIZE), "--max-total-tokens", "4096", "--chunked-prefill-size", "8"),
    *("--kv-slot-bytes", "4096", "--kv-slots", "1"),
    *("--peer-timeout-s", PEER_TIMEOUT_S, "--router-timeout-s", ROUTER_TIMEOUT_S),
)
DECODE_FLAGS = ("--host-kv-tokens", "1024", "--retract-policy", "host")
ROUTER_FLAGS = (
    *("--node-timeout-s", NODE_TIMEOUT_S, "--failover-timeout-s", "60"),
    # By time to first token, the decode nodes would share the requests, or prefill them.
    *("--decode-policy", "cache-aware", "--local-prefill-tokens", "16"),
)
NUM_WAITING = 2
"""The output of the request that waits for both decode nodes to come back."""
ABORTED = ("greedy", "n2")
"""The requests that are aborted in cells of that stage."""
_KILLS = (Fault.PREFILL_KILLED, Fault.DECODE_KILLED, Fault.DECODES_KILLED, Fault.TARGET_KILLED)
_ENDS_STREAMS = (Fault.ROUTER_KILLED, Fault.CLIENT_GONE)
"""Faults that no stream can survive: everything has to be given back."""


@dataclass(frozen=True)
class Times:
    """Seconds from the fault until the router knew, and until every stream went on; None where neither happens."""

    detected_s: float | None
    recovered_s: float | None


@contextlib.contextmanager
def matrix_over(
    transport: Transport, folder: Path, model: Served, *, patience_s: float = PATIENCE_S
) -> Iterator[Matrix]:
    """A fleet over `transport`, which ends well with the block.

    Each node has a network namespace of its own where that is possible, but over shared memory.
    """
    with contextlib.ExitStack() as exits:
        network = None
        if transport is not Transport.SHM and not why_no_namespaces():
            network = exits.enter_context(Namespaces(NODES))
        matrix = exits.enter_context(Matrix(folder, model, transport, network=network, patience_s=patience_s))
        yield matrix
        matrix.fleet.stop()


@dataclass(frozen=True)
class Computed:
    """What a node has computed since its process began. Retracted requests are not counted again."""

    incarnation: str
    num_generated: int
    num_prompt_tokens: int
    """Those that were not cached."""

    def since(self, before: Computed) -> Computed:
        """What came after `before`; all of it if that was another process."""
        if self.incarnation != before.incarnation:
            return self
        num_generated = self.num_generated - before.num_generated
        return Computed(self.incarnation, num_generated, self.num_prompt_tokens - before.num_prompt_tokens)


class Matrix:
    """A fleet over one transport, and the answers of its undisturbed run."""

    def __init__(
        self,
        folder: Path,
        model: Served,
        transport: str,
        *,
        network: Namespaces | None = None,
        computing: Computing | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """A fleet over `transport`, as /fleet names it, which computes with the best of this CPU by itself."""
        key = make_fleet_key(folder) if transport in OVER_HOSTILE_NETWORKS else ()
        self.patience_s = patience_s
        self._computing = computing or computing_here()
        self._network = network
        self._transport = transport
        self.fleet = Fleet(
            folder,
            model.folder,
            "1P2D",
            flags=(*NODE_FLAGS, *self._computing.flags, *model.flags, *key),
            decode_flags=DECODE_FLAGS,
            router_flags=(*ROUTER_FLAGS, *key),
            new_node=functools.partial(HeldNode, transport=transport, network=network),
            patience_s=patience_s,
        )
        for node in self.nodes:
            node.order()
        self.expected: dict[str, list[Answer]] = {}
        self._baseline: dict[str, tuple[Resources, Links]] = {}
        """What each process has when both decode nodes have served the requests and sent them to each other."""
        self._num_runs = 0
        self._log_starts: dict[str, int] = {}
        """Where the log of each process begins that must be clean: behind a cell that failed."""

    @property
    def router(self) -> Router:
        return self.fleet.router

    @property
    def nodes(self) -> list[HeldNode]:
        return [self.node(name) for name in self.fleet.nodes]

    def node(self, name: str) -> HeldNode:
        """The node of this name."""
        node = self.fleet.nodes[name]
        assert isinstance(node, HeldNode)
        return node

    def __enter__(self) -> Matrix:
        self.fleet.__enter__()
        try:
            self.expected = self._run_undisturbed()
            self._warm_up()
        except BaseException as error:
            self.fleet.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.fleet.__exit__(*error)

    # --------------------------------------------------------------------------------------- one cell
    def run(self, cell: Cell) -> Times:
        """Run one cell. Raises AssertionError where the client, or a process, sees anything that is wrong."""
        fault, stage, primary = cell.fault, cell.stage, self._prepare()
        self._wait_home()
        incarnations = self._incarnations()
        num_before, num_failed, before = self._num_generated(), self._num_failed(), self._computed()
        calls = self._start_held(stage, primary)
        num_received = self._num_received(stage, calls)
        at = time.monotonic()
        victims = self._inflict(fault, stage, primary, calls)
        for node in self.nodes:
            if node not in victims:
                node.order()
        released_at, detected_s = time.monotonic(), None
        if victims:
            lost = {incarnations[victim.name] for victim in victims}
            self._until("it is noticed", lambda: not lost & self._incarnations_alive())
            detected_s = time.monotonic() - at
            for victim in victims if fault in _KILLS else ():
                victim.wait()
        if self.node("p0") in victims:
            assert self.router.get("/health")[1]["status"] == "degraded"
        if fault is Fault.ROUTER_KILLED:
            for call in calls.values():
                call.finish()
            self.router.start()
        if fault is Fault.DECODES_KILLED:
            self._bring_back(victims)
        if fault in _ENDS_STREAMS:
            for name, call in calls.items():
                self._check_begun(name, answers(name, call))
        else:
            self._check_answers(stage, calls)
        killed = victims if fault in _KILLS else []
        drained = [primary] if stage is Stage.DRAINING and primary not in killed else []
        self._mend(victims, drained)
        self._check_incarnations(incarnations, {node.name for node in (*killed, *drained)})
        if fault is Fault.CLIENT_GONE:
            num_generated = self._num_generated() - num_before
            assert num_generated < NUM_SEQS * NUM_NEW / 2, "a node went on with what its client had left"
        if fault is Fault.NONE:
            self._check_none_failed(num_failed)
        if fault not in _ENDS_STREAMS:
            gone = {incarnations[node.name] for node in (*victims, *drained)}
            self._check_computed_again(
                fault,
                before,
                gone,
                num_received if incarnations[primary.name] in gone else None,
                num_again=max(int(self._num_failed() - num_failed) - NUM_SEQS, 0),
                goes_on=stage is Stage.HANDED_OFF and primary not in victims,
            )
        self.check_home()
        if fault in _ENDS_STREAMS:
            return Times(detected_s, None)
        later = [[moment - at for moment in call.times if moment > released_at] for call in calls.values()]
        return Times(detected_s, max((moments[0] for moments in later if moments), default=None))

    def _inflict(
        self, fault: Fault, stage: Stage, primary: HeldNode, calls: Mapping[str, Call]
    ) -> list[HeldNode]:
        """Let it happen. Returns the nodes that are lost by it."""
        prefill, spare = self.node("p0"), self._other(primary)
        match fault:
            case Fault.PREFILL_KILLED | Fault.PREFILL_STOPPED | Fault.PREFILL_STALLED | Fault.PREFILL_CUT_OFF:
                victims = [prefill]
            case Fault.DECODE_KILLED | Fault.DECODE_STOPPED | Fault.DECODE_STALLED | Fault.DECODE_CUT_OFF:
                victims = [primary]
            case Fault.TARGET_KILLED | Fault.TARGET_STOPPED:
                victims = [spare]
            case Fault.DECODES_KILLED:
                victims = [primary, spare]
            case _:
                victims = []
        for victim in victims:
            if fault in _KILLS:
                victim.send(signal.SIGKILL)
            elif fault in (Fault.PREFILL_STALLED, Fault.DECODE_STALLED):
                victim.order(stage=stage, stall=True)
            elif fault in (Fault.PREFILL_STOPPED, Fault.DECODE_STOPPED, Fault.TARGET_STOPPED):
                victim.send(signal.SIGSTOP)
        match fault:
            case Fault.LINK_LOST:
                receiver = spare if stage in LEAVING else primary
                receiver.order(stage=Stage.TRANSFERRING if stage in LEAVING else stage, cut_links=True)
                self._wait_seen(receiver, "its links cut")
            case Fault.ROUTER_KILLED:
                self.router.kill()
            case Fault.CLIENT_GONE:
                num_aborted = self._counter("sglang:num_aborted_requests") + NUM_SEQS
                for call in calls.values():
                    call.hang_up()
                self._until(
                    "the router has let go",
                    lambda: self._counter("sglang:num_aborted_requests") == num_aborted,
                )
            case Fault.PREFILL_CUT_OFF | Fault.DECODE_CUT_OFF | Fault.CUT_APART:
                self._cut(victims, primary, spare if stage in LEAVING else prefill)
            case _:
                pass
        return victims

    def _bring_back(self, decodes: list[HeldNode]) -> None:
        """Start both decode nodes again, for which a new request waits meanwhile."""
        waiting = self.router.generate(PREFIX, NUM_WAITING)
        code, health = self.router.get("/health")
        assert code == 503 and all(node.name in health["reason"] for node in decodes), health
        assert not waiting.ended, waiting.describe()
        for node in decodes:
            node.order()
            node.start()
        assert len(waiting.tokens()) == NUM_WAITING

    def _cut(self, victims: list[HeldNode], *ends: HeldNode) -> None:
        """Cut off the victims, which work on, for no one. Without victims, cut both ends of the transfer apart."""
        assert self._network is not None, "the nodes have no namespaces of their own"
        for victim in victims:
            self._network.cut_off(victim.name)
            victim.order()
        if not victims:
            self._network.cut_between(*(end.name for end in ends))

    @contextlib.contextmanager
    def mended(self) -> Iterator[None]:
        """For the length of a cell: when it fails, the logs are printed, and the fleet is made whole for the next."""
        try:
            yield
        except AssertionError:
            print_logs(*self.fleet.processes)
            self.renew()
            raise

    def plant(self, plant: Plant | None) -> None:
        """From now on this fault acts, and no other one. Orders of the nodes end."""
        for node in self.nodes:
            node.plants = (plant.name,) if plant is not None and node.role in plant.roles else ()
            node.order()

    def flush(self) -> None:
        """Empty every cache, once all links are there."""
        self._wait_home()
        self._until("every pair of nodes has its link", self._is_linked)
        self._until("caches are flushed", self._flush)

    def renew(self) -> None:
        """Start every process again, and forget what it has logged."""
        if self._network is not None:
            self._network.heal()
        for process in self.fleet.processes:
            if process.alive:
                process.kill()
        self._log_starts = {process.name: len(process.log) for process in self.fleet.processes}
        for node in self.nodes:
            node.order()
        for process in self.fleet.processes:
            process.start()
        self.fleet.wait_ready()

    def check(self, got: Mapping[str, list[Answer]]) -> None:
        """The answers are those of the undisturbed run, to the bit where the native kernels compute."""
        assert_same(got, self.expected, logprob_atol=self._computing.logprob_atol)

    def _warm_up(self) -> None:
        """Have each decode node serve the requests and send them to the other: all links and threads are there."""
        sources = set[str]()
        while sources != {"d0", "d1"}:
            primary = self._prepare()
            if primary.name in sources:  # the next prefix goes to the other
                continue
            sources.add(primary.name)
            calls = self._start_held(Stage.MOVING, primary)
            for node in self.nodes:
                node.order()
            self.check(self._finished(calls))
        self._wait_home()
        self._baseline = {
            process.name: (resources(process), self._links(process)) for process in self.fleet.processes
        }

    def _prepare(self) -> HeldNode:
        """Empty every cache but that of one decode node, which keeps what the prompts have in common."""
        self.flush()
        self._until("caches are empty, by the loads", lambda: not any(self._num_cached().values()))
        self.router.generate([*PREFIX, 100 + self._num_runs], 2).tokens()
        num_pages = len(PREFIX) // PAGE_SIZE

        def holders() -> list[str]:
            return [
                name for name, cached in self._num_cached().items() if cached >= num_pages and name != "p0"
            ]

        (primary,) = self._until("a decode node tells what it has cached", holders)
        return self.node(primary)

    def _is_linked(self) -> bool:
        """Whether the prefill node can send to both decode nodes. One that lends it pages has a link to it, too."""
        loads = self.router.loads()
        if set(loads) != set(self.fleet.nodes):
            return False
        return {peer for peer, incoming in _links(loads["p0"]) if not incoming} == {"d0", "d1"}

    def _num_cached(self) -> dict[str, int]:
        return {name: load["num_evictable_pages"] for name, load in self.router.loads().items()}

    def _flush(self) -> bool:
        call = self.router.post("/flush_cache", {}).finish()
        return call.status == 200

    def _start(self) -> dict[str, Call]:
        self._num_runs += 1
        return start_four(self.router, str(self._num_runs))

    def _start_held(self, stage: Stage, primary: HeldNode) -> dict[str, Call]:
        """Order the nodes to hold requests in `stage`, send all, and wait until they are seen there."""
        prefill, observer = self.node("p0"), primary
        match stage:
            case Stage.PREFILLING:
                prefill.order(stage=stage, count=NUM_SEQS)
                primary.order(count=NUM_SEQS, muster=NUM_SEQS)
                observer = prefill
            case Stage.TRANSFERRING | Stage.ABORTING:
                prefill.order(stage=Stage.TRANSFERRING, count=NUM_SEQS)
                primary.order(stage=Stage.TRANSFERRING, count=NUM_SEQS)
                observer = prefill
            case Stage.MOVING | Stage.DRAINING:
                primary.order(stage=Stage.STREAMING, count=NUM_SEQS)
            case _:
                primary.order(stage=stage, count=NUM_SEQS)
        calls = self._start()
        seen = self._wait_seen(observer, stage)
        if stage is Stage.ABORTING:
            primary.order(stage=stage, stall=True)
            self._wait_seen(primary, "that it stands still")
            for name in ABORTED:
                for rid in rids(name, str(self._num_runs)):
                    assert self.router.post("/abort_request", {"rid": rid}).finish().status == 200
            primary.order(stage=stage)
            seen = self._wait_seen(primary, stage)
        if stage in LEAVING:
            self._other(primary).order(stage=Stage.TRANSFERRING, count=NUM_SEQS)
            if stage is Stage.DRAINING:
                primary.send(signal.SIGTERM)
            primary.order(stage=stage, count=NUM_SEQS)
            seen = self._wait_seen(primary, stage)
        assert seen.keys, f"nothing was {stage}"
        aborted = ABORTED if stage is Stage.ABORTING else ()
        assert not any(call.ended for name, call in calls.items() if name not in aborted), "one has ended"
        return calls

    def _check_answers(self, stage: Stage, calls: Mapping[str, Call]) -> None:
        aborted = ABORTED if stage is Stage.ABORTING else ()
        self.check(self._finished({name: call for name, call in calls.items() if name not in aborted}))
        for name in aborted:
            begun = answers(name, calls[name].finish())
            assert all(answer.finish == "abort" for answer in begun), name
            self._check_begun(name, begun)

    def _check_begun(self, name: str, begun: list[Answer]) -> None:
        """What came of a request that could not end is right."""
        for answer, right in zip(begun, self.expected[name], strict=False):
            assert answer.output_ids == right.output_ids[: len(answer.output_ids)], name

    def _mend(self, victims: list[HeldNode], drained: list[HeldNode]) -> None:
        """Continue what was stopped, and start again what was killed or is drained, and so ends by itself."""
        if self._network is not None:
            self._network.heal()
        for victim in victims:
            if victim.alive:
                victim.send(signal.SIGCONT)
            victim.order()
        for node in drained:
            assert node.wait() == 0, "a node that was drained ends well"
        self.fleet.mend()

    def check_home(self) -> None:
        """Everything is given back, no log has anything ugly, and the four requests are served as ever."""
        num_failed = self._num_failed()
        self.check(self._run())
        self._check_none_failed(num_failed)
        self._wait_home()
        for process in self.fleet.processes:
            process.assert_clean_log(self._log_starts.get(process.name, 0))
            self._check_resources(process)

    def _check_resources(self, process: Process) -> None:
        baseline, links = self._baseline[process.name]

        def allowed() -> Resources:
            """Decode nodes may have built links since, which they lend pages over: it depends on measured rates."""
            new = [incoming for _, incoming in self._links(process) - links]
            return baseline.with_links(self._transport, new, has_port=any(incoming for _, incoming in links))

        self._until(
            lambda: f"{process.name} has no more than {allowed()}, but {resources(process)}",
            lambda: resources(process).is_within(allowed()),
        )

    def _links(self, process: Process) -> Links:
        return _links(self.router.loads()[process.name]) if process.name in self.fleet.nodes else frozenset()

    def _wait_home(self) -> None:
        """Until two loads of each node, one after the other, say that it holds nothing."""
        seen: dict[str, set[int]] = {name: set() for name in self.fleet.nodes}

        def is_all_home() -> bool:
            for name, load in self.router.loads().items():
                assert not load["leak"], f"{name}: {load['leak']}"
                if is_home(load) and load["num_free_host_pages"] == load["num_host_pages"]:
                    seen[name].add(load["progress"])
                else:
                    seen[name].clear()
            return all(len(progress) >= 2 for progress in seen.values())

        self._until("pages, host pages and slots are back", is_all_home)

    def _until(self, what: str | Callable[[], str], holds: Callable[[], T]) -> T:
        """As `patience.until`, with the patience of this matrix."""
        give_up_at = time.monotonic() + self.patience_s
        while not (answer := holds()):
            assert time.monotonic() < give_up_at, f"never: {what() if callable(what) else what}"
            time.sleep(POLL_S)
        return answer

    def _wait_seen(self, node: HeldNode, what: str) -> Sight:
        """Until the latest order of `node` is fulfilled."""
        seen = self._until(lambda: f"{node.name} sees {what}: {self.router.loads()}", lambda: node.sight)
        assert seen is not None
        return seen

    def _finished(self, calls: Mapping[str, Call]) -> dict[str, list[Answer]]:
        self._until("all calls have ended", lambda: all(call.ended for call in calls.values()))
        return finished(calls)

    def _check_incarnations(self, before: Mapping[str, str], expected: set[str]) -> None:
        """The nodes that have ended are others now, and every other node is the same process."""
        renewed = {name for name, incarnation in self._incarnations().items() if incarnation != before[name]}
        assert renewed == expected, f"{renewed} are new incarnations"

    def _incarnations_alive(self) -> set[str]:
        """Of the nodes that the router holds for alive, or draining; no node is asked."""
        _, health = self.router.get("/health")
        return {
            node["incarnation"] for node in [*health["prefill"], *health["decode"]] if "incarnation" in node
        }

    def _incarnations(self) -> dict[str, str]:
        _, info = self.router.get("/get_server_info")
        return {node["node_id"]: node["incarnation"] for node in info["nodes"]}

    def _counter(self, name: str) -> float:
        """A counter of the router, over all its labels."""
        _, metrics = self.router.get("/metrics")
        return sum(map(float, re.findall(rf"^{name}_total{{.*}} (.*)$", metrics, re.MULTILINE)))

    def _num_failed(self) -> float:
        """Failovers, and moves that have failed."""
        return self._counter("baton:num_failovers") + self._counter("baton:num_failed_moves")

    def _check_none_failed(self, num_before: float) -> None:
        assert self._num_failed() == num_before, "a failover, or a failed move, though nothing has failed"

    def _computed(self) -> dict[str, Computed]:
        incarnations, loads = self._incarnations(), self.router.loads()
        return {
            name: Computed(
                incarnations[name],
                load["num_generated_tokens"],
                load["num_prompt_tokens"] - load["num_cached_tokens"],
            )
            for name, load in loads.items()
        }

    def _num_received(self, stage: Stage, calls: Mapping[str, Call]) -> int:
        """The tokens that clients have by now: at least those that all requests of the stage have streamed."""

        def received() -> int:
            each = (answers(name, call) for name, call in calls.items())
            return sum(len(answer.output_ids) for some in each for answer in some)

        num_streamed = NUM_SEQS * NUM_STREAMED if stage in (Stage.STREAMING, *LEAVING) else 0
        self._until("clients have what was streamed", lambda: received() >= num_streamed)
        return received()

    def _check_computed_again(
        self,
        fault: Fault,
        before: Mapping[str, Computed],
        gone: set[str],
        num_received: int | None,
        num_again: int,
        goes_on: bool,
    ) -> None:
        """Streams go on behind their last token: no node but those that are `gone` computes what a client has.

        `num_received` are the tokens that clients had when the decode node of the streams was lost; None: it was not.
        Of those the prefill node had computed the first of each stream. What prompts have in common is computed once.
        `num_again` sequences failed over a second time, as when they went to a decode node that was killed too, but
        was not missed yet: of each, a prefill node may have computed the next token for nobody.
        With `goes_on`, the decode node has all of the streams and computes until it hears that the router, which does
        not know that, sends them again because their prefill node was lost.
        """
        self._wait_home()
        here = [
            now.since(before[name]) for name, now in self._computed().items() if now.incarnation not in gone
        ]
        num_generated = sum(computed.num_generated for computed in here)
        most = NUM_SEQS * NUM_NEW * (1 + goes_on) + num_again
        if num_received is not None:
            most += NUM_SEQS - num_received
        if fault is Fault.DECODES_KILLED:
            most += NUM_WAITING
        assert num_generated <= most, f"{num_generated} tokens were computed where {most} were left"
        num_prompt_tokens = sum(computed.num_prompt_tokens for computed in here)
        most = len(PREFIX) + len(BODIES) * NUM_OWN
        if fault is not Fault.NONE:  # each once more, and that of `_bring_back`
            most += (NUM_SEQS + num_again) * (len(PREFIX) + NUM_OWN) + len(PREFIX)
        assert num_prompt_tokens <= most, f"{num_prompt_tokens} prompt tokens were computed, and not {most}"

    def _num_generated(self) -> int:
        return sum(load["num_generated_tokens"] for load in self.router.loads().values())

    def _other(self, decode: HeldNode) -> HeldNode:
        """The decode node that is not `decode`."""
        return self.node({"d0": "d1", "d1": "d0"}[decode.name])

    def _run(self) -> dict[str, list[Answer]]:
        return self._finished(self._start())

    def _run_undisturbed(self) -> dict[str, list[Answer]]:
        """The answers of a run over empty caches."""
        self._prepare()
        return self._run()


def _links(load: Mapping[str, Any]) -> Links:
    """The links of a node, at most one to each other and one from it."""
    names = sorted((link["peer"].partition("#")[0], link["incoming"]) for link in load["links"])
    assert len(set(names)) == len(names), f"a link is there twice: {load['links']}"
    return frozenset(names)
