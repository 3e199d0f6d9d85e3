"""Starting, joining, leaving and ending, as an operator does it: exit codes, logs, and nothing left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.patience import until
from tests.processes import NODE_FLAGS, Call, Node, Router, assert_gone

pytestmark = pytest.mark.processes

SMALL = (*NODE_FLAGS, "--max-total-tokens", "4096")
PROMPT = "import os\n\n\nclass Path:\n    def __init__(self, name):\n        "


def expect_end(call: Call, words: str) -> None:
    """A stream that was under way when its service ended."""
    call.finish()
    assert call.saw_done and call.error is not None and words in call.error, call.describe()


def test_local_2p2d_ends_in_order_on_sigterm(tmp_path: Path) -> None:
    with Router(tmp_path, "--local", "2P2D", "--drain-timeout-s", "0.5", *SMALL) as router:
        router.wait_ready()
        family = router.family()
        assert len(family) == 6, "the supervisor, a router, four nodes"
        calls = [router.generate(PROMPT, 12, return_timeline=True) for _ in range(4)]
        outputs = [call.tokens() for call in calls]
        assert all(output == outputs[0] for output in outputs)
        moved = [call.last["meta_info"]["kv_pages_transferred"] for call in calls]
        assert moved[0] > 0 < moved[1], moved
        router.wait_home()
        assert all(load["num_generated_tokens"] > 0 for load in router.loads().values())
        under_way = router.generate(PROMPT, 1900, stream=True)
        under_way.wait_tokens(3)

        assert router.stop(signal.SIGTERM) == 0
        expect_end(under_way, "shutting down")
        router.assert_clean_log()
        assert_gone(family)
        assert f"Serving builtin at {router.url}" in router.log
        assert "curl" in router.log
        assert router.log.count("stopped node=") == 4


def test_ctrl_c_while_nodes_load(tmp_path: Path) -> None:
    with Router(tmp_path, *SMALL) as router:
        until(lambda: router.log.count("node_started") == 2, "the nodes are started")
        assert router.stop(signal.SIGINT) == 0
        router.assert_clean_log()


def test_nodes_join_leave_and_come_back(tmp_path: Path) -> None:
    """Nodes that were told of a router find it, whoever starts first, and a router that was restarted finds them."""
    with Router(
        tmp_path, "--local", "none", "--failover-timeout-s", "1", "--local-prefill-tokens", "0"
    ) as router:  # d0 keeps the prompt
        flags = ("--router", f"127.0.0.1:{router.control_port}", "--drain-timeout-s", "0.5", *SMALL)
        prefill, decode = (Node(tmp_path, role, f"{role[0]}0", *flags) for role in ("prefill", "decode"))
        try:
            prefill.start()
            decode.start()
            router.wait_ready()
            until(lambda: set(router.loads()) == {"p0", "d0"}, "both have joined")
            expected = check_split(router)

            under_way = router.generate(PROMPT, 1900, stream=True)
            under_way.wait_tokens(3)
            assert decode.stop(signal.SIGTERM) == 0
            expect_end(under_way, "d0")
            status, health = router.get("/health")
            assert status == 503 and health["status"] == "unavailable"
            decode.start()
            router.wait_ready()
            assert check_split(router) == expected

            assert router.stop(signal.SIGINT) == 0
            router.start()  # another incarnation, on the same ports
            router.wait_ready()
            until(lambda: set(router.loads()) == {"p0", "d0"}, "both have joined")
            assert check_split(router) == expected

            assert prefill.stop(signal.SIGINT) == 0
            until(lambda: set(router.loads()) == {"d0"}, "p0 has left")
            assert router.generate(PROMPT, 12).tokens() == expected
            assert decode.stop(signal.SIGINT) == 0
            assert router.stop(signal.SIGTERM) == 0
            for process in (router, prefill, decode):
                process.assert_clean_log()
        finally:
            for node in (prefill, decode):
                print(node.log[-3000:])
                node.close()


def test_nodes_are_discovered_by_name(tmp_path: Path) -> None:
    """Of a router that is started again after its nodes, each worker is told what was discovered before it lived."""
    nodes = [Node(tmp_path, role, f"{role[0]}0", *SMALL) for role in ("prefill", "decode")]
    names = (f"dns:localhost:{node.port}" for node in nodes)
    flags = [part for name in names for part in ("--discovery", name)]
    with Router(tmp_path, *flags, "--router-workers", "2", "--local-prefill-tokens", "0") as router:
        try:
            for node in nodes:
                node.start()
            router.wait_ready(nodes=nodes)
            expected = check_split(router)
            worker = next(p for p in router.family() if "router.processes.router_process" in p.cmdline())
            worker.kill()
            until(lambda: router.log.count("router_listening") == 3, "it is started again")
            router.wait_ready(nodes=nodes)
            assert all(router.generate(PROMPT, 12).tokens() == expected for _ in range(4))
            assert router.stop(signal.SIGTERM) == 0
            assert [node.stop(signal.SIGTERM) for node in nodes] == [0, 0]
            for node in nodes:
                node.assert_clean_log()
        finally:
            for node in nodes:
                node.close()


def check_split(router: Router) -> list[int]:
    """One request, through both fleets."""
    assert router.get("/health_generate")[0] == 200
    call = router.generate(PROMPT, 12, return_timeline=True)
    tokens = call.tokens()
    assert {stamp["role"] for stamp in call.last["meta_info"]["timeline"]} == {"router", "prefill", "decode"}
    return tokens
