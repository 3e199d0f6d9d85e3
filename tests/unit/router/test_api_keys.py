"""Who gets in: client and admin keys from flags, files and the environment."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.flags import build_parser, router_config
from router.http.api_keys import Access, ApiKeys, key_digests, keys_from_environment
from router.http.config import HttpOptions
from shared.errors import ConfigError
from shared.protocol.messages import Decode, Prefill
from tests.unit.router.fakes import joined_pair, joined_router, openai_client
from tests.unit.router.test_admission import ROUTES


def keys(clients: tuple[str, ...] = (), admins: tuple[str, ...] = ()) -> ApiKeys:
    return ApiKeys(key_digests("--api-key", clients), key_digests("--admin-api-key", admins))


def bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {key}".encode()}


@pytest.mark.parametrize(
    ("clients", "admins", "nobody", "client", "admin"),
    [
        ((), (), Access.ADMIN, Access.ADMIN, Access.ADMIN),
        (("c",), (), Access.NOTHING, Access.ADMIN, Access.NOTHING),
        ((), ("a",), Access.CLIENT, Access.CLIENT, Access.ADMIN),
        (("c",), ("a",), Access.NOTHING, Access.CLIENT, Access.ADMIN),
        (("x", "c", "y"), ("z", "a"), Access.NOTHING, Access.CLIENT, Access.ADMIN),
    ],
)
def test_who_may_do_what(
    clients: tuple[str, ...], admins: tuple[str, ...], nobody: Access, client: Access, admin: Access
) -> None:
    known = keys(clients, admins)
    assert known.access(b"Bearer c") is client and known.access(b"bearer  c ") is client
    assert known.access(b"Bearer a") is admin
    for wrong in (b"Bearer ", b"Bearer w", b"Bearer cc", b"c", b"Basic c", b"Bearer c c", b"\xff", b""):
        assert known.access(wrong) is nobody, wrong


def test_keys_of_files_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who\n\n  one  \ntwo\n#three\n")
    known = ApiKeys(key_digests("--api-key", ("zero",), file), ())
    assert [known.access(f"Bearer {key}".encode()) for key in ("zero", "one", "two", "three", "#three")] == [
        *[Access.ADMIN] * 3,
        *[Access.NOTHING] * 2,
    ]
    assert keys_from_environment("K", {"K": "a, b"}) == ("a", "b")
    assert keys_from_environment("K", {}) == ()


@pytest.mark.parametrize("text", ["# none yet\n", "two words", "\xff"])
def test_a_file_without_keys_that_can_be_used_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="latin-1")
    for bad in (file, tmp_path / "none"):
        with pytest.raises(ConfigError, match="--api-key"):
            key_digests("--api-key", (), bad)


def test_keys_that_nobody_could_send_are_refused(tmp_path: Path) -> None:
    for bad in ("", "two words", "tab\t", "line\n"):
        with pytest.raises(ConfigError, match="--api-key"):
            keys((bad,))
    with pytest.raises(ConfigError, match="--admin-api-key-file"):
        key_digests("--admin-api-key", (), tmp_path / "none")
    for empty in ("", "a,", " , b"):
        with pytest.raises(ConfigError, match="K"):
            keys_from_environment("K", {"K": empty})


def test_flags_and_environment_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEYS", "e1,e2")
    monkeypatch.setenv("BATON_ADMIN_API_KEYS", "root")
    argv = ["--api-key", "f1", "f2", "--api-key", "f3", "--api-key-file", "k", "--admin-api-key", "boss"]
    config = router_config(build_parser().parse_args(argv))
    assert config.http.api_keys == ("f1", "f2", "f3", "e1", "e2")
    assert config.http.admin_api_keys == ("boss", "root")
    assert config.http.api_key_file == Path("k") and config.http.admin_api_key_file is None
    told = f"{config!r} {config.shown()}"
    assert not any(key in told for key in (*config.http.api_keys, *config.http.admin_api_keys))


def check_refused(response: httpx.Response) -> None:
    assert response.status_code == 401, response.text
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


async def test_routes_need_a_key(model_folder: Path) -> None:
    http = HttpOptions(port=0, api_keys=("other", "schlüssel"))
    async with joined_pair(model_folder, http=http, wait=False) as (_, router, client):
        assert router.keys.has_clients
        assert (await client.get("/health")).status_code in (200, 503)
        for headers in ({}, bearer("wrong"), {"Authorization": "schlüssel".encode()}):
            state = "/server_info", "/metrics", "/v1/models", "/health_generate"
            for path in (*state, "/nowhere", "/docs", "/live", "/live/state"):
                check_refused(await client.get(path, headers=headers))
            check_refused(await client.post("/generate", json={"text": "a"}, headers=headers))
            check_refused(await client.post("/flush_cache", headers=headers))
        info = await client.get("/server_info", headers=bearer("schlüssel"))
        assert info.status_code == 200
        assert "schlüssel" not in info.text and "other" not in info.text
        assert (await client.post("/flush_cache", headers=bearer("other"))).status_code == 200
        async with openai_client(router.url, "no") as sdk:
            with pytest.raises(openai.AuthenticationError) as caught:
                await sdk.models.list()
        assert caught.value.code == "invalid_api_key"


def test_the_owner_of_a_cache_is_a_key_that_is_known() -> None:
    several = keys(("a", "b"), ("root",))
    owners = {key: several.cache_owner(f"Bearer {key}".encode()) for key in ("a", "b", "root")}
    assert len(set(owners.values())) == 3 and all(owners.values())
    assert several.cache_owner(b"bearer  a ") == owners["a"]
    assert keys(("a",)).cache_owner(b"Bearer a") == owners["a"], "another router with other keys agrees"
    for stranger in (b"", b"Bearer", b"Bearer c", b"Basic a"):
        assert keys(admins=("root",)).cache_owner(stranger) == keys().cache_owner(stranger) == b""
    shared = ApiKeys(key_digests("--api-key", ("a",)), (), share_cache=True)
    assert shared.cache_owner(b"Bearer a") == b""


async def test_whose_cache_a_request_has_is_decided_by_its_key(model_folder: Path) -> None:
    """On every route, and beside the request's own `extra_key`. No node is told a key, or what the client chose."""

    async def namespaces(http: HttpOptions, *headers: dict[str, bytes]) -> list[list[str]]:
        """Of each caller, what nodes were told for every route, without and with an `extra_key`."""
        async with joined_pair(model_folder, http=http, wait=False) as ((prefill, decode), router, client):
            await router.ready(["prefill-0", "decode-0"])
            for caller in headers:
                for path, body in ROUTES:
                    for extra_key in ({}, {"extra_key": "chosen"}):
                        asked = {**body, **extra_key, "rid": f"{len(decode.all(Decode))}"}
                        answer = await client.post(path, json=asked, headers=caller)
                        assert answer.status_code == 200, answer.text
            told = [message.work.extra_key for message in decode.all(Decode)]
            assert set(told) == {message.work.extra_key for message in prefill.all(Prefill)}
            size = 2 * len(ROUTES)
            return [told[at : at + size] for at in range(0, len(told), size)]

    several = HttpOptions(port=0, api_keys=("a-key", "b-key"), admin_api_keys=("root-key",))
    callers = [bearer(key) for key in ("a-key", "b-key", "root-key")]
    told = await namespaces(several, *callers)
    for of_one in told:
        assert len(set(of_one[0::2])) == len(set(of_one[1::2])) == 1, "the same on every route"
    words = {word for of_one in told for word in of_one}
    assert len(words) == 6, "no two have anything in common"
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in ("a-key", "b-key", "root-key")]
    for word in words:
        assert word and "key" not in word and "chosen" not in word
        assert not any(word in digest or digest[:8] in word for digest in digests)

    one_key = HttpOptions(port=0, api_keys=("b-key",))
    assert await namespaces(one_key, bearer("b-key")) == [told[1]], "another router agrees"
    plain = ["", "chosen"] * len(ROUTES)
    assert await namespaces(HttpOptions(port=0), {}, bearer("any")) == [plain, plain]
    shared = replace(several, share_cache_across_api_keys=True)
    assert await namespaces(shared, *callers) == [plain] * 3


