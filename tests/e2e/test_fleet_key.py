"""A fleet with a key serves those who hold it, and tells the others why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.references import Zoo
from tests.modelzoo import reference_greedy
from tests.patience import until
from tests.processes import Fleet, Node, Router

pytestmark = pytest.mark.processes


def test_only_who_holds_the_key_gets_in(zoo: Zoo, tmp_path: Path) -> None:
    folder, ids = zoo.folder("llama"), zoo.prompts("llama")[0]
    keys = {name: tmp_path / name for name in ("ours", "theirs")}
    for name, path in keys.items():
        path.write_text(f"{name}, a secret of more than 16 bytes\n")
    ours, theirs = (("--fleet-key", str(path)) for path in keys.values())
    logs = tmp_path / "logs"
    with Fleet(logs, folder, flags=ours, router_flags=ours) as fleet:
        call = fleet.router.generate(ids, 12, return_timeline=True)
        assert call.tokens() == reference_greedy(folder, ids, 12)
        assert call.last["meta_info"]["kv_pages_transferred"] > 0

        addresses = [part for node in fleet.nodes.values() for part in (f"--{node.role}", node.address)]
        with (
            Router(logs, *addresses, *theirs, name="other-key") as other_key,
            Router(logs, *addresses, name="no-key") as no_key,
        ):
            for router in (other_key, no_key):
                check_shut_out(router)
                assert router.stop() == 0
                router.assert_clean_log()

        # A node with another key does not get in either, although it knows where.
        stranger = Node(logs, "decode", "d9", "--router", f"127.0.0.1:{fleet.router.control_port}", *theirs)
        try:
            stranger.start()
            until(lambda: "listening" in stranger.log, "it listens")
            assert fleet.router.generate(ids, 12).tokens() == reference_greedy(folder, ids, 12)
            assert set(fleet.router.loads()) == {"p0", "d0"}
            assert stranger.stop() == 0
        finally:
            stranger.close()
        fleet.stop()


def check_shut_out(router: Router) -> None:
    """/health and requests say 503, and why."""

    def says_why() -> bool:
        status, health = router.get("/health")
        return status == 503 and "handshake" in health["reason"] and "--fleet-key" in health["reason"]

    until(says_why, "/health names the key")
    assert "--fleet-key" in router.log
    refused = router.generate([5, 6, 7], 4).finish()
    assert refused.status == 503
