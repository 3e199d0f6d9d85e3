"""`python -m router.demo`: start everything on free ports, stream one completion, show where its time went, stop.

The last line on standard output is one JSON object, for scripts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import uvloop
from rich.console import Console

from router.__main__ import build_parser, router_config
from router.http.config import RouterConfig
from router.one_process import RouterProcess
from router.request.generation import Generation
from router.server import load_model
from router.terminal.stages import stage_table
from router.text.served_model import ServedModel
from shared import log
from shared.errors import ConfigError, RequestError

PROMPT = '''\
class Stack:
    """A last-in, first-out collection."""

    def __init__(self):
        self._items = []

    def push(self, item):
        """Put an item on top."""
        self._items.append(item)

    def pop(self):
        """Take the item from the top."""
        if not self._items:
            raise IndexError("pop from an empty stack")
        return self._items.pop()

    def __len__(self):
'''
MAX_NEW_TOKENS = 48


@dataclass
class Pace:
    """When tokens came, in seconds since the request was sent."""

    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.arrivals[0] if self.arrivals else 0.0

    @property
    def tpot_s(self) -> float:
        """Between two tokens, on average."""
        return (self.arrivals[-1] - self.ttft_s) / max(1, self.num_tokens - 1) if self.arrivals else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; flags are the router's."""
    defaults = ["--port", "0", "--control-port", "0", "--log-level", "warning"]
    args = build_parser().parse_args([*defaults, *(sys.argv[1:] if argv is None else argv)])
    log.setup(args.log_level, "router")
    try:
        config = router_config(args)
        if config.model is None:
            raise ConfigError("the demo starts its own nodes: give --local, not --prefill or --decode")
        return uvloop.run(demo(config, load_model(config.model, config)))
    except (ConfigError, RequestError) as e:
        print(f"demo: error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def demo(config: RouterConfig, model: ServedModel) -> int:
    """One completion, from the start of the nodes to their end."""
    console = Console()
    async with RouterProcess(config, Console(stderr=True), model) as router:
        await router.ready()
        console.print(PROMPT, end="", style="dim", markup=False, highlight=False)
        pace = Pace()
        generation = await _stream(router, console, pace)
        console.print("\n")
        stages = [(stamp.role, stamp.stage, stamp.time) for stamp in generation.timeline]
        req = generation.req
        console.print(stage_table(stages, req.kv_pages_transferred, req.kv_bytes_transferred))
    summary = {
        "text": generation.text,
        "prompt_tokens": generation.req.prompt_len,
        "completion_tokens": len(generation.output_ids),
        "kv_pages_transferred": generation.req.kv_pages_transferred,
        "kv_bytes_transferred": generation.req.kv_bytes_transferred,
        "ttft_s": round(pace.ttft_s, 6),
        "tpot_s": round(pace.tpot_s, 6),
    }
    print(msgspec.json.encode(summary).decode(), flush=True)
    return 0


async def _stream(router: RouterProcess, console: Console, pace: Pace) -> Generation:
    started = asyncio.get_running_loop().time()
    async for generation, text in router.stream(PROMPT, MAX_NEW_TOKENS):
        pace.arrivals.append(asyncio.get_running_loop().time() - started)
        pace.num_tokens = len(generation.output_ids)
        console.print(text, end="", markup=False, highlight=False)
    return generation


if __name__ == "__main__":
    sys.exit(main())