ADMIN_ROUTES = [
    ("POST", "/flush_cache", {}),
    ("GET", "/flush_cache", {}),
    ("POST", "/abort_request", {"abort_all": True}),
    ("POST", "/start_profile", {"num_steps": 1}),
    ("POST", "/stop_profile", {}),
]


@pytest.mark.parametrize("client_keys", [(), ("c",)])
async def test_admin_routes_need_the_admin_key(model_folder: Path, client_keys: tuple[str, ...]) -> None:
    http = HttpOptions(port=0, api_keys=client_keys, admin_api_keys=("a",))
    async with joined_pair(model_folder, http=http, wait=False) as (_, router, client):
        assert router.keys.has_clients == bool(client_keys)
        for key in ("a", "c"):
            aborted = await client.post("/abort_request", json={"rid": "x"}, headers=bearer(key))
            assert aborted.status_code == 200
        for method, path, body in ADMIN_ROUTES:
            for headers in ({}, bearer("c"), bearer("wrong")):
                check_refused(await client.request(method, path, json=body, headers=headers))
        while not (await client.get("/server_info", headers=bearer("a"))).json()["nodes"]:
            await asyncio.sleep(0.01)
        for method, path, body in ADMIN_ROUTES:
            done = await client.request(method, path, json=body, headers=bearer("a"))
            assert done.status_code == 200, done.text


