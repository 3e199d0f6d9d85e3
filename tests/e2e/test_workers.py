"""Several router workers over real nodes: a node serves each as a router of its own."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.processes import FLOAT32, Call, Router, assert_gone, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

FLAGS = ("--router-workers", "2", *FLOAT32, "--max-total-tokens", "16384", "--router-timeout-s", "3")
MANY = 40  # connections; that none of them is for one worker has a probability of 2 ** -39
PROMPT = "import os\n\n\nclass Path:\n    def __init__(self, name):\n        "


def requests_of_each(router: Router) -> dict[str, float]:
    """How many sequences each worker has started."""
    _, text = router.get("/metrics")
    return {
        worker: float(count)
        for worker, count in re.findall(
            r'^sglang:num_requests_total{.*worker="(\d)"} (\S+)', text, re.MULTILINE
        )
    }


def worker_pids(router: Router) -> dict[str, int]:
    return {name: int(pid) for name, pid in re.findall(r"worker_started worker=(\d) pid=(\d+)", router.log)}


def test_workers_share_real_nodes_and_die_alone(tmp_path: Path) -> None:
    with Router(tmp_path, *FLAGS) as router:
        router.wait_ready()
        family = router.family()
        assert len(family) == 5, "a parent, two workers, two nodes"
        outputs = [router.generate(PROMPT, 12).tokens() for _ in range(8)]
        assert all(output == outputs[0] for output in outputs)
        before = requests_of_each(router)
        assert set(before) == {"0", "1"} and sum(before.values()) == 9  # with the proof

        streams: list[Call] = []
        while len(streams) < 6 or any(num <= before[at] for at, num in requests_of_each(router).items()):
            assert len(streams) < MANY
            streams.append(router.generate(PROMPT, 1900, stream=True))
            streams[-1].wait_tokens(2)
        os.kill(worker_pids(router)["0"], signal.SIGKILL)
        wait_until("its streams break", lambda: any(stream.ended for stream in streams), 10)
        going_on = [stream for stream in streams if not stream.ended]
        assert going_on, "those of the other worker go on"
        for stream in going_on:
            stream.wait_tokens(len(stream.token_ids) + 5)
            stream.hang_up()
        assert router.generate(PROMPT, 12).tokens() == outputs[0]
        wait_until("it is back", lambda: router.log.count("worker_ready worker=0") == 2, 30)
        router.wait_home(timeout_s=30)  # also what the dead worker had, once nodes miss it
        wait_until("both answer", lambda: set(requests_of_each(router)) == {"0", "1"}, 10)

        family = router.family()
        router.kill()
        assert_gone(family, 20)
        assert router.log.count("stopped node=") == 2, "the nodes ended in order"
