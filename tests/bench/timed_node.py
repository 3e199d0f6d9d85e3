"""Real prefill and decode nodes whose forwards are a wait: so many nodes run on few cores as a GPU each would need.

Everything but the forward is that of a node: its process, scheduler, connections, links and pages. The pages that
move have no meaning, since no forward has written them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from planner.candidate import Candidate
from planner.cost_model import CostModel
from shared.engine.loop_parts import NodeParts
from shared.engine.node_process import BuildRole, Scheduler, builder_of
from shared.protocol.messages import Role
from tests.bench.timed_stream import VOCAB_SIZE, TimedStream, forward_s
from tests.forked import Forked, run_altered_node
from tests.processes import Child, Fleet, Node

_FORWARDS = re.compile(r"(\d+) forwards took (\S+) s")
"""The last line of a node's log."""


@dataclass(frozen=True, kw_only=True)
class TimedNodes:
    """What the nodes of a fleet are made of."""

    costs: CostModel
    pool_tokens: int = 131_072
    page_size: int = 16
    context_length: int = 16_384
    chunked_prefill_size: int = 512
    max_running_requests: int = 256
    head_dim: int = 32
    """Of the only KV head of the only layer, in float32."""

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V."""
        return 2 * 4 * self.head_dim

    def model_config(self) -> dict[str, object]:
        """A config.json: the smallest model, since it only sizes pages."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.head_dim,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": self.head_dim,
            "intermediate_size": self.head_dim,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": self.context_length,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
        }

    def flags(self, candidate: Candidate) -> list[str]:
        """Of every node of `candidate`."""
        return [
            *("--load-format", "dummy", "--attention-backend", "torch", "--grammar-backend", "none"),
            *("--page-size", str(self.page_size), "--max-total-tokens", str(self.pool_tokens)),
            *("--max-running-requests", str(self.max_running_requests)),
            *("--chunked-prefill-size", str(self.chunked_prefill_size)),
            *(["--enable-mixed-chunk"] if candidate.enable_mixed_chunk else []),
        ]


def router_flags(candidate: Candidate) -> list[str]:
    """Of a router before `candidate`."""
    local = "auto" if candidate.local_prefill_tokens is None else str(candidate.local_prefill_tokens)
    return ["--local-prefill-tokens", local]


class TimedNode(Node):
    """A `prefill-node` or `decode-node` in a process of its own, with its flags."""

    def __init__(self, costs: CostModel, folder: Path, role: str, name: str, *flags: str) -> None:
        super().__init__(folder, role, name, *flags)
        self._costs = costs

    def _spawn(self) -> Child:
        return Forked(self.log_path, run_timed_node, Role(self.role), self.argv[5:], self._costs)

    @property
    def forwards(self) -> tuple[int, float]:
        """How many there were and the seconds that they took, of a node that has ended."""
        num_forwards, busy_s = _FORWARDS.findall(self.log)[-1]
        return int(num_forwards), float(busy_s)


def run_timed_node(role: Role, argv: Sequence[str], costs: CostModel) -> int:
    """As the main function of the role; returns the exit code."""
    stream = TimedStream(partial(forward_s, costs))
    code = run_altered_node(role, argv, partial(_timed_builder_of, stream))
    print(f"{stream.num_forwards} forwards took {stream.busy_s:.6f} s")
    return code


def _timed_builder_of(stream: TimedStream, role: Role) -> BuildRole:
    build_role: Callable[[NodeParts], Scheduler] = builder_of(role)

    def build(parts: NodeParts) -> Scheduler:
        return build_role(replace(parts, engine=replace(parts.engine, stream=stream)))

    return build


@contextmanager
def timed_fleet(nodes: TimedNodes, candidate: Candidate, folder: Path) -> Iterator[Fleet]:
    """The processes of `candidate`, ready to serve."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(nodes.model_config()))
    fleet = Fleet(
        folder,
        model,
        f"{candidate.num_prefill}P{candidate.num_decode}D",
        flags=nodes.flags(candidate),
        router_flags=("--model", str(model), "--skip-tokenizer-init", *router_flags(candidate)),
        new_node=partial(TimedNode, nodes.costs),
    )
    with fleet:
        yield fleet
