"""Who gets in: client and admin keys from flags, files and the environment."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path

import httpx
import openai
import pytest
from fastapi import Request

from router.api.fleet_api import fleet_guards
from router.config import HttpOptions
from router.flags import build_parser, router_config
from router.http.api_keys import (
    Access,
    ApiKeys,
    admin_guard,
    api_keys,
    key_digests,
    keys_from_environment,
    warn_if_open,
)
from router.request.prompt import Prompt
from shared.errors import ConfigError, RequestError
from shared.protocol.messages import Decode, Work
from shared.protocol.sampling_params import SamplingParams
from tests.unit.router.fakes import joined_pair, openai_client
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
    async with joined_pair(model_folder, http=http, wait=False) as ((_, decode), router, client):
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
        await router.ready(["prefill-0", "decode-0"])
        owners = []
        for key, (path, body) in itertools.product(("schlüssel", "other"), ROUTES):
            answer = await client.post(path, json=body, headers=bearer(key))
            assert answer.status_code == 200
            owners.append(decode.all(Decode)[-1].work.extra_key)
        assert len(set(owners)) == 2 and owners[0] == owners[2] != owners[3] == owners[5], (
            "caches of their own"
        )
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
    shared = api_keys(HttpOptions(api_keys=("a",), share_cache_across_api_keys=True))
    assert shared.cache_owner(b"Bearer a") == b""


def test_whose_cache_a_request_has_is_decided_by_its_key() -> None:
    """And by the request's own `extra_key`. No node is told a key, or what the client chose."""

    def told(known: ApiKeys, extra_key: str, key: str) -> str:
        prompt = Prompt(rid="r", work=Work((1,), SamplingParams(), extra_key=extra_key))
        return prompt.in_cache_of(known.cache_owner(f"Bearer {key}".encode())).work.extra_key

    names, several = ("a-key", "b-key", "root-key"), keys(("a-key", "b-key"), ("root-key",))
    words = [told(several, extra_key, key) for extra_key, key in itertools.product(("", "chosen"), names)]
    assert len(set(words)) == 6, "no two have anything in common"
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in names]
    for word in words:
        assert word and "key" not in word and "chosen" not in word
        assert not any(word in digest or digest[:8] in word for digest in digests)
    assert told(keys(("b-key",)), "", "b-key") == told(several, "", "b-key"), "another router agrees"
    assert told(keys(), "chosen", "any") == "chosen"


# ------------------------------------------------------------------------------------- administrators
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
        await router.ready(["prefill-0", "decode-0"])
        for method, path, body in ADMIN_ROUTES:
            done = await client.request(method, path, json=body, headers=bearer("a"))
            assert done.status_code == 200, done.text


KEYLESS_ADMIN_ROUTES = [
    *ADMIN_ROUTES,
    ("GET", "/fleet", None),
    ("POST", "/fleet/nodes", {"role": "decode", "address": "127.0.0.1:1"}),
    ("POST", "/fleet/nodes/decode-0/role", {"role": "prefill"}),
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
OWN_PAGES = [
    {"Host": "localhost:8000", "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"},
    {"Host": "[::1]:8000"},
    {"Host": "127.9.9.9", "Sec-Fetch-Site": "none"},
    {"Origin": "https://ops.example", "Sec-Fetch-Site": "cross-site"},
]


async def refused(
    page: Mapping[str, str], known: ApiKeys, *, host: str = "127.0.0.1", key: str = "", fleet: bool = False
) -> tuple[int, str | None] | None:
    """Why a page may not use an admin route, or one that changes the fleet; None if it may."""
    headers = {"host": "127.0.0.1:8000", **{name.lower(): value for name, value in page.items()}}
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    state = {"access": known.access(f"Bearer {key}".encode())}
    request = Request({"type": "http", "path": "/flush_cache", "headers": sent, "state": state})
    admin_only = admin_guard(known, host, ("*", "https://ops.example"))
    try:
        if fleet:
            await fleet_guards(known, host, admin_only)[0].dependency()  # type: ignore[misc]
        await admin_only(request)
    except RequestError as e:
        return e.status, e.code
    return None


async def test_without_keys_pages_of_other_sites_may_not_administer(model_folder: Path) -> None:
    for page in FOREIGN_PAGES:
        assert await refused(page, keys()) == (403, "foreign_page")
        for known in (keys(admins=("a",)), keys(("a",))):  # from anywhere, holders of a key may
            assert await refused(page, known, key="a") is None
    for page in OWN_PAGES:
        assert await refused(page, keys()) is None, page
    async with joined_pair(model_folder) as (_, _, client):
        for method, path, body in KEYLESS_ADMIN_ROUTES:
            text = {"Content-Type": "text/plain", **FOREIGN_PAGES[0]}  # what needs no preflight
            answer = await client.request(method, path, json=body, headers=text)
            error = answer.json()["error"]
            told = (answer.status_code, error["type"], error["code"])
            assert told == (403, "permission_error", "foreign_page")
        assert len((await client.get("/fleet")).json()["nodes"]) == 2
        one = await client.post("/abort_request", json={"rid": "x"}, headers=FOREIGN_PAGES[0])
        assert one.status_code == 200, "to end a request one has to know its name"


async def test_a_router_of_the_network_has_names_of_its_own_but_no_foreign_pages() -> None:
    named = {"Host": "llm.example:8000"}
    for origin, expected in (
        ({}, None),
        ({"Origin": "https://llm.example:8000"}, None),
        ({"Origin": "http://evil.example"}, (403, "foreign_page")),
    ):
        assert await refused({**named, **origin}, keys(), host="0.0.0.0") == expected


@pytest.mark.parametrize(
    ("clients", "admins", "host", "key", "expected"),
    [
        ((), (), "127.0.0.1", "", None),
        ((), (), "0.0.0.0", "", (403, "no_admin_key")),
        (("c",), (), "127.0.0.1", "c", (403, "no_admin_key")),
        ((), ("a",), "127.0.0.1", "", (401, "invalid_api_key")),
        (("c",), ("a",), "127.0.0.1", "c", (401, "invalid_api_key")),
        (("c",), ("a",), "0.0.0.0", "a", None),
    ],
)
async def test_only_administrators_may_change_the_fleet(
    clients: tuple[str, ...], admins: tuple[str, ...], host: str, key: str, expected: tuple[int, str] | None
) -> None:
    assert await refused({}, keys(clients, admins), host=host, key=key, fleet=True) == expected


@pytest.mark.parametrize(
    ("host", "known", "warns"),
    [
        ("127.0.0.1", keys(), False),
        ("0.0.0.0", keys(), True),
        ("0.0.0.0", keys(admins=("a",)), True),
        ("0.0.0.0", keys(("c",)), False),
    ],
)
def test_a_router_that_lets_the_network_in_says_so(
    caplog: pytest.LogCaptureFixture, host: str, known: ApiKeys, warns: bool
) -> None:
    warn_if_open(known, host)
    assert caplog.text.count("clients_need_no_key") == warns
