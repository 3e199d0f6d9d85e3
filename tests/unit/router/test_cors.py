"""--allowed-origins: pages of other origins may call, preflights need no key, and refusals can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config import HttpOptions
from router.flags import build_parser, origins, router_config
from tests.unit.router.fakes import joined_pair, joined_router

PAGE = "https://page.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-request-id",
}


async def test_pages_of_allowed_origins(model_folder: Path) -> None:
    http = HttpOptions(port=0, api_keys=("k",), allowed_origins=(PAGE,))
    known = {"Authorization": "Bearer k", "Origin": PAGE}
    async with joined_pair(model_folder, http=http, wait=False) as (_, _, client):
        preflight = await client.options("/v1/completions", headers={**PREFLIGHT, "Origin": PAGE})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        other = {**PREFLIGHT, "Origin": "https://other.example"}
        assert (await client.options("/v1/completions", headers=other)).status_code == 400
        for response, status in (
            (await client.get("/v1/models", headers=known), 200),
            (await client.get("/v1/models", headers={"Origin": PAGE}), 401),
            (await client.get("/nowhere", headers=known), 404),
            (await client.post("/generate", headers=known, json={}), 400),
        ):
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in response.headers["access-control-expose-headers"]
        elsewhere = await client.get("/v1/models", headers={**known, "Origin": "https://other.example"})
        assert "access-control-allow-origin" not in elsewhere.headers
        assert "access-control-allow-credentials" not in elsewhere.headers


async def test_off_by_default(model_folder: Path) -> None:
    async with joined_router(model_folder, [], wait=False) as (_, client):
        preflight = await client.options("/generate", headers={**PREFLIGHT, "Origin": PAGE})
        assert preflight.status_code == 405
        for response in (preflight, await client.get("/health", headers={"Origin": PAGE})):
            assert not any(name.startswith("access-control") for name in response.headers)


def test_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--allowed-origins", PAGE, "--allowed-origins", f'["{PAGE}", "http://localhost:3000"]']
    config = router_config(build_parser().parse_args(argv))
    assert config.http.allowed_origins == (PAGE, "http://localhost:3000")
    assert origins('["*"]') == origins("*") == ("*",)
    for wrong in ("page.example", f"{PAGE}/path", "[1]", "[", ""):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["--allowed-origins", wrong])
        assert "argument --allowed-origins: " in capsys.readouterr().err
