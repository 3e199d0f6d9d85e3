"""Several hosts, as the README starts them: each node has a network namespace with an address of its own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from router.topology import DEFAULT_PORTS
from shared.timeline import Role
from tests.fault.hosts import KV_PORT, Host, check, links
from tests.fault.matrix.fleet_nodes import link_flags
from tests.fault.matrix.namespaces import Namespaces
from tests.fault.relay import Relay, Weather
from tests.modelzoo import random_prompt, reference_greedy
from tests.patience import until
from tests.processes import Router, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize("transport", ["gloo", "tls"])
def test_two_hosts_with_a_key_over_a_slow_network(
    network: Namespaces, common: tuple[str, ...], tiny_model: Path, tmp_path: Path, transport: str
) -> None:
    prefill = Host(tmp_path, network, "prefill", "p0", *common, *link_flags(transport, KV_PORT))
    decode = Host(tmp_path, network, "decode", "d0", *common, *link_flags(transport, KV_PORT))
    addresses = ("--prefill", network.address("p0"), "--decode", network.address("d0"))
    router = Router(tmp_path, *addresses, *common)
    with started(prefill, decode, router):
        router.wait_ready(nodes=[prefill, decode])
        check(router, tiny_model, 1)
        (fast,) = links(router, "decode-")
        assert fast["transport"] == transport

        network.throttle("p0", "80mbit")
        assert prefill.stop() == 0
        prefill.start()
        until(lambda: any(link["peer"] != fast["peer"] for link in links(router, "decode-")), "a new link")
        check(router, tiny_model, 2)
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
            network.throttle("d0", "128kbit", burst="4kb")  # so that the stream cannot end before the cut
            prompt = random_prompt(40, seed=3)
            call = router.generate(prompt, 400, stream=True)
            call.wait_tokens(5)
            network.cut_off("d0")
            assert len(call.token_ids) < 400
            until(lambda: set(router.loads()) == {"p0"}, "it is missed")
            comes_back.start()
            assert call.tokens() == reference_greedy(tiny_model, prompt, 400)
            until(lambda: router.loads()["d"]["num_generated_tokens"] > 0, "the stream went on there")
            vanishes.kill()
            network.heal()
            assert comes_back.stop() == 0
        finally:
            network.heal()
            network.throttle("d0", "10gbit")
            vanishes.close()
            comes_back.close()


def test_delay_and_loss_between_a_router_and_a_node(
    network: Namespaces, common: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    prefill = Host(tmp_path, network, "prefill", "p0", *common)
    decode = Host(tmp_path, network, "decode", "d0", *common)
    target = network.address("d0"), DEFAULT_PORTS[Role.DECODE]
    listener = socket.create_server((network.own_address, 0))
    with Relay(listener, target, Weather(delay_s=0.02, stall_s=0.2, stall_every=5)) as relay:
        far = f"{network.own_address}:{relay.port}"
        router = Router(tmp_path, "--prefill", network.address("p0"), "--decode", far, *common)
        with started(prefill, decode, router):
            router.wait_ready(nodes=[prefill, decode])
            until(lambda: links(router, "decode-"), "they are linked")
            for seed in (4, 5):
                check(router, tiny_model, seed)
            assert relay.num_stalls > 3, relay.num_pieces
