"""Ten minutes in which nodes are killed, stopped, drained, added again and flipped every few seconds, under load.

No request may fail, and none may have another token than in an undisturbed run. One node of each role is left alone,
since a new request that finds no decode node is refused at once.
"""

from __future__ import annotations

import asyncio
import http.client
import random
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench.stats import percentile
from tests.chaos.fleet_load import Load
from tests.modelzoo import make_model
from tests.patience import until
from tests.processes import HOST, Fleet, Node, print_logs

SECONDS = 600.0
PAUSE_S = 2.0
TOPOLOGY = "2P3D"


def kill(fleet: Fleet, node: Node) -> None:
    """kill -9, and started again."""
    node.kill()
    node.start()


def stop(fleet: Fleet, node: Node) -> None:
    """SIGTERM, which drains it, and started again."""
    assert node.stop() == 0
    node.start()


def freeze(fleet: Fleet, node: Node) -> None:
    """SIGSTOP until the router gives it up, then SIGCONT."""
    node.send(signal.SIGSTOP)
    _until_lost(fleet, node)
    node.send(signal.SIGCONT)


def remove(fleet: Fleet, node: Node) -> None:
    """Drained and removed, and added again."""
    connection = http.client.HTTPConnection(HOST, fleet.router.port)
    connection.request("DELETE", f"/fleet/nodes/{node.name}?drain_timeout_s=60")
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    connection.close()
    added = fleet.router.post("/fleet/nodes", {"role": node.role, "address": node.address}).finish()
    assert added.status == 200, added.answer


def flip(fleet: Fleet, node: Node) -> None:
    """In the other role, and back in its own."""
    for role in ({"prefill": "decode", "decode": "prefill"}[node.role], node.role):
        changed = fleet.router.post(f"/fleet/nodes/{node.name}/role", {"role": role}).finish()
        assert changed.status == 200, changed.answer


ACTIONS: dict[str, Callable[[Fleet, Node], None]] = {
    "killed": kill,
    "stopped": stop,
    "frozen": freeze,
    "removed and added": remove,
    "flipped and back": flip,
}


def run(seconds: float = SECONDS) -> Iterator[dict[str, object]]:
    """Churn for so many seconds, and tell what came of it."""
    with tempfile.TemporaryDirectory(prefix="churn-") as folder:
        yield from _run(Path(folder), seconds)


def _run(folder: Path, seconds: float) -> Iterator[dict[str, object]]:
    rng = random.Random(12)
    model = make_model(folder / "model", "llama")
    flags = ("--page-size", "4", "--router-timeout-s", "10")
    with Fleet(
        folder / "logs", model, TOPOLOGY, flags=flags, router_flags=("--node-timeout-s", "3")
    ) as fleet:
        load, done = Load(fleet.router.url), Counter[str]()

        async def churn() -> None:
            running = asyncio.create_task(load.run(seconds))
            while not running.done():
                await asyncio.sleep(rng.uniform(0.5, 1.5) * PAUSE_S)
                if running.done():
                    break
                name = rng.choice(list(ACTIONS))
                node = rng.choice([n for n in fleet.nodes.values() if n.name not in ("p0", "d0")])
                await asyncio.to_thread(ACTIONS[name], fleet, node)
                done[f"{node.role} node {name}"] += 1
                await asyncio.to_thread(_until_alive, fleet)
            await running

        async def whole() -> None:
            await load.learn()
            await churn()

        asyncio.run(whole())
        fleet.router.wait_home()
        result = {
            "seconds": seconds,
            "requests": load.num_requests,
            "failed": len(load.failed),
            "wrong": len(load.wrong),
            "longest_pause_p50_s": round(percentile(sorted(load.gaps_s), 50), 3),
            "longest_pause_p99_s": round(percentile(sorted(load.gaps_s), 99), 3),
            **done,
            **_counters(fleet),
        }
        yield result
        if load.failed or load.wrong:
            print_logs(*fleet.processes)
        assert not load.failed and not load.wrong, [*load.failed[:5], *load.wrong[:5]]
        fleet.stop()


def _counters(fleet: Fleet) -> dict[str, float]:
    _, metrics = fleet.router.get("/metrics")
    found = re.findall(r'^baton:(num_\w+)_total{(?:cause="(\w+)",)?.*} (\S+)$', metrics, re.MULTILINE)
    return {f"{name} {cause}".strip(): float(value) for name, cause, value in found if float(value)}


def _until_lost(fleet: Fleet, node: Node) -> None:
    until(lambda: node.name not in fleet.router.loads(), f"{node.name} is lost")


def _until_alive(fleet: Fleet) -> None:
    until(lambda: fleet.router.loads().keys() == fleet.nodes.keys(), "every node is alive")
