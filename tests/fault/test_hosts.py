"""Several hosts, as the README starts them: each node has a network namespace with an address of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from router.http.topology import DEFAULT_PORTS
from shared.timeline import Role
from tests.fault.matrix.namespaces import Namespaces, enter, why_no_namespaces
from tests.fault.relay import Relay
from tests.forked import Forked, run_module
from tests.modelzoo import random_prompt, reference_greedy
from tests.patience import until
from tests.processes import NODE_FLAGS, Call, Child, Process, Router

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NUM_NEW = 24
LINK_FLAGS = {
    "gloo": ("--kv-transfer", "gloo"),
    "tcp": ("--kv-transfer", "tcp", "--kv-port", "7300"),
    "tls": ("--kv-transfer", "tcp", "--kv-port", "7300", "--kv-tls"),
}
"""What the nodes are told, by transport."""


class Host(Process):
    """A node on a host of its own, with the commands of the README."""

    def __init__(self, folder: Path, network: Namespaces, role: str, name: str, *flags: str) -> None:
        address = network.address(name)
        self.address = f"{address}:{DEFAULT_PORTS[Role(role)]}"
        argv = ("--host", "0.0.0.0", "--advertise-host", address, *NODE_FLAGS, *flags)
        super().__init__(name, f"{role}_node", argv, folder)
        self._module = f"{role}_node"
        self._namespace = network.name_of(name)

    def _spawn(self) -> Child:
        return Forked(self.log_path, _run_there, self._namespace, self._module, self.argv[5:])


def _run_there(namespace: str, module: str, argv: Sequence[str]) -> int:
    enter(namespace)
    return run_module(module, argv)


@pytest.fixture(scope="module")
def network() -> Iterator[Namespaces]:
    if why_no_namespaces():
        pytest.skip(f"no network namespaces: {why_no_namespaces()}")
    with Namespaces(("p0", "d0", "d1")) as network:
        yield network


@pytest.fixture
def common(tiny_model: Path, tmp_path: Path) -> tuple[str, ...]:
    """The flags of nodes and routers alike."""
    key = tmp_path / "key.txt"
    key.write_text("the secret of these hosts")
    return ("--model", str(tiny_model), "--fleet-key", str(key))


@contextlib.contextmanager
def started(*processes: Process) -> Iterator[None]:
    """They run in the block, and their logs are clean afterwards."""
    try:
        for process in processes:
            process.start()
        yield
        assert [process.stop() for process in reversed(processes)] == [0] * len(processes)
        for process in processes:
            process.assert_clean_log()
    finally:
        for process in processes:
            process.close()


def check(router: Router, model: Path, seed: int) -> Call:
    """One request through both fleets, with the tokens of the model."""
    prompt = random_prompt(300, seed=seed)
    call = router.generate(prompt, NUM_NEW, stream=True, return_timeline=True)
    assert call.tokens() == reference_greedy(model, prompt, NUM_NEW)
    assert call.last["meta_info"]["kv_pages_transferred"] > 0
    return call


def links(router: Router, name: str) -> list[dict[str, Any]]:
    """Those of a node, as /fleet shows them."""
    _, fleet = router.get("/fleet")
    (found,) = [node["load"]["links"] for node in fleet["nodes"] if node["node_id"].startswith(name)]
    return list(found)


@pytest.mark.parametrize("transport", list(LINK_FLAGS))
def test_two_hosts_with_a_key_over_a_slow_network(
    network: Namespaces, common: tuple[str, ...], tiny_model: Path, tmp_path: Path, transport: str
) -> None:
    prefill = Host(tmp_path, network, "prefill", "p0", *common, *LINK_FLAGS[transport])
    decode = Host(tmp_path, network, "decode", "d0", *common, *LINK_FLAGS[transport])
    addresses = ("--prefill", network.address("p0"), "--decode", network.address("d0"))
    router = Router(tmp_path, *addresses, *common)
    with started(prefill, decode, router):
        router.wait_ready(nodes=[prefill, decode])
        check(router, tiny_model, 1)
        (fast,) = links(router, "decode-")
        assert fast["transport"] == transport and fast["gb_s"] > 0

        network.throttle("p0", "80mbit")
        assert prefill.stop() == 0
        prefill.start()
        until(lambda: any(link["peer"] != fast["peer"] for link in links(router, "decode-")), "a new link")
        check(router, tiny_model, 2)
        slow = next(link for link in links(router, "decode-") if link["peer"] != fast["peer"])
        assert 0 < slow["gb_s"] < 0.02, "80 Mbit/s are 0.01 GB/s"
    network.throttle("p0", "10gbit")


def test_a_node_that_comes_back_at_another_address(
    network: Namespaces, common: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    """Its host has vanished, and another one has its name: a stream waits for it and goes on."""
    router = Router(
        tmp_path, "--local", "none", "--control-host", network.own_address, *common[2:],
        "--model", str(tiny_model), "--failover-timeout-s", "200", "--node-timeout-s", "3",
    )  # fmt: skip
    join = ("--router", f"{network.own_address}:{router.control_port}")
    prefill = Host(tmp_path, network, "prefill", "p0", *common, *join, "--node-id", "p0")
    vanishes = Host(tmp_path, network, "decode", "d0", *common, *join, "--node-id", "d")
    comes_back = Host(tmp_path, network, "decode", "d1", *common, *join, "--node-id", "d")
    with started(router, prefill):
        try:
            vanishes.start()
            until(lambda: set(router.loads()) == {"p0", "d"}, "they have joined")
            prompt = random_prompt(40, seed=3)
            call = router.generate(prompt, 400, stream=True)
            call.wait_tokens(5)
            network.cut_off("d0")
            until(lambda: set(router.loads()) == {"p0"}, "it is missed")
            comes_back.start()
            assert call.tokens() == reference_greedy(tiny_model, prompt, 400)
            assert router.loads()["d"]["num_generated_tokens"] > 0
            vanishes.kill()
            network.heal()
            assert comes_back.stop() == 0
        finally:
            network.heal()
            vanishes.close()
            comes_back.close()


def test_delay_and_loss_between_a_router_and_a_node(
    network: Namespaces, common: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    prefill = Host(tmp_path, network, "prefill", "p0", *common)
    decode = Host(tmp_path, network, "decode", "d0", *common)
    target = network.address("d0"), DEFAULT_PORTS[Role.DECODE]
    with Relay(network.own_address, target, delay_s=0.02, stall_s=0.2, stall_every=5) as relay:
        far = f"{network.own_address}:{relay.port}"
        router = Router(tmp_path, "--prefill", network.address("p0"), "--decode", far, *common)
        with started(prefill, decode, router):
            router.wait_ready(nodes=[prefill, decode])
            until(lambda: links(router, "decode-"), "they are linked")
            for seed in (4, 5):
                check(router, tiny_model, seed)
            assert relay.num_stalls > 3, relay.num_pieces
