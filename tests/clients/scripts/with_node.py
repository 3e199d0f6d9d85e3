"""Clients on Node: the checks of node/checks.mjs, each as one of this script's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from checks import Check, check, main

FOLDER = Path(os.environ["BATON_NODE_PACKAGES"])
OUTCOMES: dict[str, str | None] = {}
NAMES = (
    "openai_run_tools",
    "openai_responses",
    "ai_sdk_stream_text_over_responses",
    "ai_sdk_generate_text_over_chat",
)


def run() -> None:
    """All checks, in the folder whose packages they import."""
    script = shutil.copy(Path(__file__).parent / "node" / "checks.mjs", FOLDER)
    done = subprocess.run(["node", script], capture_output=True, text=True, timeout=120)
    print(done.stdout, done.stderr)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    OUTCOMES.update({outcome["name"]: outcome["error"] for outcome in told})


def _check(name: str) -> Check:
    def one() -> None:
        assert name in OUTCOMES, "it did not run"
        assert OUTCOMES[name] is None, OUTCOMES[name]

    one.__name__ = name
    return check(one)


if __name__ == "__main__":
    run()
    for name in NAMES:
        _check(name)
    main()
