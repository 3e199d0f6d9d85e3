"""`python -m tests.deploy.image`: the steps of deploy/Dockerfile for the target cpu, as a script in a fresh folder.

No container engine is needed: a small reading of the Dockerfile maps the folders of the image to a folder here, and
runs what is COPY, RUN, ENV, ARG and WORKDIR. What needs a system of its own (apt-get, users) is left out and said. At
the end the image's command serves one completion, SIGTERM stops it, and the health check has passed meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.deploy.folder import DEPLOY, ROOT
from tests.processes import free_port

FOLDERS = ("/opt/baton", "/src", "/wheels", "/var/cache/baton", "/home/baton")
"""Of the image: all that its steps write to."""
OF_THE_SYSTEM = ("apt-get ", "groupadd ")
START_S = 300.0
IGNORED = ("USER", "EXPOSE", "FROM")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction and its arguments, with continued lines in one."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, rest.strip()


def stages(text: str) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Of each stage by its name: the stage or image before it, and its instructions."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for name, rest in instructions(text):
        if name == "FROM":
            before, _, own = rest.partition(" AS ")
            found[own] = before, []
        else:
            found[own][1].append((name, rest))
    return found


class Build:
    """Runs stages in `root`, which is to the steps what / is in the image."""

    def __init__(self, root: Path, arguments: Mapping[str, str]) -> None:
        self._root = root
        self._arguments = arguments
        self._stages = stages((DEPLOY / "Dockerfile").read_text())
        self._done: set[str] = set()
        self.environment = {
            **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
            "PIP_CONFIG_FILE": os.environ.get("PIP_CONFIG_FILE", str(Path.home() / ".config/pip/pip.conf")),
            "PATH": os.environ["PATH"],
            "HOME": str(root / "home/baton"),
            "LANG": "C.UTF-8",
        }
        """Of the steps: nothing of this process but where pip looks for packages."""
        self.folder = root
        self.command: list[str] = []
        self.health_check: list[str] = []

    def run(self, stage: str) -> None:
        """Run a stage, after the one that it starts from and those that it copies from. Once each."""
        if stage in self._done or stage not in self._stages:
            return
        self._done.add(stage)
        before, steps = self._stages[stage]
        self.run(before)
        for _, rest in steps:
            if copied := re.match(r"--from=(\w+) ", rest):
                self.run(copied[1])
        self.folder = self._root
        for name, rest in steps:
            self._step(name, rest)

    def here(self, text: str) -> str:
        """`text` with the folders of the image as folders here."""
        return re.sub("|".join(map(re.escape, FOLDERS)), lambda found: f"{self._root}{found[0]}", text)

    def _step(self, name: str, rest: str) -> None:
        print(f"{name} {rest[:160]}", flush=True)
        match name:
            case "RUN" if rest.startswith(OF_THE_SYSTEM):
                print("  left out: it changes the system", flush=True)
            case "RUN":
                subprocess.run(
                    ["sh", "-ec", self.here(rest)],
                    cwd=self.folder,
                    env=self.environment,
                    check=True,
                    stdin=subprocess.DEVNULL,
                )
            case "COPY":
                self._copy(rest)
            case "WORKDIR":
                self.folder = Path(self.here(rest))
                self.folder.mkdir(parents=True, exist_ok=True)
            case "ARG":
                key, _, default = rest.partition("=")
                self.environment[key] = self._arguments.get(key, default)
            case "ENV":
                for key, value in re.findall(r"(\w+)=(\S+)", rest):
                    self.environment[key] = os.path.expandvars(
                        self.here(value).replace("$PATH", self.environment["PATH"])
                    )
            case "CMD":
                self.command = json.loads(rest)
            case "HEALTHCHECK":
                self.health_check = json.loads(rest.partition("CMD ")[2])
            case _:
                assert name in IGNORED, f"unknown instruction: {name}"

    def _copy(self, rest: str) -> None:
        words = rest.split()
        if words[0].startswith("--from="):
            return  # all stages share the folder
        *sources, target = words
        for source in sources:
            given, to = ROOT / source, self.folder / target
            if given.is_dir():
                shutil.copytree(given, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(given, to / source if target.endswith("/") else to)


def serve(build: Build) -> None:
    """Start the command of the image, complete a prompt, run the health check, stop. Raises AssertionError."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = build.environment | {"BATON_HEALTH_URL": f"{url}/health"}
    program, *flags = build.command
    program = shutil.which(program, path=environment["PATH"]) or program
    argv = [program, *flags, "--port", str(port), "--host", "127.0.0.1"]
    print(f"CMD {' '.join(argv)}", flush=True)
    router = subprocess.Popen(argv, cwd=build.folder, env=environment, stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while not _is_healthy(build.health_check, environment):
            assert router.poll() is None and time.monotonic() < until, "the image does not serve"
            time.sleep(1.0)
        body = json.dumps({"text": "def add(a, b):", "sampling_params": {"max_new_tokens": 8}}).encode()
        request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=START_S) as response:
            answer = json.load(response)
        assert answer["meta_info"]["completion_tokens"] == 8, answer
        router.send_signal(signal.SIGTERM)
        assert router.wait(START_S) == 0
    finally:
        router.kill()
        router.wait()
    assert [*Path(environment["BATON_CACHE_DIR"]).glob("*.so")], "kernels are built in"


def _is_healthy(check: Sequence[str], environment: Mapping[str, str]) -> bool:
    program = shutil.which(check[0], path=environment["PATH"]) or check[0]
    done = subprocess.run([program, *check[1:]], env=environment, capture_output=True, check=False)
    return done.returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Build and try the target cpu. 0 when everything went well."""
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.image", description=__doc__)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as docker's")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="baton-image-") as folder:
        build = Build(Path(folder), dict(given.split("=", 1) for given in args.build_arg))
        build.run("cpu")
        serve(build)
    print("the steps of deploy/Dockerfile make an image that serves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
