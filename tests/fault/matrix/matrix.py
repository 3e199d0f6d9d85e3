"""Runs cells of the matrix on a fleet of one prefill node and two decode nodes, which keeps running between cells.

All four requests are at one decode node, the primary, which has cached what they have in common. The other one is the
spare. A cell is: four requests, held in the stage and seen there; the fault; their answers, against those of the
undisturbed run of the same fleet; what was lost runs again; everything is given back; the four requests once more.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tests.fault.matrix.cells import Cell, Fault, Transport
from tests.fault.matrix.four_requests import (
    NUM_SEQS,
    PREFIX,
    Answer,
    answers,
    assert_same,
    finished,
    rids,
    start_four,
)
from tests.fault.matrix.holding import Order, Sight, Stage, write
from tests.fault.matrix.plants import Plant
from tests.patience import PATIENCE_S, until
from tests.processes import Call, Fleet, Node, Process, Router, is_home, print_logs

T = TypeVar("T")

POLL_S = 0.01
PAGE_SIZE = 4
NODE_TIMEOUT_S, PEER_TIMEOUT_S, ROUTER_TIMEOUT_S = "3", "1.5", "3"
NODE_FLAGS = (
    *("--page-size", str(PAGE_SIZE), "--max-total-tokens", "4096", "--chunked-prefill-size", "8"),
    *("--kv-slot-bytes", "4096", "--kv-slots", "1"),
    *("--peer-timeout-s", PEER_TIMEOUT_S, "--router-timeout-s", ROUTER_TIMEOUT_S),
)
DECODE_FLAGS = ("--host-kv-tokens", "1024", "--retract-policy", "host")
ROUTER_FLAGS = ("--node-timeout-s", NODE_TIMEOUT_S, "--failover-timeout-s", "60")
ABORTED = ("greedy", "n2")
"""The requests that are aborted in cells of that stage."""


class HeldNode(Node):
    """A node of `held_node`, and what it is told."""

    def __init__(self, folder: Path, role: str, name: str, *flags: str) -> None:
        super().__init__(folder, role, name, *flags)
        self._order_path = folder / f"{name}.order"
        at = self.argv.index("-m")
        self.argv[at + 1 : at + 2] = ["tests.fault.matrix.held_node", role, str(self._order_path)]
        self._number = 0
        self.plants: tuple[str, ...] = ()

    def order(self, **fields: Any) -> None:
        """Give an order, which takes the place of the last one; without `fields` the node is let go.

        A node that runs has read it on return. A node that is stopped is continued before it gets one.
        """
        self._number += 1
        write(self._order_path, Order(number=self._number, plants=self.plants, **fields))
        if self.alive:
            read_path = self._order_path.with_suffix(".read")
            until(
                lambda: read_path.exists() and read_path.read_text() == str(self._number), "the order is read"
            )

    @property
    def sight(self) -> Sight | None:
        """What it has seen since the latest order."""
        path = self._order_path.with_suffix(".seen")
        sight = msgspec.json.decode(path.read_bytes(), type=Sight) if path.exists() else None
        return sight if sight is not None and sight.number == self._number else None


@dataclass(frozen=True)
class Times:
    """Seconds from the fault until the router knew, and until a stream went on; None where neither happens."""

    detected_s: float | None
    recovered_s: float | None


@dataclass(frozen=True)
class Resources:
    """The threads and the open files of a process, by name."""

    threads: Counter[str]
    files: Counter[str]


class Matrix:
    """A fleet over one transport, and the answers of its undisturbed run."""

    def __init__(
        self, folder: Path, model: Path, transport: Transport, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._patience_s = patience_s
        self.fleet = Fleet(
            folder,
            model,
            "1P2D",
            flags=(*NODE_FLAGS, "--kv-transfer", transport),
            decode_flags=DECODE_FLAGS,
            router_flags=ROUTER_FLAGS,
            new_node=HeldNode,
        )
        for node in self.nodes:
            node.order()
        self.expected: dict[str, list[Answer]] = {}
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
            assert_same(self._run_undisturbed(), self.expected)
        except BaseException as error:
            self.fleet.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.fleet.__exit__(*error)

    # --------------------------------------------------------------------------------------- one cell
    def run(self, cell: Cell) -> Times:
        """Run one cell. Raises AssertionError where the client, or a process, sees anything that is wrong."""
        prefill, primary = self.node("p0"), self._prepare()
        before = {process.name: resources(process) for process in self.fleet.processes}
        incarnations = self._incarnations()
        calls = self._start_held(cell.stage, prefill, primary)
        fault, at = cell.fault, time.monotonic()
        victim: Process | None = None
        match fault:
            case Fault.PREFILL_KILLED | Fault.DECODE_KILLED:
                victim = prefill if fault is Fault.PREFILL_KILLED else primary
                victim.kill()
            case Fault.PREFILL_STOPPED | Fault.DECODE_STOPPED:
                victim = prefill if fault is Fault.PREFILL_STOPPED else primary
                victim.send(signal.SIGSTOP)
            case Fault.PREFILL_STALLED | Fault.DECODE_STALLED:
                stalled = prefill if fault is Fault.PREFILL_STALLED else primary
                stalled.order(stage=cell.stage, stall=True)
                victim = stalled
            case Fault.LINK_LOST:
                primary.order(stage=cell.stage, cut_links=True)
                self._wait_seen(primary, "its links cut")
            case Fault.ROUTER_KILLED:
                self.router.kill()
            case Fault.PARTITION:
                raise AssertionError("this cell is not run")
        for node in self.nodes:
            if node is not victim:
                node.order()
        detected_s = None
        if victim is not None:
            self._until(f"{victim.name} is lost", lambda: victim.name not in self.router.loads())
            detected_s = time.monotonic() - at
        if fault is Fault.ROUTER_KILLED:
            for call in calls.values():
                call.finish()
            self.router.start()
        else:
            self._check_answers(cell.stage, calls)
        self._mend(prefill, primary)
        self._check_incarnations(incarnations, fault)
        self._check_home(before, restarted={victim.name} if victim is not None else {"router"})
        if fault is Fault.ROUTER_KILLED:
            return Times(None, None)
        later = [moment - at for call in calls.values() for moment in call.times if moment > at]
        return Times(detected_s, min(later, default=None))

    @contextlib.contextmanager
    def mended(self) -> Iterator[None]:
        """For the length of a cell: when it fails, the logs are printed, and the fleet is made whole for the next."""
        try:
            yield
        except AssertionError:
            print_logs(*self.fleet.processes)
            self._renew()
            raise

    def find(self, plant: Plant) -> str | None:
        """What the cell of `plant` finds wrong while the fault is planted; None when it finds nothing."""
        planted = [node for node in self.nodes if node.role in plant.roles]
        for node in planted:
            node.plants = (plant.name,)
            node.order()
        for node in planted if plant.at_start else ():
            node.kill()
        self.fleet.mend()
        try:
            self.run(plant.cell)
        except AssertionError as error:
            return str(error)
        finally:
            for node in planted:
                node.plants = ()
            self._renew()
            assert_same(self._run_undisturbed(), self.expected)
        return None

    def _renew(self) -> None:
        """Start every process again, and forget what it has logged."""
        for process in self.fleet.processes:
            process.kill()
        self._log_starts = {process.name: len(process.log) for process in self.fleet.processes}
        for node in self.nodes:
            node.order()
        for process in self.fleet.processes:
            process.start()
        self.fleet.wait_ready()

    def _prepare(self) -> HeldNode:
        """Empty every cache but that of one decode node, which keeps what the prompts have in common."""
        self._wait_home()
        self._until("every pair of nodes has its link", self._is_linked)
        self._until("caches are flushed", self._flush)
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
        num_links = {name: load["num_links"] for name, load in self.router.loads().items()}
        return num_links == {"p0": 2, "d0": 1, "d1": 1}

    def _num_cached(self) -> dict[str, int]:
        return {name: load["num_evictable_pages"] for name, load in self.router.loads().items()}

    def _flush(self) -> bool:
        call = self.router.post("/flush_cache", {}).finish()
        return call.status == 200

    def _start(self) -> dict[str, Call]:
        self._num_runs += 1
        return start_four(self.router, str(self._num_runs))

    def _start_held(self, stage: Stage, prefill: HeldNode, primary: HeldNode) -> dict[str, Call]:
        """Order the nodes to hold requests in `stage`, send all, and wait until they are seen there."""
        observer = primary
        match stage:
            case Stage.PREFILLING:
                prefill.order(stage=stage, count=NUM_SEQS)
                primary.order(count=NUM_SEQS, muster=NUM_SEQS)
                observer = prefill
            case Stage.TRANSFERRING | Stage.ABORTING:
                prefill.order(stage=Stage.TRANSFERRING, count=NUM_SEQS)
                primary.order(stage=Stage.TRANSFERRING, count=NUM_SEQS)
                observer = prefill
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
        assert seen.keys, f"nothing was {stage}"
        aborted = ABORTED if stage is Stage.ABORTING else ()
        assert not any(call.ended for name, call in calls.items() if name not in aborted), "one has ended"
        return calls

    def _check_answers(self, stage: Stage, calls: Mapping[str, Call]) -> None:
        aborted = ABORTED if stage is Stage.ABORTING else ()
        assert_same(
            self._finished({name: call for name, call in calls.items() if name not in aborted}), self.expected
        )
        for name in aborted:
            for answer, right in zip(answers(name, calls[name].finish()), self.expected[name], strict=False):
                assert answer.finish == "abort", name
                assert answer.output_ids == right.output_ids[: len(answer.output_ids)], name

    def _mend(self, *nodes: HeldNode) -> None:
        """Continue what was stopped, and start again what was killed."""
        for node in nodes:
            if node.alive:
                node.send(signal.SIGCONT)
            node.order()
        self.fleet.mend()

    def _check_home(self, before: Mapping[str, Resources], restarted: set[str]) -> None:
        """Everything is given back, no log has anything ugly, and the four requests are served as ever."""
        num_failovers = self._num_failovers()
        assert_same(self._run(), self.expected)
        assert self._num_failovers() == num_failovers, "a request failed over though nothing failed"
        self._wait_home()
        for process in self.fleet.processes:
            process.assert_clean_log(self._log_starts.get(process.name, 0))
            if process.name not in restarted:
                self._until(
                    f"{process.name} has no more than before: {before[process.name]}, {resources(process)}",
                    _is_back(process, before[process.name]),
                )

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

    def _until(self, what: str, holds: Callable[[], T]) -> T:
        """As `patience.until`, with the patience of this matrix."""
        give_up_at = time.monotonic() + self._patience_s
        while not (answer := holds()):
            assert time.monotonic() < give_up_at, f"never: {what}"
            time.sleep(POLL_S)
        return answer

    def _wait_seen(self, node: HeldNode, what: str) -> Sight:
        """Until the latest order of `node` is fulfilled."""
        seen = self._until(f"{node.name} sees {what}", lambda: node.sight)
        assert seen is not None
        return seen

    def _finished(self, calls: Mapping[str, Call]) -> dict[str, list[Answer]]:
        self._until("all calls have ended", lambda: all(call.ended for call in calls.values()))
        return finished(calls)

    def _check_incarnations(self, before: Mapping[str, str], fault: Fault) -> None:
        """A node that was killed is another one now, and every other node is the same process."""
        renewed = {name for name, incarnation in self._incarnations().items() if incarnation != before[name]}
        killed = fault in (Fault.PREFILL_KILLED, Fault.DECODE_KILLED)
        assert len(renewed) == killed, f"{renewed} are new incarnations"

    def _incarnations(self) -> dict[str, str]:
        _, info = self.router.get("/get_server_info")
        return {node["node_id"]: node["incarnation"] for node in info["nodes"]}

    def _num_failovers(self) -> float:
        _, metrics = self.router.get("/metrics")
        return sum(map(float, re.findall(r"num_failovers_total\{.*\} (.*)", metrics)))

    def _run(self) -> dict[str, list[Answer]]:
        return self._finished(self._start())

    def _run_undisturbed(self) -> dict[str, list[Answer]]:
        self._prepare()
        return self._run()


def resources(process: Process) -> Resources:
    """What a process has now."""
    of = Path("/proc") / str(process.pid)
    threads, files = Counter[str](), Counter[str]()
    for task in (of / "task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            threads[(task / "comm").read_text().strip()] += 1
    for descriptor in (of / "fd").iterdir():
        with contextlib.suppress(OSError):
            files[os.readlink(descriptor).partition(":[")[0]] += 1
    return Resources(threads, files)


def _is_back(process: Process, before: Resources) -> Callable[[], bool]:
    def is_back() -> bool:
        now = resources(process)
        return now.threads.total() <= before.threads.total() and now.files.total() <= before.files.total()

    return is_back
