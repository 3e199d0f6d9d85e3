"""Which clients are run, and what each of them needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.venvs import Venv

REQUIREMENTS = Path(__file__).parent / "requirements"


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client library or tool.

    `script` lies in scripts/; requirements/`name`.txt is installed into its venv. `version_of` are the packages whose
    versions are shown. For `torch`, `without_dependencies` and `build_environment` see `Venv`.
    """

    name: str
    script: str
    version_of: tuple[str, ...]
    proves: str
    npm: tuple[str, ...] = ()
    """Packages of Node, which are installed beside the venv."""
    torch: bool = False
    without_dependencies: tuple[str, ...] = ()
    build_environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0

    @property
    def venv(self) -> Venv:
        """What it runs in."""
        return Venv(
            name=self.name,
            requirements=REQUIREMENTS / f"{self.name}.txt",
            torch=self.torch,
            without_dependencies=self.without_dependencies,
            build_environment=self.build_environment,
        )


CLIENTS = (
    Client(
        name="openai",
        script="with_openai.py",
        version_of=("openai",),
        proves="sync, async, streams, usage, logprobs, structured outputs, forced tool calls, every error "
        "as its own exception type, time-outs and cancels abort the request",
    ),
    Client(
        name="anthropic",
        script="with_anthropic.py",
        version_of=("anthropic",),
        proves="`/v1/messages`: a loop with two tools, streams, thinking, counted tokens, errors as its own types",
    ),
    Client(
        name="openai-agents",
        script="with_openai_agents.py",
        version_of=("openai-agents", "openai"),
        proves="agents with two tools over `/v1/responses`, its default, streamed too, and over chat completions",
    ),
    Client(
        name="node",
        script="with_node.py",
        version_of=(),
        npm=("openai@7", "ai@7", "@ai-sdk/openai@3", "zod@4"),
        proves="`openai` for Node: `runTools`, `responses`; Vercel's AI SDK: `streamText` with tools and more steps "
        "over `/v1/responses`, its default, and `generateText` over chat completions",
    ),
    Client(
        name="langchain",
        script="with_langchain.py",
        version_of=("langchain-openai", "langchain-core"),
        proves="`ChatOpenAI` and `OpenAI`: invoke, stream, async, `with_structured_output` "
        "by JSON schema and by tool call; `create_agent` with two tools in three turns, over both of OpenAI's APIs",
    ),
    Client(
        name="litellm",
        script="with_litellm.py",
        version_of=("litellm", "openai"),
        proves="chat, text completion, streams, structured output, forced tool calls and errors through `api_base`",
    ),
    Client(
        name="instructor",
        script="with_instructor.py",
        version_of=("instructor", "openai"),
        proves="pydantic models back in JSON schema mode (sync, async, streamed as partial models), "
        "by forced tool calls, and in JSON mode",
    ),
    Client(
        name="sglang-bench",
        script="with_sglang_bench.py",
        version_of=("sglang",),
        without_dependencies=("sglang>=0.5.23,<0.5.24",),
        proves="`bench_serving` without SGLang's engine: native, completions and chat back ends, logprobs, "
        "request rate, shared prefixes; no failed request, token counts as asked",
    ),
    Client(
        name="vllm-bench",
        script="with_vllm_bench.py",
        version_of=("vllm",),
        torch=True,
        without_dependencies=("--no-binary=vllm", "vllm==0.33.0"),
        build_environment={"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.33.0"},
        proves="`vllm bench serve`, built without the engine (`VLLM_TARGET_DEVICE=empty`): completions and chat; "
        "no failed request, token counts as asked",
    ),
    Client(
        name="guidellm",
        script="with_guidellm.py",
        version_of=("guidellm",),
        torch=True,
        proves="chat and completions on synthetic text: concurrent, synchronous and Poisson load; "
        "no failed request, token counts as asked",
    ),
    Client(
        name="aiperf",
        script="with_aiperf.py",
        version_of=("aiperf",),
        proves="chat and completions on synthetic text; no failed request, token counts as asked; "
        "it scrapes the router's metrics",
    ),
    Client(
        name="lm-eval",
        script="with_lm_eval.py",
        version_of=("lm-eval", "transformers"),
        torch=True,
        proves="`local-completions` (echo and logprobs, ids and text) scores and generates as lm-eval's own "
        "`hf` model does with the same weights, and as `/generate` does",
    ),
)
"""In the order in which they run."""
