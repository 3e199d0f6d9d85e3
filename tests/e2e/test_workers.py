"""Two routers on one port over real nodes, and what is started again when it dies."""

from __future__ import annotations

import http.client
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.traffic.reading import read_trace
from planner.traffic.trace import shared_tokens
from tests.patience import PATIENCE_S, until
from tests.processes import HOST, NODE_FLAGS, Call, Router, assert_gone, free_port

pytestmark = pytest.mark.processes

PROMPT = "import os\n\n\nclass Path:\n    def __init__(self, name):\n        "


class TwoRouters(Router):
    """`of(index)` is the port that one router has to itself."""

    def __init__(self, folder: Path) -> None:
        self.first_port, _ = free_port(), free_port()  # the two follow each other
        workers = ("--router-workers", "2", "--prometheus-port", str(self.first_port))
        flags = (*NODE_FLAGS, "--router-timeout-s", "10", "--log-requests")
        super().__init__(folder, *workers, *flags)

    def of(self, index: int) -> Router:
        """To ask one of the two."""
        one = Router(self.log_path.parent, name=f"asked-{index}")
        one.port = self.first_port + index
        return one

    def pid_of(self, name: str) -> int:
        return int(re.findall(rf"_started (?:node|router)={name} pid=(\d+)", self.log)[-1])


@pytest.fixture
def router(tmp_path: Path) -> Iterator[TwoRouters]:
    with TwoRouters(tmp_path) as router:
        router.wait_ready()
        until(lambda: router.log.count("router_is_ready") == 2, "both are ready")
        yield router


def stream(router: Router, **fields: object) -> Call:
    call = router.generate(PROMPT, 1900, stream=True, **fields)
    call.wait_tokens(2)
    return call


def test_what_dies_is_started_again(router: TwoRouters) -> None:
    family = router.family()
    assert len(family) == 5, "a supervisor, two routers, two nodes"
    expected = router.generate(PROMPT, 12).tokens()
    dying, living = stream(router.of(1)), stream(router.of(0))
    os.kill(router.pid_of("1"), signal.SIGKILL)
    until(lambda: dying.ended, "its streams break")
    living.wait_tokens(len(living.token_ids) + 5)
    assert router.generate(PROMPT, 12).tokens() == expected
    until(lambda: router.log.count("router_is_ready router=1") == 2, "it is back")
    assert router.of(1).generate(PROMPT, 12).tokens() == expected
    living.hang_up()
    router.wait_home()  # also what the dead router had, once nodes miss it

    os.kill(router.pid_of("decode-0"), signal.SIGKILL)
    until(lambda: "decode-0 is lost" in router.of(0).get("/health")[1].get("reason", ""), "it is missed")
    for one in (router.of(0), router.of(1)):
        one.wait_healthy()
        assert one.generate(PROMPT, 12).tokens() == expected
    assert router.log.count("node_started node=decode-0") == 2

    check_log(router)
    check_news(router)
    family = router.family()
    router.kill()
    assert_gone(family)
    assert router.log.count("stopped node=") == 2, "the nodes ended in order"


def check_log(router: TwoRouters) -> None:
    """Both routers hash prefixes under one key, also one that was started again, so their log is one trace."""
    for index in (0, 1):
        router.of(index).generate(PROMPT * 8, 12).tokens()
    until(lambda: len(re.findall(r" prompt_lens=1\d\d output_lens=12 ", router.log)) == 2, "both are logged")
    trace = read_trace(router.log_path)
    (*_, last) = requests = list(trace.requests)
    assert not any("keys" in remark for remark in trace.remarks)
    assert shared_tokens(requests[-2:]) == last.input_len // last.block_tokens * last.block_tokens > 0


def check_news(router: TwoRouters) -> None:
    """An abort and a drain through one router reach the other."""
    one, other = router.of(0), router.of(1)
    aborted = stream(other, rid="theirs")
    assert one.post("/abort_request", {"rid": "theirs"}).finish().answer["aborted"] == 0
    aborted.finish()
    assert aborted.last["meta_info"]["finish_reason"]["type"] == "abort", aborted.describe()

    going_on = stream(other)
    removed = http.client.HTTPConnection(HOST, one.port, timeout=PATIENCE_S)
    removed.request("DELETE", "/fleet/nodes/prefill-0?drain_timeout_s=600")
    assert removed.getresponse().status == 200
    removed.close()

    def names() -> set[str]:
        return {node["node_id"] for node in other.get("/fleet")[1]["nodes"]}

    until(lambda: names() == {"decode-0"}, "the other drains it too")
    going_on.wait_tokens(len(going_on.token_ids) + 5)
    going_on.hang_up()
    router.wait_home("decode-0")
