"""`router --autoscale` with real processes: load makes a command start a node, which joins and serves."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.patience import until
from tests.processes import NODE_FLAGS, Router, assert_gone
from tests.sim.test_autoscaler import PROFILE

pytestmark = pytest.mark.processes

SMALL = (*NODE_FLAGS, "--max-total-tokens", "4096")
COMMAND = """#!/bin/bash
[ "$*" = "add decode 1" ] || exit 1
cd {root}
{python} -m decode_node --router $BATON_CONTROL_ADDRESS --port 0 --node-id added {flags} > {folder}/added.log 2>&1 &
echo $! > {folder}/pid
"""


def test_load_makes_the_command_start_a_node(tmp_path: Path) -> None:
    """By this profile a node computes ten prompt tokens a second, so that a few short prompts are too many."""
    slow = msgspec.structs.replace(PROFILE, forward=replace(PROFILE.forward, b=0.1))
    slow.save(tmp_path / "profile.json")
    command = tmp_path / "command"
    command.write_text(
        COMMAND.format(root=os.getcwd(), python=sys.executable, flags=" ".join(SMALL), folder=tmp_path)
    )
    command.chmod(0o755)
    scaled = ("--autoscale", "decode=1..2", "--plan-profile", str(tmp_path / "profile.json"))
    slo = ("--slo-ttft-ms", "10000", "--slo-itl-ms", "50")
    pace = ("--autoscale-settle-s", "1", "--autoscale-interval-s", "0.5", "--autoscale-command", str(command))
    pid = tmp_path / "pid"
    with Router(tmp_path, "--local", "0P1D", *scaled, *slo, *pace, *SMALL) as router:
        router.wait_ready()
        assert len(router.family()) == 4, "the supervisor, a router, a node and the autoscaler; none advises"
        try:
            until(lambda: generate(router) and pid.exists(), "the command has run")
            until(lambda: set(router.loads()) == {"decode-0", "added"}, "the node has joined")
            until(lambda: generate(router) and router.loads()["added"]["num_generated_tokens"], "it serves")
            assert "autoscale_add role=decode num_nodes=1" in router.log
            assert router.log.count("autoscale_add") == 1
            assert router.stop(signal.SIGTERM) == 0
            router.assert_clean_log()
        finally:
            if pid.exists() and psutil.pid_exists(int(pid.read_text())):
                added = psutil.Process(int(pid.read_text()))
                added.kill()
                assert_gone([added])


_numbers = itertools.count(1)


def generate(router: Router) -> bool:
    """Two requests beside each other, of which one alone would always go to the first node. No prompt is cached."""
    calls = [router.generate([next(_numbers) % 250, *range(1, 60)], 8) for _ in range(2)]
    return all(len(call.tokens()) == 8 for call in calls)
