"""What is refused at the start: one line that says why, exit code 2, and nothing left running."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forked import Forked, run_module
from tests.processes import Child, Process, assert_gone

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Refusal:
    """`python -m module flags` must say `words`. TAKEN and EMPTY stand for a port and a path."""

    module: str
    flags: str
    words: str


REFUSALS = {
    "model folder": Refusal("prefill_node", "--port 0 --model EMPTY", "config.json"),
    "model missing": Refusal(
        "router", "--port 0 --control-port 0 --model /no/such/folder", "/no/such/folder"
    ),
    "pool too small": Refusal("decode_node", "--port 0 --max-total-tokens 1", "--max-total-tokens 1"),
    "local pool too small": Refusal(
        "router", "--port 0 --control-port 0 --local 1P1D --max-total-tokens 1", "--max-total-tokens 1"
    ),
    "no GPU to move between, before the model is looked at": Refusal(
        "decode_node",
        "--port 0 --device cpu --kv-transfer nccl --model /no/such/folder",
        "--kv-transfer nccl",
    ),
    "slot too small": Refusal(
        "decode_node", "--port 0 --page-size 64 --kv-slot-bytes 4096", "raise --kv-slot-bytes"
    ),
    "node port taken": Refusal("decode_node", "--port TAKEN", "TAKEN"),
    "HTTP port of a node taken": Refusal("decode_node", "--port 0 --http-port TAKEN", "TAKEN"),
    "HTTP port taken": Refusal("router", "--port TAKEN --control-port 0", "TAKEN"),
    "control port taken": Refusal("router", "--port 0 --control-port TAKEN", "TAKEN"),
    "node without a key": Refusal("prefill_node", "--host 0.0.0.0 --port 0", "--fleet-key"),
    "unknown flag": Refusal("decode_node", "--max-total-token 5", "--max-total-token"),
}


class Refused(Process):
    """A router, or a node, which is forked."""

    def __init__(self, name: str, module: str, argv: list[str], folder: Path) -> None:
        super().__init__(name, module, argv, folder)
        self._module = module

    def _spawn(self) -> Child:
        if self._module == "router":
            return super()._spawn()
        return Forked(self.log_path, run_module, self._module, self.argv[5:])


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Process, str]]]:
    """All of them at once, and the words that each must say."""
    folder = tmp_path_factory.mktemp("flags")
    (folder / "empty").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"TAKEN": str(taken.getsockname()[1]), "EMPTY": str(folder / "empty")}
        processes = {
            name: (
                Refused(
                    name.replace(" ", "-"),
                    refusal.module,
                    [names.get(flag, flag) for flag in refusal.flags.split()],
                    folder,
                ),
                names.get(refusal.words, refusal.words),
            )
            for name, refusal in REFUSALS.items()
        }
        try:
            for process, _ in processes.values():
                process.start()
            yield processes
        finally:
            for process, _ in processes.values():
                process.close()


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_at_the_start(name: str, started: dict[str, tuple[Process, str]]) -> None:
    process, words = started[name]
    assert process.wait() == 2, process.log
    last = process.log.rstrip().splitlines()[-1]
    assert "error: " in last or last.startswith(("prefill-node: ", "decode-node: ")), process.log
    assert words in last
    assert "Traceback" not in process.log
    assert_gone(process.family())
