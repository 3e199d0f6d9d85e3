"""The OpenAPI document of a router, to hold answers against."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema_rs

from tests.unit.router.fakes import events


class Described:
    """Schemas by route."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def operations(self) -> list[tuple[str, str]]:
        return [(m.upper(), path) for path, methods in self.document["paths"].items() for m in methods]

    def operation(self, method: str, path: str) -> dict[str, Any]:
        return self.document["paths"][path][method.lower()]

    def events(self, method: str, path: str) -> dict[str, Any]:
        content = self.operation(method, path)["responses"]["200"]["content"]
        data = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
        assert data[0] == {"const": "[DONE]"}
        return data[1]["contentSchema"]

    def fits(self, schema: dict[str, Any], value: object) -> None:
        whole = {"allOf": [schema], "components": self.document["components"]}
        jsonschema_rs.validator_for(whole).validate(value)

    def check_body(self, method: str, path: str, body: object) -> None:
        content = self.operation(method, path)["requestBody"]["content"]["application/json"]
        self.fits(content["schema"], body)

    def check(self, method: str, path: str, response: httpx.Response) -> None:
        """The status is one of the route's, and the answer, or each event of a stream, has its shape."""
        described = self.operation(method, path)["responses"]
        status = str(response.status_code)
        content = (described.get(status) or described[f"{status[0]}XX"])["content"]
        media_type = response.headers["content-type"]
        media = content.get(media_type) or content[media_type.partition(";")[0]]
        if media_type.startswith("text/event-stream"):
            *told, done = events(response.text)
            assert told and done == "[DONE]"
            for event in told:
                assert "error" not in event
                self.fits(self.events(method, path), event)
        elif media_type == "application/json":
            self.fits(media["schema"], response.json())
        else:
            assert media["schema"] == {"type": "string"}
