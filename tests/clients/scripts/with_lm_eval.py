"""lm-eval's local-completions against its own `hf` model with the same weights: the same scores, sample by sample."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import MODEL, MODEL_FOLDER, URL, check, main, post, run_tool

LM_EVAL = Path(sys.executable).with_name("lm_eval")
TASKS = Path(__file__).with_name("tasks")
TOLERANCE_NATS = 2e-3
"""On the sum of some ten logprobs in float32; the two sum in different orders."""


def samples(model: str, arguments: str, task: str) -> list[dict[str, Any]]:
    """What lm-eval noted for each document of a task, in their order."""
    shutil.copytree(TASKS, ".", dirs_exist_ok=True)  # data_files are relative to where it runs
    out = Path(tempfile.mkdtemp(dir="."))
    run_tool(
        *(str(LM_EVAL), "run", "--model", model, "--model_args", arguments, "--include_path", "."),
        *("--tasks", task, "--output_path", str(out), "--log_samples", "--batch_size", "1"),
        *("--device", "cpu"),
    )
    (file,) = out.rglob("samples_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])


def served(task: str, *options: str) -> list[dict[str, Any]]:
    url = f"{URL}/v1/completions"
    given = (
        f"model={MODEL}",
        f"base_url={url}",
        f"tokenizer={MODEL_FOLDER}",
        "num_concurrent=4",
        "max_length=2048",
    )
    return samples("local-completions", ",".join((*given, *options)), task)


def reference(task: str) -> list[dict[str, Any]]:
    return samples("hf", f"pretrained={MODEL_FOLDER},dtype=float32", task)


def likelihoods(sample: dict[str, Any]) -> list[tuple[float, bool]]:
    """Of each choice: its loglikelihood, and whether greedy decoding would have written it."""
    return [(float(score), str(greedy) == "True") for ((score, greedy),) in sample["resps"]]


@check
def loglikelihoods_are_those_of_transformers() -> None:
    ours, theirs = served("next_line"), reference("next_line")
    assert len(ours) == len(theirs) == 6
    for mine, known in zip(ours, theirs, strict=True):
        for (score, greedy), (true_score, truly_greedy) in zip(
            likelihoods(mine), likelihoods(known), strict=True
        ):
            assert abs(score - true_score) < TOLERANCE_NATS, (mine["doc"], score, true_score)
            assert greedy == truly_greedy, mine["doc"]
        assert mine["acc"] == known["acc"]
    assert sum(sample["acc"] for sample in ours) >= 5, "the model has read Python"


@check
def loglikelihoods_are_those_of_the_native_route() -> None:
    """The score of a choice is the sum of its tokens' input logprobs; lm-eval gives it the context's last space."""
    for sample in served("next_line"):
        for choice, (score, _) in zip(sample["doc"]["choices"], likelihoods(sample), strict=True):
            code = sample["doc"]["code"]
            start = post("/tokenize", {"prompt": code.rstrip(), "add_special_tokens": False})["count"]
            answer = post(
                "/generate",
                {
                    "text": code + choice,
                    "sampling_params": {"max_new_tokens": 0},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                },
            )
            judged = answer["meta_info"]["input_token_logprobs"][start:]
            assert abs(sum(entry[0] for entry in judged) - score) < TOLERANCE_NATS, (code, choice)


@check
def prompts_as_text_score_the_same() -> None:
    by_ids, by_text = served("next_line"), served("next_line", "tokenized_requests=False")
    for one, other in zip(by_ids, by_text, strict=True):
        for (score, _), (again, _) in zip(likelihoods(one), likelihoods(other), strict=True):
            assert abs(score - again) < TOLERANCE_NATS


@check
def greedy_generation_is_that_of_transformers() -> None:
    ours, theirs = served("rest_of_line"), reference("rest_of_line")
    texts = [sample["resps"][0][0] for sample in ours]
    assert texts == [sample["resps"][0][0] for sample in theirs]
    assert any(texts), "some text came"


if __name__ == "__main__":
    os.environ.setdefault("OPENAI_API_KEY", "none")
    main()
