"""A router whose model calls tools: its nodes are the stubs of the tests, which say what models have written.

python -m tests.clients.scripted     prints HOST:PORT of a prefill and of a decode node, and serves until its end
"""

from __future__ import annotations

import asyncio
import json

from shared.protocol.messages import Decode, Finish, NodeLimits, Prefill, Role
from tests.unit.router.fake_node import FakeNode, byte_level_tokenizer

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function | tojson }}]{% endfor %}{# <tool_call> <think> #}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
LIMITS = NodeLimits(context_length=16_384, max_total_num_tokens=65_536, max_running_requests=8)


def call(name: str, /, **arguments: object) -> str:
    """A call, as Qwen's models write it."""
    return (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
    )


REPLIES = {
    "(2 + 3) * 4": (
        f"<think>\nI add first.\n</think>\n\n{call('add', a=2, b=3)}",
        f"<think>\nNow the product.\n</think>\n\nThe sum is 5.\n{call('multiply', a=5, b=4)}",
        "It is 20.",
    ),
    "Rome and Oslo": (
        f"{call('weather', city='Rome')}\n{call('weather', city='Zürich {}')}",
        "Rome is warm, Zürich is cold.",
    ),
    "Ann is 7": (call("Person", name="Ann", age=7), "Ann is seven."),
    "Ann and Bob": (
        f"{call('Person', name='Ann', age=7)}\n{call('Person', name='Bob', age=8)}",
        "Two persons.",
    ),
    "": ("Hello from the script.",),
}
"""What a question contains, and what the model says to it: first, behind a tool's answer, behind two, .."""


def reply(prompt: str) -> str:
    """What the model says behind this prompt."""
    question, _, since = prompt.rpartition("<user>")[2].partition("<assistant>")
    turn = since.count("<tool>")
    if "Rome and Oslo" in question or "Ann and Bob" in question:
        turn = min(turn, 1)
    said = next(texts for part, texts in REPLIES.items() if part in question)
    return said[min(turn, len(said) - 1)]


async def say(node: FakeNode, message: Prefill | Decode) -> None:
    """The reply token by token, of which the prefill node says the first."""
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode(reply(tokenizer.decode(list(message.work.input_ids)))).ids
    for position in range(1 if isinstance(message, Prefill) else len(ids)):
        is_last = position == len(ids) - 1 and isinstance(message, Decode)
        node.tokens(message.key, position, ids[position : position + 1], Finish("stop") if is_last else None)
        await asyncio.sleep(0)


async def main() -> None:
    """Serve until the process is ended."""
    async with (
        FakeNode(Role.PREFILL, script=say, limits=LIMITS) as prefill,
        FakeNode(Role.DECODE, script=say, limits=LIMITS) as decode,
    ):
        print(*(node.address.removeprefix("tcp://") for node in (prefill, decode)), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
