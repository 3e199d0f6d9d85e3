"""A node's memory, and the cores of its forwards, seen from outside a service that was started without such flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.cpu_cores import split_cores
from tests.bench.models import Shape, write_random_model
from tests.node_memory import BEYOND_MIB, footprints, nodes_of
from tests.processes import Router

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel tells what is resident"),
]

WIDE = Shape(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    hidden_size=1024,
    num_layers=4,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    intermediate_size=6144,
    tie_word_embeddings=False,
)
"""315 MiB of weights in few layers: a second copy of half of them would be over the bound."""
PROMPT = [3 + i % 500 for i in range(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    write_random_model(folder, WIDE)
    return folder


@pytest.fixture(scope="module")
def router(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    flags = ("--model", str(model), "--max-total-tokens", "8192", "--local-prefill-tokens", "0")
    with Router(tmp_path_factory.mktemp("memory"), *flags) as router:
        yield router.wait_ready()
        assert router.stop() == 0
        router.assert_clean_log()


def test_each_engine_has_its_own_cores(router: Router) -> None:
    """One thread a core, and every other thread wherever there is time for it."""
    _, info = router.get("/get_server_info")
    shares = split_cores(None, 2)
    assert {node["node_id"]: node["flags"]["cpu_cores"] for node in info["nodes"]} == {
        "prefill-0": str(shares[0]),
        "decode-0": str(shares[1]),
    }
    for name, process in nodes_of(router).items():
        pinned = shares[name == "decode-0"].pinned
        allowed = [set(_allowed(process.pid, thread.id)) for thread in process.threads()]
        everywhere = set(process.cpu_affinity())
        assert allowed.count(everywhere) >= 3, "scheduler, control and a link are free"
        assert all(cores == everywhere or cores <= set(pinned) for cores in allowed)
        assert set().union(*(cores for cores in allowed if cores <= set(pinned))) == set(pinned)


def test_a_node_needs_its_weights_its_kv_pool_and_little_more(router: Router, model: Path) -> None:
    router.generate(PROMPT, 8).tokens()
    calls = [router.generate([i, *PROMPT[:200]], 16, sampling={"temperature": 1.0}) for i in range(3, 11)]
    for call in calls:
        call.tokens()
    router.generate(PROMPT[:50], 16, sampling={"regex": "[a-z]{4,20}", "ignore_eos": False}).tokens()
    seen = footprints(router, model)
    assert [node.node for node in seen] == ["decode-0", "prefill-0"]
    for node in seen:
        assert node.weights > 300 and node.kv == 128, node
        assert 0 < node.beyond < BEYOND_MIB, node


def test_no_compiler_is_loaded(router: Router) -> None:
    """Torch imports its own by itself for some operations, and Triton's with it: seconds, and 190 MB."""
    for process in nodes_of(router).values():
        mapped = [Path(file.path).name for file in process.memory_maps()]
        assert "libtorch_cpu.so" in mapped and "libtriton.so" not in mapped


def _allowed(pid: int, thread: int) -> list[int]:
    status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    found = re.search(r"^Cpus_allowed_list:\s+(\S+)$", status, flags=re.M)
    assert found is not None
    ends = [part.split("-") for part in found[1].split(",")]
    return [core for end in ends for core in range(int(end[0]), int(end[-1]) + 1)]
