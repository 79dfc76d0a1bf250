"""Examples of type hints: each is accepted by the hint's own reader."""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np
import pytest

from remora.functions.examples import NoExampleError, hint_text, image_example, json_example
from remora.functions.hints import Array, open_image
from remora.functions.json_values import reader_of


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: float
    y: float
    name: str = "here"


class Message(TypedDict):
    role: Literal["user", "system"]
    points: list[Point]
    note: NotRequired[str]


@dataclasses.dataclass
class Never:
    children: list[Never]


@dataclasses.dataclass
class Even:
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError("odd")


@pytest.mark.parametrize(
    ("hint", "example"),
    [
        (dict, {}),
        (list[dict], [{}]),
        (dict[str, int], {"name": 1}),
        (dict[int, str], {"1": "text"}),
        (Point, {"x": 0.5, "y": 0.5}),
        (list[Point], [{"x": 0.5, "y": 0.5}]),
        (Message, {"role": "user", "points": [{"x": 0.5, "y": 0.5}]}),
        (tuple[int, str], [1, "text"]),
        (tuple[int, ...], [1]),
        (Colour, "red"),
        (Literal[3, 4], 3),
        (dict[Colour, bool], {"red": True}),
        (Point | None, {"x": 0.5, "y": 0.5}),
        (Any, "text"),
        (Annotated[dict[str, Any], "settings"], {}),
    ],
    ids=str,
)
def test_an_example_fits_its_hint(hint: Any, example: Any) -> None:
    assert json_example(hint) == example
    reader_of(hint)(json.dumps(example).encode())


@pytest.mark.parametrize("hint", [Never, Even], ids=lambda hint: hint.__name__)
def test_a_hint_whose_values_cannot_be_found_has_no_example(hint: Any) -> None:
    with pytest.raises(NoExampleError):
        json_example(hint)


def test_an_example_fits_a_pydantic_model_with_limits() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Address(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        mail: str = pydantic.Field(min_length=6)
        when: str = pydantic.Field(json_schema_extra={"format": "date"})

    class Order(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        count: int = pydantic.Field(gt=3, le=9)
        price: float = pydantic.Field(ge=0.25, lt=0.5)
        to: Address | None
        lines: list[Literal["a", "b"]] = pydantic.Field(min_length=2)
        table: dict[str, int]
        more: str = "none"

    Order.model_rebuild(_types_namespace={"Address": Address, "Literal": Literal})
    example = json_example(list[Order])
    assert Order.model_validate(example[0]).count > 3

    class Coded(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        code: str = pydantic.Field(pattern="^[A-Z]{3}$")

    with pytest.raises(NoExampleError):
        json_example(Coded)


def test_the_example_image_can_be_read() -> None:
    pytest.importorskip("PIL")
    image = open_image(base64.b64decode(image_example()))
    assert (image.size, image.getpixel((1, 1))) == ((64, 64), (128, 128, 128))


@pytest.mark.parametrize(
    ("hint", "text"),
    [(str, "str"), (list[dict], "list[dict]"), (Array[np.float32, -1, 2], "Array[float32, -1, 2]"), (Any, "")],
    ids=str,
)
def test_a_hint_is_written_as_a_programmer_writes_it(hint: Any, text: str) -> None:
    assert hint_text(hint) == text
