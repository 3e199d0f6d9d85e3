"""The workers of a router: starts them, starts those again that die, and carries what they say to each other.

A worker that starts again is told what has become of the fleet since the flags were read, and which nodes have
announced themselves lately, so that it serves within moments.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from router.bus.worker_messages import (
    Announced,
    Answer,
    Ask,
    Begin,
    Gone,
    Loaded,
    MemberAdded,
    MemberRemoved,
    NotDone,
    Question,
    Ready,
    ReloadKeys,
    Replies,
)
from router.workers.worker_process import WorkerProcess
from shared.errors import ConfigError
from shared.log import event, warn
from shared.protocol.join_announcer import JOIN_INTERVAL_S
from shared.protocol.messages import Join, NodeToLobby, Role

MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
"""Before a worker is started again; the pause doubles, until one has lived for so long."""
_MAX_KNOWN = 1024


class FleetNow:
    """What has become of the fleet that the flags named."""

    def __init__(self, join: Sequence[tuple[Role, str]]) -> None:
        self._join = {address: role for role, address in join}
        self._turned_away: dict[str, None] = {}
        self._heard: dict[str, tuple[float, Join]] = {}

    def on_lobby(self, message: NodeToLobby) -> None:
        """Remember who has just asked to be dialled."""
        if isinstance(message, Join):
            self._heard.pop(message.node.node_id, None)
            self._heard[message.node.node_id] = time.monotonic(), message
            if len(self._heard) > _MAX_KNOWN:
                del self._heard[next(iter(self._heard))]

    def on_change(self, change: MemberAdded | MemberRemoved) -> None:
        """The operator has changed it."""
        match change:
            case MemberAdded(role, address, incarnation):
                self._join[address] = role
                self._turned_away.pop(incarnation, None)
            case MemberRemoved(address, incarnation):
                self._join.pop(address, None)
                if incarnation:
                    self._turned_away[incarnation] = None

    def begin(self, http_port: int, node_ids: Sequence[str], *, restarted: bool) -> Begin:
        """What a worker is told first."""
        lately = time.monotonic() - 2 * JOIN_INTERVAL_S
        return Begin(
            http_port,
            tuple((role, address) for address, role in self._join.items()),
            tuple(self._turned_away),
            tuple(join for heard_at, join in self._heard.values() if heard_at >= lately),
            tuple(node_ids),
            restarted,
        )


@dataclass(eq=False)
class _Slot:
    """A place for a worker: there is always one in it, or about to be."""

    name: str
    loaded: asyncio.Future[None]
    ready: asyncio.Future[str]
    worker: WorkerProcess | None = None
    keeper: asyncio.Task[None] | None = None


class Workers:
    """`start` them, wait until they are `ready`, and `stop` them."""

    def __init__(
        self,
        num_workers: int,
        flags: Sequence[str],
        *,
        http_port: int,
        join: Sequence[tuple[Role, str]],
        node_ids: Sequence[str],
    ) -> None:
        self._flags = flags
        self._http_port = http_port
        self._node_ids = node_ids
        self._fleet = FleetNow(join)
        self._stopping = asyncio.Event()
        self._relays: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        self._slots = [
            _Slot(str(at), loop.create_future(), loop.create_future()) for at in range(num_workers)
        ]

    # ------------------------------------------------------------------------------------ the parent
    def start(self) -> None:
        """Start all of them."""
        for slot in self._slots:
            slot.keeper = asyncio.create_task(self._keep(slot), name=f"worker {slot.name}")

    async def loaded(self) -> None:
        """Until each has read its files. Raises ConfigError with the words of one that cannot."""
        await asyncio.gather(*(slot.loaded for slot in self._slots))

    async def ready(self) -> str:
        """Until each has seen the fleet; the model's name. Raises ConfigError with the words of one that cannot."""
        names = await asyncio.gather(*(slot.ready for slot in self._slots))
        return names[0]

    async def broken(self) -> None:
        """Until the life of one can no longer be looked after; raises why."""
        keepers = [slot.keeper for slot in self._slots if slot.keeper is not None]
        done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
        for keeper in done:
            keeper.result()

    def on_lobby(self, message: NodeToLobby) -> None:
        """A node announces itself (a `lobby.LobbyListener`)."""
        self._fleet.on_lobby(message)
        self._tell_all(Announced(message))

    def on_gone(self, node_id: str, reason: str) -> None:
        """A local node has ended (a `node_host.GoneListener`)."""
        self._tell_all(Gone(node_id, reason))

    async def ask_one(self, question: Question, timeout_s: float) -> Answer:
        """Ask the first that runs."""
        for worker in self._running():
            try:
                async with asyncio.timeout(timeout_s):
                    return await worker.ask(question)
            except TimeoutError:
                return NotDone(f"worker {worker.name} has not answered within {timeout_s:g} s")
        return NotDone("no worker runs")

    def reload_keys(self) -> None:
        """Have all read the files with keys again."""
        self._tell_all(ReloadKeys())

    async def stop(self, grace_s: float) -> None:
        """SIGTERM for all, SIGKILL for those that are still there after `grace_s`."""
        self._stopping.set()
        keepers = [slot.keeper for slot in self._slots if slot.keeper is not None]
        for worker in self._running():
            worker.signal(signal.SIGTERM)
        if keepers:
            await asyncio.wait(keepers, timeout=grace_s)
        self.kill(f"not stopped within {grace_s:g} s")
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*keepers, *self._relays, return_exceptions=True)

    def kill(self, reason: str) -> None:
        """SIGKILL for all."""
        self._stopping.set()
        for worker in self._running():
            worker.kill(reason)

    # ------------------------------------------------------------------------------------ one worker
    async def _keep(self, slot: _Slot) -> None:
        try:
            await self._keep_alive(slot)
        except Exception as e:
            unmet = [future for future in (slot.loaded, slot.ready) if not future.done()]
            if not unmet:
                raise
            unmet[0].set_exception(e)  # whoever starts them waits for it

    async def _keep_alive(self, slot: _Slot) -> None:
        pause_s, restarted = MIN_PAUSE_S, False
        while not self._stopping.is_set():
            began = time.monotonic()
            slot.worker = worker = await WorkerProcess.spawn(slot.name, self._flags)
            if self._stopping.is_set():
                worker.signal(signal.SIGTERM)  # it came too late for that of all others
            worker.send(self._fleet.begin(self._http_port, self._node_ids, restarted=restarted))
            await worker.run(lambda worker, message: self._on_message(slot, worker, message))
            slot.worker = None
            if self._stopping.is_set():
                event("worker_exited", worker=slot.name, code=worker.process.returncode)
                return
            if not slot.ready.done():
                raise ConfigError(
                    worker.last_words or f"worker {slot.name} {worker.epitaph} before it was ready"
                )
            if time.monotonic() - began > MAX_PAUSE_S:
                pause_s = MIN_PAUSE_S
            warn("worker_exited", worker=slot.name, code=worker.process.returncode, restart_in_s=pause_s)
            restarted = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _on_message(
        self, slot: _Slot, worker: WorkerProcess, message: Loaded | Ready | Ask | MemberAdded | MemberRemoved
    ) -> None:
        match message:
            case Loaded():
                if not slot.loaded.done():
                    slot.loaded.set_result(None)
            case Ready(model_name):
                if not slot.ready.done():
                    slot.ready.set_result(model_name)
                event("worker_ready", worker=slot.name)
            case Ask():
                relay = asyncio.create_task(self._relay(worker, message))
                self._relays.add(relay)
                relay.add_done_callback(self._relays.discard)
            case MemberAdded() | MemberRemoved():
                self._fleet.on_change(message)

    async def _relay(self, asker: WorkerProcess, ask: Ask) -> None:
        """Ask all others at once; who has not answered when the time is up is named."""
        asked = {w.name: asyncio.create_task(w.ask(ask.question)) for w in self._running() if w is not asker}
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=ask.timeout_s)
            answers = {name: answer.result() for name, answer in asked.items() if answer.done()}
            silent = tuple(name for name in asked if name not in answers)
            asker.send(Replies(ask.call_id, answers, silent))
        finally:
            for answer in asked.values():
                answer.cancel()

    def _running(self) -> list[WorkerProcess]:
        return [slot.worker for slot in self._slots if slot.worker is not None]

    def _tell_all(self, message: Announced | Gone | ReloadKeys) -> None:
        for worker in self._running():
            worker.send(message)