KEYLESS_ADMIN_ROUTES = [
    *ADMIN_ROUTES,
    ("GET", "/fleet", None),
    ("POST", "/fleet/nodes", {"role": "decode", "address": "127.0.0.1:1"}),
    ("DELETE", "/fleet/nodes/decode-0", None),
]
FOREIGN_PAGES = [
    {"Origin": "http://evil.example", "Host": "evil.example"},  # DNS rebinding: its name means 127.0.0.1
    {"Host": "evil.example:8000"},  # a GET of such a page says no origin
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "[::1"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:1"},
    {"Sec-Fetch-Site": "cross-site"},  # <img src="http://localhost:8000/flush_cache">
    {"Sec-Fetch-Site": "same-site"},
]


def check_foreign(response: httpx.Response) -> None:
    assert response.status_code == 403, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("permission_error", "foreign_page")


async def test_without_keys_pages_of_other_sites_may_not_administer(model_folder: Path) -> None:
    http = HttpOptions(port=0, allowed_origins=("*", "https://ops.example"))
    async with joined_pair(model_folder, http=http) as (_, router, client):
        for headers in FOREIGN_PAGES:
            for method, path, body in KEYLESS_ADMIN_ROUTES:
                text = {"Content-Type": "text/plain", **headers}  # what needs no preflight
                check_foreign(await client.request(method, path, json=body, headers=text))
        assert len((await client.get("/fleet")).json()["nodes"]) == 2
        own = router.url.removeprefix("http://")
        for headers in (
            {"Origin": router.url, "Sec-Fetch-Site": "same-origin"},
            {"Host": "localhost:1", "Origin": "http://localhost:1"},
            {"Host": "[::1]:8000"},
            {"Host": "127.9.9.9", "Sec-Fetch-Site": "none"},
            {"Host": own, "Origin": "https://ops.example", "Sec-Fetch-Site": "cross-site"},
        ):
            assert (await client.post("/flush_cache", headers=headers)).status_code == 200, headers
            assert (await client.get("/fleet", headers=headers)).status_code == 200, headers
        one = await client.post("/abort_request", json={"rid": "x"}, headers=FOREIGN_PAGES[0])
        assert one.status_code == 200, "to end a request one has to know its name"


async def test_a_router_of_the_network_has_names_of_its_own_but_no_foreign_pages(model_folder: Path) -> None:
    http = HttpOptions(host="0.0.0.0", port=0)
    async with joined_router(model_folder, [], http=http, wait=False) as (_, client):
        named = {"Host": "llm.example:8000"}
        assert (await client.post("/flush_cache", headers=named)).status_code == 200
        own_page = {**named, "Origin": "https://llm.example:8000"}
        assert (await client.post("/flush_cache", headers=own_page)).status_code == 200
        check_foreign(await client.post("/flush_cache", headers={**named, "Origin": "http://evil.example"}))


@pytest.mark.parametrize("keys", [{"admin_api_keys": ("a",)}, {"api_keys": ("a",)}])
async def test_holders_of_a_key_administer_from_anywhere(model_folder: Path, keys: dict[str, Any]) -> None:
    async with joined_router(model_folder, [], http=HttpOptions(port=0, **keys), wait=False) as (_, client):
        for headers in FOREIGN_PAGES:
            done = await client.post("/flush_cache", headers={**headers, **bearer("a")})
            assert done.status_code == 200, done.text


@pytest.mark.parametrize(
    ("http", "warns"),
    [
        (HttpOptions(), False),
        (HttpOptions(host="0.0.0.0"), True),
        (HttpOptions(host="0.0.0.0", admin_api_keys=("a",)), True),
        (HttpOptions(host="0.0.0.0", api_keys=("c",)), False),
    ],
)
async def test_a_router_that_lets_the_network_in_says_so_once(
    model_folder: Path, caplog: pytest.LogCaptureFixture, http: HttpOptions, warns: bool
) -> None:
    async with joined_router(model_folder, [], http=replace(http, port=0), wait=False):
        pass
    assert caplog.text.count("clients_need_no_key") == warns
