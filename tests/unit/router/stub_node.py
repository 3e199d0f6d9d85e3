"""A scripted node as a process, for what starts nodes. STUB_<NODE_ID> tells it to `fail` or to be `stubborn`.

While a file named HOLD is in its folder, a node that starts says nothing. STUB_DELAY_S is the time of a token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from shared.protocol.messages import Join, Leaving, LoadFailed, Loading, NodeLimits, Role
from tests.unit.router.fake_node import FakeNode

HOLD = "hold"
PACKAGES = {Role.PREFILL: "prefill_node", Role.DECODE: "decode_node"}
LIMITS = NodeLimits(context_length=1 << 21, max_total_num_tokens=1 << 21, max_running_requests=8)


def write_packages(folder: Path) -> None:
    """Packages that shadow the real nodes for a router that runs in `folder`."""
    for role, name in PACKAGES.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
        source = f"from tests.unit.router.stub_node import main\n\nmain({role.value!r})\n"
        (folder / name / "__main__.py").write_text(source)


def main(role: str) -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--router", "--node-id", "--port", "--model", "--log-level", "--page-size", "--cpu-cores"):
        parser.add_argument(flag)
    parser.add_argument("--exit-with-parent", action="store_true")
    args = parser.parse_args()
    mode = os.environ.get("STUB_" + args.node_id.upper().replace("-", "_"), "")
    if args.exit_with_parent:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    sys.exit(asyncio.run(run(Role(role), args, mode)))


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(3)


async def run(role: Role, args: argparse.Namespace, mode: str) -> int:
    told = asyncio.Event()
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    with zmq.asyncio.Context.instance().socket(zmq.DEALER) as caller:
        caller.linger = 30_000
        caller.connect(f"tcp://{args.router}")
        return await live(caller, told, role, args, mode)


async def live(
    caller: zmq.asyncio.Socket, told: asyncio.Event, role: Role, args: argparse.Namespace, mode: str
) -> int:
    while Path(HOLD).exists() and not told.is_set():
        await asyncio.sleep(0.01)
    await caller.send(msgspec.msgpack.encode(Loading(args.node_id, role, "weights", 0.5)))
    if mode == "fail":
        await caller.send(msgspec.msgpack.encode(LoadFailed(args.node_id, role, "the weights are gone")))
        await asyncio.sleep(0.2)
        return 1
    async with FakeNode(role, args.node_id, limits=LIMITS, flags={"model": args.model}) as node:
        node.delay_s = float(os.environ.get("STUB_DELAY_S", 0.01))
        while not told.is_set():
            await caller.send(msgspec.msgpack.encode(Join(node.ref, role)))
            try:
                async with asyncio.timeout(0.2):
                    await told.wait()
            except TimeoutError:
                continue
        if node.identities:
            node.send(Leaving("told to"))
    return 0
