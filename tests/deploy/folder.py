"""`deploy/`, and the commands that it starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import decode_node.__main__ as decode_node
import prefill_node.__main__ as prefill_node
from router.flags import build_parser
from tests.forked import node_parser

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
HTTP_PORT_OF_NODES = 7080


def parse(command: Sequence[str]) -> argparse.Namespace:
    """The flags of a command line, as the program itself reads them. A wrong one ends the test (SystemExit)."""
    program, *flags = command
    if program == "router":
        return build_parser().parse_args(flags)
    parser = node_parser()
    parser.set_defaults(
        port={"prefill-node": prefill_node.DEFAULT_PORT, "decode-node": decode_node.DEFAULT_PORT}[program]
    )
    return parser.parse_args(flags)
