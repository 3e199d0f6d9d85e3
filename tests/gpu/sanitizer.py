"""Small shapes of every kernel under compute-sanitizer: bytes that a kernel may not touch, races in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.device import VARIABLE
from tests.gpu.checks import KERNELS
from tests.gpu.pytest_rows import ROOT
from tests.gpu.rows import Row, Verdict
from tests.gpu.steps import Place, Report, Skipped

TOOLS = ("memcheck", "racecheck")
SMALL = {
    "attention_kernel": "test_against_the_slow_twin and split-edges and D128",
    "merge_kernel": "test_against_the_slow_twin and split-edges and D128",
    "add_norm_kernel": "test_add_norm and 3-1024",
    "gated_mul_kernel": "test_silu_mul and 3-70",
    "rotary_kernel": "test_rotary and 12",
    "norm_rope_write_kernel": "test_norm_rope_write and H5",
    "linear_kernel": "test_linear and 65-33 and bias",
    "row_codes_kernel": "test_codes_of_rows_are_those_of_the_definition and order",
    "quantized_linear_kernel": "test_the_product_is_that_of_the_definition and 4-32 and few",
    "weight_only_kernel": "test_the_product_of_weights_alone and 4-32 and few",
    "grouped_linear_kernel": "test_beside_a_loop_over_experts and bias and 7-8-8",
    "grouped_codes_kernel": "test_quantized_experts_beside_a_loop and int4-zeros and 16",
    "sum_experts_kernel": "test_beside_a_loop_over_experts and bias and 7-8-8",
    "resolve_kernel": "test_writes_enter_before_the_map_is_read and 11-3",
    "top_kernel": "test_every_row_equals_the_twin and normal",
    "octaves_kernel": "test_every_row_equals_the_twin and normal",
    "candidates_kernel": "test_every_row_equals_the_twin and normal",
    "draw_kernel": "test_every_row_equals_the_twin and normal",
    "bias_kernel": "test_biases_masked_tokens_and_a_vocab_mask",
    "vocab_mask_kernel": "test_biases_masked_tokens_and_a_vocab_mask",
    "penalize_kernel": "test_penalties and V300",
    "copy_pages_kernel": "test_the_mover_copies_and_digests and scattered",
}
"""For each kernel, words of pytest's -k: the cases of tests/kernels/triton that run it on a small shape. Each takes a
hundred times as long."""
WORDS = " or ".join(f"({words})" for words in dict.fromkeys(SMALL.values()))
FOUND = 99
CUDA_BIN = Path("/usr/local/cuda/bin")


def run(place: Place, report: Report) -> None:
    """A row for each of its tools. Raises Skipped where there is none."""
    if place.is_dry:
        raise Skipped("needs a GPU")
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:{CUDA_BIN}")
    if sanitizer is None:
        raise Skipped(f"there is no compute-sanitizer on the PATH or in {CUDA_BIN}")
    environment = {
        **os.environ,
        VARIABLE: place.device,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # so that every tensor is an allocation of its own
    }
    pytest = [sys.executable, "-m", "pytest", *KERNELS, "-k", WORDS, "-q", "-o", "filterwarnings=default"]
    commands = {tool: [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *pytest] for tool in TOOLS}

    def run_tool(tool: str) -> Row:
        done = subprocess.run(commands[tool], cwd=ROOT, env=environment, capture_output=True, text=True)
        print(done.stdout, done.stderr)
        return row(tool, done.returncode, done.stdout)

    with ThreadPoolExecutor(len(TOOLS)) as pool:  # at once: most of their time is the host's
        for done in as_completed([pool.submit(run_tool, tool) for tool in TOOLS]):
            report(done.result())


def row(tool: str, code: int, output: str) -> Row:
    """What the tool's exit code and its output say."""
    if "Device not supported" in output or "Unable to" in output:
        lines = [line for line in output.splitlines() if "not supported" in line or "Unable to" in line]
        return Row(what=tool, verdict=Verdict.SKIP, note=f"the tool does not run here: {lines[0]}")
    if code:
        lines = [line for line in output.splitlines() if line.startswith("=========")]
        note = lines[1] if len(lines) > 1 and code == FOUND else f"code {code}"
        return Row(what=tool, verdict=Verdict.FAIL, note=note)
    return Row(what=tool, verdict=Verdict.PASS)
