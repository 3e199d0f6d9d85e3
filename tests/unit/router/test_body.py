"""Typed request bodies: what they refuse and how they say it, what null means, and the schema they publish."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import BeforeValidator, Field, create_model

from router.api.fleet_api import AddNode
from router.api.generate_api import GenerateBody, NativeSampling
from router.api.messages_api import CountBody, MessagesBody
from router.api.openai_bodies import ChatBody, CompletionBody
from router.api.responses_api import ResponsesBody
from router.api.service_api import AbortBody, DetokenizeBody, StartProfileBody, TokenizeBody
from router.http.body import NOT_YET, Body, FailFast, OneOf
from shared.errors import RequestError
from tests.unit.router.bodies import validate

BODIES = (
    GenerateBody,
    CompletionBody,
    ChatBody,
    TokenizeBody,
    DetokenizeBody,
    AbortBody,
    StartProfileBody,
    AddNode,
    MessagesBody,
    CountBody,
    ResponsesBody,
)
Word = Annotated[str, Field(min_length=1, max_length=5)]


class Wheel(Body):
    size: Annotated[int, Field(ge=1, le=10**30)]
    kind: Literal["front", "rear"] = "front"


class Car(Body):
    price: Annotated[float, Field(gt=0, lt=1e6, description="In money.")] = 1.0
    doors: Annotated[int, Field(multiple_of=2)] = 4
    names: Annotated[
        str | list[str] | None,
        OneOf(
            "a name or names", {"str": Word, "list": Annotated[list[Word], FailFast(), Field(max_length=3)]}
        ),
    ] = None
    ids: Annotated[
        list[int] | list[list[int] | None] | None,
        OneOf("ids or rows of ids", {"list[int]": list[int], "list[list]": list[list[int] | None]}),
    ] = None
    wheel: Annotated[Wheel | list[Wheel], OneOf("a wheel or wheels", {"dict": Wheel, "list": list[Wheel]})]
    sold: bool = False
    refused: ClassVar[Mapping[str, str]] = {"flies": NOT_YET}


RIGHT: dict[str, Any] = {"wheel": {"size": 3}}


@pytest.mark.parametrize(
    ("values", "param", "value"),
    [
        ({"price": True}, "price", "true"),
        ({"price": "1"}, "price", "'1'"),
        ({"price": 0}, "price", "0"),
        ({"price": 10**7}, "price", "10000000"),
        ({"price": math.nan}, "price", "nan"),
        ({"doors": 3}, "doors", "3"),
        ({"doors": 4.0}, "doors", "4.0"),
        ({"names": 5}, "names", "5"),
        ({"names": ""}, "names", "''"),
        ({"names": ["a", "abcdef"]}, "names[1]", "'abcdef'"),
        ({"names": ["a", None]}, "names[1]", "null"),
        ({"names": list("abcd")}, "names", "['a', 'b', 'c', 'd']"),
        ({"ids": [1, [2]]}, "ids[1]", "[2]"),
        ({"ids": [[1], 2]}, "ids[1]", "2"),
        ({"ids": [[1], [True]]}, "ids[1][0]", "true"),
        ({"ids": [True]}, "ids", "[true]"),
        ({"ids": {"a": [None]}}, "ids", "{'a': [null]}"),
        ({"wheel": {"size": 0}}, "wheel.size", "0"),
        ({"wheel": {"size": 1, "kind": "x"}}, "wheel.kind", "'x'"),
        ({"sold": 1}, "sold", "1"),
    ],
)
def test_what_is_refused(values: dict[str, object], param: str, value: str) -> None:
    with pytest.raises(RequestError) as refusal:
        validate(Car, {**RIGHT, **values})
    message = refusal.value.message
    assert message.startswith((f"{param} must be ", f"{param} must have "))
    assert message.endswith(f", not {value}")
    assert (refusal.value.param, refusal.value.status) == (param, 400)


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"wheel": [{"size": 1}, {"size": None}]}, "wheel[1].size", "wheel[1].size is missing"),
        ({"wheel": None}, "wheel", "wheel is missing"),
        ({"flies": True}, "flies", "flies is not supported yet; leave it out (it was true)"),
        ({"flies": 0}, "flies", "flies is not supported yet; leave it out (it was 0)"),
    ],
)
def test_what_is_missing_or_not_served(values: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        validate(Car, {**RIGHT, **values})
    assert (refusal.value.param, refusal.value.message) == (param, message)


def test_what_is_taken() -> None:
    assert validate(Car, RIGHT) == validate(Car, {**RIGHT, **dict.fromkeys(("price", "names", "flies"))})
    car = validate(Car, {**RIGHT, "price": 3, "flies": False, "unknown": {"x": [1]}, "ids": []})
    assert type(car.price) is float and not hasattr(car, "unknown") and car.ids == []
    assert validate(Car, {**RIGHT, "ids": [None, [1]]}).ids == [None, [1]]
    assert validate(Car, {"wheel": [{"size": 10**30}]}).wheel == [Wheel(size=10**30)]


def test_a_message_never_repeats_a_whole_prompt() -> None:
    with pytest.raises(RequestError) as refusal:
        validate(GenerateBody, {"text": ["x" * 10_000, 1], "sampling_params": {}})
    assert len(refusal.value.message) < 200
    with pytest.raises(RequestError) as refusal:
        validate(GenerateBody, {"text": {"x" * 10_000: "y" * 10_000}})
    assert len(refusal.value.message) < 200


def test_a_key_of_the_client_is_cut() -> None:
    key = "my secret prompt " + "x" * 400_000
    for values in ({"logit_bias": {key: "q"}}, {"logit_bias": {key: 1e9}}):
        with pytest.raises(RequestError) as refusal:
            validate(NativeSampling, values)
        assert len(refusal.value.message) < 200 and len(str(refusal.value.param)) < 100


def test_a_list_is_not_checked_further_than_its_first_fault() -> None:
    seen: list[int] = []
    small = Annotated[int, Field(lt=2), BeforeValidator(lambda number: seen.append(number) or number)]
    numbers = create_model("Numbers", __base__=Body, ids=Annotated[list[small], FailFast()])
    with pytest.raises(RequestError, match=r"ids\[2\] "):
        validate(numbers, {"ids": list(range(100))})
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_field_is_described_bounded_and_may_be_null(body: type[Body]) -> None:
    schema = body.model_json_schema()
    for model in (schema, *schema.get("$defs", {}).values()):
        for name, field in model["properties"].items():
            where = f"{model['title']}.{name}"
            branches = list(_branches(field))
            assert any("description" in branch for branch in branches), where
            optional = name not in model.get("required", ())
            assert optional == any(branch.get("type") == "null" for branch in branches), where
            for branch in branches:
                if branch.get("type") in ("integer", "number") and "const" not in branch:
                    assert {"minimum", "exclusiveMinimum"} & set(branch), where
                    assert {"maximum", "exclusiveMaximum"} & set(branch), where


def _branches(field: dict[str, Any]) -> Iterator[dict[str, Any]]:
    nested = [*field.get("anyOf", ()), *field.get("oneOf", ())]
    if "items" in field:
        nested.append({key: value for key, value in field["items"].items() if key != "anyOf"})
    yield field
    for branch in nested:
        yield from _branches(branch)
