"""`python -m tests.request_path`: the files and the forms that a chat request passes until its first event.

It starts `router --local 1P1D` with a profile hook in every process, and counts the files in which a function ran
between the request and its first SSE event that does not run in an idle fleet.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.patience import until
from tests.processes import HOST, Router

ROOT = Path(__file__).parents[1]
ROOMS = ("router", "prefill_node", "decode_node", "shared")
SETTLED_S = 2.5
"""Pings, loads and lookups of an idle fleet come each second, announcements of nodes each two."""
HOOK = """
import os, sys, threading, time
folder = os.environ["REQUEST_PATH"]
seen = {}

def profile(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_flags & 1:  # no body of a module or a class
        seen[code.co_filename, code.co_qualname] = None

def watch():
    phase = ""
    while phase != "end":
        time.sleep(0.002)
        now = open(folder + "/phase").read()
        if now != phase:
            names, phase = [" ".join(one) for one in list(seen)], now
            seen.clear()
            with open(f"{folder}/{os.getpid()}.before-{phase}", "w") as out:
                out.write("\\n".join(names))

threading.Thread(target=watch, daemon=True).start()
threading.setprofile(profile)
sys.setprofile(profile)
"""
"""Each process writes down the files of a phase when the next one begins."""


def body(phase: str) -> str:
    """A prompt that no cache has, and that is too long for the decode node to compute it."""
    words = " ".join(f"{phase} {number}" for number in range(100))
    message = {"role": "user", "content": words}
    return json.dumps({"model": "builtin", "messages": [message], "max_tokens": 4, "stream": True})


def functions(folder: Path, phase: str) -> set[tuple[str, str]]:
    """File and name of the project's functions that ran in the phase before `phase`, in any process."""
    lines = {line for path in folder.glob(f"*.before-{phase}") for line in path.read_text().splitlines()}
    split = (line.split(" ", 1) for line in lines)
    return {(os.path.relpath(path, ROOT), name) for path, name in split if path.startswith(f"{ROOT}/")}


def trace(folder: Path) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """The functions of a request, and of an idle fleet."""

    def enter(phase: str) -> None:
        (folder / "new").write_text(phase)
        (folder / "new").replace(folder / "phase")
        time.sleep(0.05)

    (folder / "phase").write_text("start")
    (folder / "sitecustomize.py").write_text(HOOK)
    router = Router(folder, "--local", "1P1D", "--local-prefill-tokens", "16")
    router.environment = {"PYTHONPATH": f"{folder}:{ROOT}", "REQUEST_PATH": str(folder)}
    router.start()
    try:
        router.wait_ready()
        for phase in ("warm", "idle", "request"):
            enter(phase)
            if phase == "idle":
                time.sleep(SETTLED_S)
                continue
            connection = http.client.HTTPConnection(HOST, router.port)
            connection.request("POST", "/v1/chat/completions", body(phase))
            response = connection.getresponse()
            while b'"content"' not in response.readline():
                pass
            enter("first" if phase == "request" else "served")
            response.read()
            connection.close()
        until(lambda: len(list(folder.glob("*.before-first"))) >= 3, "every process has written")
    finally:
        os.killpg(router.pid, signal.SIGTERM)
        try:
            router.wait()
        except subprocess.TimeoutExpired:
            os.killpg(router.pid, signal.SIGKILL)
    return functions(folder, "first"), functions(folder, "request")


def forms() -> list[str]:
    """The classes that the table of ARCHITECTURE.md names, each of which its file has to define."""
    rows = re.findall(r"^\| `(\w+)` \| `(\S+\.py)` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    for name, path in rows:
        assert re.search(rf"^class {name}\b", (ROOT / path).read_text(), re.MULTILINE), (
            f"{path} has no {name}"
        )
    return [name for name, _ in rows]


def main() -> None:
    """Print the files by room, and the numbers of files and forms."""
    with tempfile.TemporaryDirectory() as folder:
        request, idle = trace(Path(folder))
    passed = sorted({path for path, _ in request - idle})
    for room in ROOMS:
        names = [name for name in passed if name.startswith(f"{room}/")]
        print(f"{room}: {len(names)}")
        print("".join(f"  {name}\n" for name in names), end="")
    print(f"{sum(name.startswith(ROOMS) for name in passed)} files, {len(forms())} forms")


if __name__ == "__main__":
    main()
