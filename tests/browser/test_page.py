"""The page in a real browser, before scripted nodes."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import msgspec
from playwright.async_api import Browser

from router.config import HttpOptions
from shared.protocol.messages import (
    Cancel,
    Decode,
    Failed,
    Finish,
    LinkReport,
    Load,
    NodeLimits,
    Prefill,
    ReqReport,
    Stamp,
)
from tests.browser.conftest import PHONE, opened
from tests.unit.router.fake_node import STORY, FakeNode, Script, byte_level_tokenizer, one_then_nothing
from tests.unit.router.fakes import pair, write_model
from tests.unit.router.test_chat_tools import ARGUMENTS, AUTO, HERMES, TOOLS

LOAD = Load(num_running=3, num_pages=100, num_free_pages=50, num_evictable_pages=30, num_held_pages=20)


def story(num_tokens: int) -> str:
    tokenizer = byte_level_tokenizer()
    return tokenizer.decode(tokenizer.encode(STORY).ids[:num_tokens])


def saying(text: str) -> Script:
    """A script that tells `text`, whatever was asked."""

    async def script(node: FakeNode, message: Prefill | Decode) -> None:
        ids = byte_level_tokenizer().encode(text).ids
        if isinstance(message, Prefill):
            node.tokens(message.key, 0, ids[:1])
        else:
            node.tokens(message.key, 0, ids, Finish("stop"))

    return script


def stamps(role: str, *stages: str) -> tuple[Stamp, ...]:
    return tuple(Stamp(role, stage, time.time()) for stage in stages)


async def test_it_loads_alone_and_shows_both_fleets(browser: Browser, model_folder: Path) -> None:
    async with pair() as (prefill, decode):
        far = LinkReport("prefill-0#1", True, "gloo", {"shm": "the nodes are not on one host"})
        decode.load = msgspec.structs.replace(LOAD, num_links=1, links=(far,))
        async with opened(browser, model_folder, [prefill, decode]) as site:
            await site.shows("#service", "serving")
            assert await site.text("#model") == "tiny"
            await site.shows(".fleet.prefill .node[data-state=live]", "prefill-0")
            await site.shows(".fleet.decode .node", "100 KV pages: 20 held, 30 cached, 50 free")
            words = "1 gloo; not shm: the nodes are not on one host"
            await site.shows(".fleet.decode .links-words", words)
            bar = ".fleet.decode .pages span"
            assert await site.page.locator(bar).evaluate_all("all => all.map(e => e.style.flexGrow)") == [
                *("20", "30", "50")
            ]
            await site.page.locator("#chart-list path.line[d^=M]").first.wait_for(state="attached")
            label = await site.page.locator("#chart-list svg").first.get_attribute("aria-label")
            assert label is not None and label.startswith("Output tokens in tokens/s: all 0")
            assert site.complaints == []
            assert {"/", "/page/page.js", "/page/page.css", "/live"} <= {
                url.removeprefix(site.router.url) for url in site.urls
            }


async def test_the_timeline_is_drawn_as_it_happens(browser: Browser, model_folder: Path) -> None:
    go_on = asyncio.Event()

    async def prefill_part(node: FakeNode, message: Prefill | Decode) -> None:
        queued = Stamp("prefill", "queued", time.time() - 2)
        report = ReqReport(stamps=(queued, *stamps("prefill", "prefilling", "transferring")))
        node.tokens(message.key, 0, node.story[:1], report=report)

    async def decode_part(node: FakeNode, message: Prefill | Decode) -> None:
        await go_on.wait()
        queued = Stamp("decode", "queued", time.time() - 2)
        arrived = (queued, *stamps("decode", "transferring", "decoding"))
        waited = ReqReport(stamps=arrived)
        node.tokens(message.key, 0, node.story[:1], report=waited)
        node.tokens(message.key, 1, node.story[1:2])
        go_on.clear()
        await go_on.wait()
        told = msgspec.structs.replace(
            waited,
            stamps=arrived + stamps("decode", "finished"),
            kv_pages_transferred=3,
            kv_bytes_transferred=3000,
        )
        node.tokens(message.key, 2, node.story[2:9], Finish("length"), told)

    async with (
        pair(prefill=prefill_part, decode=decode_part) as (prefill, decode),
        opened(browser, model_folder, [prefill, decode]) as site,
    ):
        await site.page.fill("#prompt", "tell me")
        await site.page.click("#run")
        await site.shows("#output", story(1))
        drawn = site.page.locator("#lanes .segment")
        await site.page.locator(".segment.transferring").first.wait_for()
        assert await site.page.locator(".segment.decoding").count() == 0
        go_on.set()
        await site.page.locator(".segment.decoding").wait_for()
        assert await site.text("#run-status") == "Running …"
        go_on.set()
        await site.shows("#run-status", "Done: max tokens reached. 9 tokens")
        assert await site.text("#output") == story(9)
        classes = await drawn.evaluate_all("all => all.map(e => e.className.replace('segment ', ''))")
        assert classes == [
            *("queued", "streaming"),
            *("queued", "prefilling", "transferring"),
            *("queued", "transferring", "decoding"),
        ]
        await site.shows("#timeline-words", "3 KV pages moved, 3.0 kB")
        assert "Slow because of reservation (decode-0): 2.00 s" in await site.text("#timeline-words")
        assert await site.text("#figure-tokens") == "9"
        assert (await site.text("#figure-ttft")).endswith("s")
        await site.page.click("summary")
        assert await site.page.locator("#timeline-rows tr").count() == len(classes)
        assert site.complaints == []


async def test_a_node_goes_down_and_comes_back(browser: Browser, model_folder: Path) -> None:
    async with pair() as (prefill, decode), opened(browser, model_folder, [prefill, decode]) as site:
        await site.shows(".node[data-state=live]", "decode-0")
        await decode.stop()
        await site.shows(".node[data-state=gone]", "decode-0")
        await site.shows("#service", "unavailable")
        assert "decode-0 is gone" in await site.page.locator("#fleet-news").text_content()  # type: ignore[operator]
        await site.page.fill("#prompt", "hello")
        await site.page.click("#run")
        await site.shows("#run-error", "decode-0")
        decode.start(decode.port, incarnation="b")
        await site.shows(".node[data-state=live]", "decode-0")
        await site.shows("#service", "serving")


async def test_nodes_of_a_router_that_is_gone_are_not_shown_as_live(
    browser: Browser, model_folder: Path
) -> None:
    async with pair() as nodes, opened(browser, model_folder, list(nodes)) as site:
        await site.shows(".fleet.decode .node[data-state=live]", "decode-0")
        await site.page.locator("#chart-list path.line[d^=M]").first.wait_for(state="attached")
        await site.router.stop_serving()
        await site.shows(".fleet.decode .node[data-state=unknown]", "decode-0")
        assert await site.page.locator(".node[data-state=live]").count() == 0
        fleets = await site.text("#fleet-list")
        assert "live" not in fleets and "KV pages" not in fleets
        assert "last samples" in await site.text("#charts-note")


async def test_what_a_lane_is_empty_for(browser: Browser, model_folder: Path) -> None:
    async def first_then_out(node: FakeNode, message: Prefill | Decode) -> None:
        if isinstance(message, Prefill):
            report = ReqReport(stamps=stamps("prefill", "queued", "prefilling"))
            node.tokens(message.key, 0, node.story[:1], report=report)
        else:
            await asyncio.sleep(0.2)
            node.send(Failed(message.key, 500, "the node is out of sorts"))

    async with (
        pair(prefill=first_then_out, decode=first_then_out) as (prefill, decode),
        opened(browser, model_folder, [prefill, decode]) as site,
    ):
        await site.page.fill("#prompt", "tell me")
        await site.page.click("#run")
        await site.shows("#run-error", "out of sorts")
        lanes = await site.text("#lanes")
        assert "no stage was reported" in lanes and "one token was enough" not in lanes


async def test_everything_is_done_by_keyboard(browser: Browser, model_folder: Path) -> None:
    async with (
        pair(prefill=one_then_nothing, decode=one_then_nothing) as (prefill, decode),
        opened(browser, model_folder, [prefill, decode]) as site,
    ):
        await site.shows("#service", "serving")
        keyboard, focused = site.page.keyboard, []
        for _ in range(9):
            await keyboard.press("Tab")
            focused.append(await site.page.evaluate("document.activeElement.id"))
        form = ["prompt", "max-tokens", "temperature", "top-p", "seed", "stop"]
        assert focused == ["key-toggle", "theme", "tab-completion", *form]
        await site.page.focus("#tab-completion")
        await keyboard.press("ArrowRight")
        assert await site.page.evaluate("document.activeElement.id") == "tab-chat"
        await keyboard.press("ArrowLeft")
        await keyboard.press("Tab")
        await keyboard.type("tell me")
        await keyboard.press("Enter")  # a new line
        await keyboard.press("Control+Enter")
        await site.shows("#output", story(1))
        assert list(decode.all(Decode)[0].work.input_ids) == byte_level_tokenizer().encode("tell me\n").ids
        await keyboard.press("Escape")
        await site.shows("#run-status", "Stopped. 1 token in")
        await decode.wait_for(Cancel)
        assert await site.page.locator("#run").is_enabled()
        assert site.complaints == []


async def test_a_conversation(browser: Browser, model_folder: Path) -> None:
    async with (
        pair(prefill=saying("Hi there"), decode=saying("Hi there")) as (prefill, decode),
        opened(browser, model_folder, [prefill, decode]) as site,
    ):
        await site.page.locator("#tab-chat[aria-disabled=false]").click()
        for turn in (1, 2):
            await site.page.fill("#prompt", "hello")
            await site.page.keyboard.press("Enter")
            await site.page.locator(".turn.assistant").nth(turn - 1).filter(has_text="Hi there").wait_for()
            await site.shows("#run-status", "Done")
        prompt = "<|user|>hello<|assistant|>Hi there<|user|>hello<|assistant|>"
        assert list(decode.all(Decode)[1].work.input_ids) == byte_level_tokenizer().encode(prompt).ids
        await site.page.click("#new-chat")
        assert await site.page.locator(".turn").count() == 0


async def test_reasoning_is_folded_and_calls_are_answered_by_hand(browser: Browser, tmp_path: Path) -> None:
    async def turns(node: FakeNode, message: Prefill | Decode) -> None:
        prompt = byte_level_tokenizer().decode(list(message.work.input_ids))
        await saying("It is <b>warm</b>." if "<tool>" in prompt else AUTO)(node, message)

    folder = write_model(tmp_path, chat_template=HERMES, context_length=2048)
    limits = NodeLimits(context_length=2048, max_total_num_tokens=4096, max_running_requests=8)
    async with pair(prefill=turns, decode=turns) as (prefill, decode):
        prefill.limits = decode.limits = limits
        async with opened(browser, folder, [prefill, decode]) as site:
            await site.page.locator("#tab-chat[aria-disabled=false]").click()
            await site.page.fill("#max-tokens", "300")
            await site.page.fill("#tools", "{")
            await site.page.fill("#prompt", "Warm?")
            await site.page.keyboard.press("Enter")
            assert not await site.page.locator("#tools").evaluate("field => field.checkValidity()")
            await site.page.fill("#tools", json.dumps(TOOLS))
            await site.page.focus("#prompt")
            await site.page.keyboard.press("Enter")
            await site.shows("#run-status", "the model calls a tool")
            reply = site.page.locator(".turn.assistant").first
            assert await reply.locator("details.reasoning").get_attribute("open") is None
            assert await reply.locator("details .turn-text").text_content() == "hm"
            assert await reply.locator(".turn-body > .turn-text").text_content() == "I look."
            assert await reply.locator(".call-name").text_content() == "weather"
            assert await reply.locator(".arguments").text_content() == ARGUMENTS
            await site.page.click("#run")
            await site.shows("#run-status", "Answer the call first.")
            await reply.locator("textarea").fill("21 °C")
            await site.page.click("#run")
            await site.shows(".turn.assistant >> nth=1", "It is <b>warm</b>.")
            prompt = byte_level_tokenizer().decode(list(decode.all(Decode)[-1].work.input_ids))
            assert prompt.endswith(f"I look.(weather {ARGUMENTS})<tool>21 °C<assistant>")
            assert await reply.locator("textarea").get_attribute("readonly") is not None
            assert site.complaints == []


async def test_chat_is_off_without_a_template(browser: Browser, tmp_path: Path) -> None:
    folder = write_model(tmp_path, chat_template=None)
    async with pair() as nodes, opened(browser, folder, list(nodes)) as site:
        await site.shows("#chat-note", "this model has no chat template")
        await site.page.click("#tab-chat", force=True)
        assert await site.page.get_attribute("#tab-completion", "aria-selected") == "true"


async def test_themes(browser: Browser, model_folder: Path) -> None:
    async with (
        pair() as nodes,
        opened(browser, model_folder, list(nodes), color_scheme="dark") as site,
    ):

        async def is_dark() -> bool:
            color = await site.page.evaluate("getComputedStyle(document.body).backgroundColor")
            return sum(int(part) for part in color.removeprefix("rgb(").rstrip(")").split(",")) < 200

        assert await is_dark()
        assert await site.text("#theme") == "Light"
        await site.page.click("#theme")
        assert not await is_dark()
        await site.page.reload()
        assert not await is_dark(), "the choice is remembered"
        await site.page.click("#theme")
        assert await is_dark()


async def test_a_phone_never_scrolls_sideways(browser: Browser, model_folder: Path) -> None:
    long = "x" * 60 + " word" * 10

    async with pair(prefill=saying(long), decode=saying(long)) as (prefill, decode):
        decode.load = LOAD
        async with opened(browser, model_folder, [prefill, decode], size=PHONE) as site:
            await site.shows(".node", "100 KV pages")
            assert not await site.overflows()
            await site.page.fill("#prompt", "y" * 60)
            await site.page.click("#run")
            await site.shows("#run-status", "Done")
            await site.page.click("summary")
            await site.page.click("#key-toggle")
            await decode.stop()
            await site.shows(".node[data-state=gone]", "decode-0")
            assert not await site.overflows()


async def test_a_key_is_asked_for_and_kept_in_the_tab_only(browser: Browser, model_folder: Path) -> None:
    http = HttpOptions(port=0, served_model_name="tiny", api_keys=("secret",))
    async with pair() as nodes, opened(browser, model_folder, list(nodes), http=http) as site:
        await site.shows("#service", "key needed")
        await site.shows("#key-note", "This router asks for a key.")
        for empty in (".fleet.decode .note", "#chart-list .empty"):
            assert "API key" in await site.page.locator(empty).first.inner_text()
        assert "end a request" not in await site.text("#charts")
        await site.page.fill("#key", "wrong")
        await site.page.keyboard.press("Enter")
        await site.shows("#key-note", "The router refused this key.")
        await site.page.fill("#prompt", "hello")
        await site.page.keyboard.press("Control+Enter")
        await site.shows("#run-error", "API key")
        assert await site.text("#timeline-words") == "No node has reported a stage of this request."
        assert await site.text("#lanes") == "Router\nPrefill node\nDecode node", "it never ran"
        await site.page.fill("#key", "secret")
        await site.page.keyboard.press("Enter")
        await site.shows("#service", "serving")
        assert await site.page.locator("#run-error").is_hidden()
        assert await site.text("#run-status") == ""
        await site.shows("#chart-list", "Nothing yet: send a request.")
        assert await site.page.locator("#key-form").is_hidden()
        await site.page.fill("#prompt", "hello")
        await site.page.keyboard.press("Control+Enter")
        await site.shows("#run-status", "Done")
        assert await site.page.evaluate("Object.values(sessionStorage)") == ["secret"]
        kept = await site.page.evaluate("document.cookie + JSON.stringify(localStorage)")
        assert "secret" not in kept
        assert not any("secret" in url for url in site.urls)
        await site.page.reload()
        await site.shows("#service", "serving")


BLOCKED_STORAGE = """
for (const area of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, area, { get() { throw new DOMException("denied", "SecurityError"); } });
}
"""


async def test_a_browser_that_keeps_nothing_still_shows_it_all(browser: Browser, model_folder: Path) -> None:
    http = HttpOptions(port=0, served_model_name="tiny", api_keys=("secret",))
    async with (
        pair() as nodes,
        opened(
            browser, model_folder, list(nodes), http=http, before=BLOCKED_STORAGE, color_scheme="dark"
        ) as site,
    ):
        await site.page.fill("#key", "secret")
        await site.page.keyboard.press("Enter")
        await site.shows("#service", "serving")
        await site.page.fill("#prompt", "hello")
        await site.page.click("#run")
        await site.shows("#run-status", "Done")
        await site.page.click("#theme")
        await site.shows("#theme", "Dark")
        await site.page.click("#theme")
        await site.shows("#theme", "Light")


async def test_what_a_model_says_is_never_markup(browser: Browser, model_folder: Path) -> None:
    evil = "<img src=x onerror='document.title=1'><script>document.title=2</script>"

    async with (
        pair(prefill=saying(evil), decode=saying(evil)) as (prefill, decode),
        opened(browser, model_folder, [prefill, decode]) as site,
    ):
        await site.page.fill("#prompt", "a")
        await site.page.click("#run")
        await site.shows("#run-status", "Done")
        assert await site.text("#output") == evil
        await site.page.locator("#tab-chat[aria-disabled=false]").click()
        await site.page.fill("#prompt", evil)
        await site.page.keyboard.press("Enter")
        await site.shows("#run-status", "Done")
        assert await site.page.locator(".turn-text").all_inner_texts() == [evil, evil]
        assert await site.page.locator("main img, main script").count() == 0
        assert site.complaints == []


async def test_errors_are_words(browser: Browser, model_folder: Path) -> None:
    async def fail_later(node: FakeNode, message: Prefill | Decode) -> None:
        node.tokens(message.key, 0, node.story[:1])
        await asyncio.sleep(0.1)
        node.send(Failed(message.key, 400, "the node is out of sorts"))

    async with (
        pair(prefill=fail_later, decode=fail_later) as (prefill, decode),
        opened(browser, model_folder, [prefill, decode]) as site,
    ):
        await site.page.fill("#prompt", "word " * 400)
        await site.page.click("#run")
        await site.shows("#run-error", "200")  # what fits the pool
        assert await site.text("#run-status") == "Failed."
        await site.page.fill("#prompt", "short")
        await site.page.click("#run")
        await site.shows("#run-error", "The node is out of sorts.")
        assert await site.text("#output") == story(1)
        await site.page.fill("#temperature", "-1")
        await site.page.click("#run")
        assert await site.page.evaluate("document.activeElement.id") == "temperature"
        assert len(decode.all(Decode)) == 1
