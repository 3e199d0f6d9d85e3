"""A bad network between a prefill and a decode node: pages pass a relay in front of the decode node's --kv-port."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fault.hosts import KV_PORT, NUM_NEW, Host
from tests.fault.matrix.fleet_nodes import link_flags, make_fleet_key
from tests.fault.matrix.namespaces import Namespaces
from tests.fault.relay import Relay, Weather
from tests.modelzoo import is_decided, random_prompt, reference_greedy
from tests.patience import until
from tests.processes import Router, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

PAGE_FLAGS = ("--page-size", "4", "--kv-slot-bytes", "8192")
"""So a prompt is many chunks."""
ROUTER_FLAGS = ("--local-prefill-tokens", "16")
"""By time to first token, the decode node would prefill when its link is slow."""
NUM_PROMPT = 300


@dataclass
class FarFleet:
    """A prefill and a decode node, and the relay that the pages pass."""

    router: Router
    decode: Host
    relay: Relay
    model: Path
    num_prompts: int = 0

    def ask(self) -> int:
        """A fresh prompt, which gets the tokens of the model. How many pages came from the prefill node."""
        prompt, expected = self.fresh_prompt()
        call = self.router.generate(prompt, NUM_NEW, stream=True, return_timeline=True)
        assert call.tokens() == expected
        return int(call.last["meta_info"].get("kv_pages_transferred", 0))

    def fresh_prompt(self) -> tuple[list[int], list[int]]:
        """It, and its tokens. One of hundreds of prompts has two tokens equally likely, and is passed over."""
        while True:
            self.num_prompts += 1
            prompt = random_prompt(NUM_PROMPT, seed=1000 + self.num_prompts)
            expected = reference_greedy(self.model, prompt, NUM_NEW)
            if is_decided(self.model, prompt, expected):
                return prompt, expected

    def wait_pages(self) -> None:
        """Pages come from the prefill node, over a new link if need be."""
        until(self.ask, "pages are transferred")


@pytest.fixture(scope="module", params=["tcp", "tls"])
def running(
    request: pytest.FixtureRequest,
    network: Namespaces,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[FarFleet]:
    folder = tmp_path_factory.mktemp(f"far-{request.param}")
    common = ("--model", str(tiny_model), *make_fleet_key(folder))
    node_flags = (*common, *PAGE_FLAGS, *link_flags(request.param, KV_PORT))
    prefill = Host(folder, network, "prefill", "p0", *node_flags)
    decode = Host(folder, network, "decode", "d0", *node_flags)
    addresses = ("--prefill", network.address("p0"), "--decode", network.address("d0"))
    router = Router(folder, *addresses, *common, *ROUTER_FLAGS)
    with (
        network.intercepted("p0", "d0", KV_PORT) as listener,
        Relay(listener, (network.address("d0"), KV_PORT)) as relay,
        started(prefill, decode, router),
    ):
        router.wait_ready(nodes=[prefill, decode])
        yield FarFleet(router, decode, relay, tiny_model)


@pytest.fixture
def fleet(running: FarFleet) -> FarFleet:
    """Over a network that is well, and with a link."""
    running.relay.turns(Weather())
    running.wait_pages()
    return running


def test_delay_and_loss(fleet: FarFleet) -> None:
    num_stalls = fleet.relay.num_stalls
    fleet.relay.turns(Weather(delay_s=0.01, stall_s=0.2, stall_every=5))
    while fleet.relay.num_stalls < num_stalls + 5:
        assert fleet.ask() > 0


@pytest.mark.parametrize("reset", [False, True], ids=["ends", "is reset"])
def test_the_connection_ends_in_the_middle_of_a_message(fleet: FarFleet, reset: bool) -> None:
    num_cuts = fleet.relay.num_cuts
    fleet.relay.cut_after(30_000, reset=reset)
    while fleet.relay.num_cuts == num_cuts:
        fleet.ask()
    fleet.wait_pages()


def test_nothing_passes_for_a_while(fleet: FarFleet) -> None:
    """Both kernels still hear from the relay's: neither end is told."""
    num_lost = fleet.decode.log.count(" link_lost ")
    fleet.relay.turns(Weather(held=True))
    fleet.ask()
    assert fleet.decode.log.count(" link_lost ") > num_lost
    until(
        lambda: fleet.router.get("/health")[1]["status"] == "degraded", "its health says that it has no link"
    )
    assert not fleet.ask()
    fleet.relay.turns(Weather())
    fleet.wait_pages()
    fleet.router.wait_healthy()
