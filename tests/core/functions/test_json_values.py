"""JSON documents for type hints: which values have the hint's type, and the place and text of every refusal."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NewType, NotRequired, Optional, TypedDict, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.functions.errors import BadRequestError, HintError
from remora.functions.json_values import json_text, reader_of


class Color(enum.Enum):
    RED = "red"
    ONE = 1


class Size(TypedDict):
    width: int
    unit: NotRequired[str]


@dataclass
class Item:
    sku: str
    counts: list[int] = field(default_factory=list)


@dataclass
class Order:
    name: str
    count: int
    price: float = 0.0
    paid: bool = False
    color: Color = Color.RED
    item: Item | None = None
    tags: dict[str, int] = field(default_factory=dict)
    pair: tuple[int, str] = (0, "")


@dataclass
class Node:
    value: int
    children: list[Node] = field(default_factory=list)


@dataclass
class Positive:
    value: int

    def __post_init__(self) -> None:
        if self.value <= 0:
            raise ValueError("the value must be positive")


Id = NewType("Id", int)


def read(hint: Any, value: Any) -> Any:
    return reader_of(hint)(json.dumps(value).encode())


def refused(hint: Any, value: Any) -> str:
    with pytest.raises(BadRequestError) as failure:
        read(hint, value)
    return str(failure.value)


@pytest.mark.parametrize(
    ("value", "shown"), [("1", '"1"'), (1.5, "1.5"), (True, "true"), (None, "null"), ([1], "[1]"), ({}, "an object")]
)
def test_a_field_that_is_an_integer_takes_nothing_else(value: Any, shown: str) -> None:
    assert refused(Order, {"name": "a", "count": value}) == f"count: expected an integer, got {shown}"


VALID: list[tuple[Any, Any, Any]] = [
    (Order, {"name": "a", "count": 2, "price": 3}, Order("a", 2, 3.0)),
    (Order, {"name": "a", "count": 2, "color": 1, "item": None}, Order("a", 2, color=Color.ONE)),
    (Order, {"name": "a", "count": 2, "item": {"sku": "b", "counts": [1]}}, Order("a", 2, item=Item("b", [1]))),
    (Order, {"name": "a", "count": 2, "pair": [1, "x"]}, Order("a", 2, pair=(1, "x"))),
    (Node, {"value": 1, "children": [{"value": 2}]}, Node(1, [Node(2)])),
    (Size, {"width": 1}, {"width": 1}),
    (Literal["a", 1], 1, 1),
    (int | str, "1", "1"),
    (float | int, 1, 1),
    (Union[Item, Order], {"name": "a", "count": 1}, Order("a", 1)),  # noqa: UP007
    (Optional[Item], None, None),  # noqa: UP045
    (dict[str, list[int]], {"a": [1]}, {"a": [1]}),
    (dict[int, str], {"-1": "a"}, {-1: "a"}),
    (Mapping[str, Any], {"a": None}, {"a": None}),
    (Sequence[int], [1], [1]),
    (tuple[int, ...], [1, 2], (1, 2)),
    (dict[Color, int], {"red": 1}, {Color.RED: 1}),
    (list, [1, "a"], [1, "a"]),
    (Id, 7, 7),
    (Annotated[int, "of apples"], 7, 7),
]


@pytest.mark.parametrize(("hint", "value", "expected"), VALID, ids=[str(row[:2]) for row in VALID])
def test_a_value_of_the_type_is_built(hint: Any, value: Any, expected: Any) -> None:
    found = read(hint, value)
    assert (found, type(found)) == (expected, type(expected))


INVALID: list[tuple[Any, Any, str]] = [
    (Order, {"name": "a", "count": 1, "price": "3"}, 'price: expected a number, got "3"'),
    (Order, {"name": "a", "count": 1, "price": True}, "price: expected a number, got true"),
    (Order, {"name": "a", "count": 1, "paid": 1}, "paid: expected true or false, got 1"),
    (Order, {"name": None, "count": 1}, "name: expected a text, got null"),
    (Order, {"name": "a", "count": 1, "color": "blue"}, 'color: expected one of "red", 1, got "blue"'),
    (Order, {"name": "a", "count": 1, "color": True}, 'color: expected one of "red", 1, got true'),
    (Order, {"name": "a", "count": 1, "color": 1.0}, 'color: expected one of "red", 1, got 1.0'),
    (Order, {"name": "a", "count": 1, "item": {"sku": 1}}, "item.sku: expected a text, got 1"),
    (Order, {"name": "a", "count": 1, "item": 5}, "item: expected a JSON object or null, got 5"),
    (
        Order,
        {"name": "a", "count": 1, "item": {"sku": "b", "counts": [1, "2"]}},
        'item.counts[1]: expected an integer, got "2"',
    ),
    (Order, {"name": "a", "count": 1, "tags": {"x": "1"}}, 'tags.x: expected an integer, got "1"'),
    (Order, {"name": "a", "count": 1, "pair": [1]}, "pair: expected a list of 2 values, got 1"),
    (Order, {"name": "a", "count": 1, "pair": [1, 2]}, "pair[1]: expected a text, got 2"),
    (Order, {"name": "a", "count": 1, "tag": {}}, "there is no field 'tag'; did you mean 'tags'?"),
    (Node, {"value": 1, "children": [{"value": "2"}]}, 'children[0].value: expected an integer, got "2"'),
    (Size, {"unit": "m"}, "the field 'width' is missing"),
    (Size, {"width": 1, "units": "m"}, "there is no field 'units'; did you mean 'unit'?"),
    (Literal["a", "b"], "c", 'expected one of "a", "b", got "c"'),
    (Literal[1], True, "expected 1, got true"),
    (int | str, 1.5, "expected an integer or a text, got 1.5"),
    (int | None, "a", 'expected an integer or null, got "a"'),
    (list, {}, "expected a list, got an object"),
    (list[int | None], [None, [1, 2, 3]], "[1]: expected an integer or null, got a list of 3 values"),
    (dict[int, str], {"one": "a"}, 'expected an integer as key, got "one"'),
    (float, 10**400, "expected a number, got an integer that is too large"),
    (int, "x" * 99, f'expected an integer, got "{"x" * 40}..."'),
    (list[Positive], [{"value": 1}, {"value": 0}], "[1]: the value must be positive"),
]


@pytest.mark.parametrize(("hint", "value", "text"), INVALID, ids=[row[2] for row in INVALID])
def test_a_value_of_another_type_is_refused_with_its_place(hint: Any, value: Any, text: str) -> None:
    assert refused(hint, value) == text


@pytest.mark.parametrize("hint", [set[int], dict[float, int], Annotated[int, 0.5], bytes | int, complex], ids=str)
def test_a_type_that_json_does_not_express_is_no_hint(hint: Any) -> None:
    with pytest.raises(HintError):
        reader_of(hint)


def test_a_deep_document_is_refused() -> None:
    text = b'{"value":1,"children":[' * 5000 + b"]}" * 5000
    with pytest.raises(BadRequestError, match="nested too deeply"):
        reader_of(Node)(text)


def test_an_enum_is_written_as_its_value() -> None:
    assert json_text(Order("a", 1, color=Color.ONE)).startswith(b'{"name": "a", "count": 1, "price": 0.0')
    assert b'"color": 1' in json_text(Order("a", 1, color=Color.ONE))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, json_values)
def test_any_document_is_built_or_refused_and_a_built_one_has_the_types(count: Any, item: Any) -> None:
    try:
        order = read(Order, {"name": "a", "count": count, "item": item})
    except BadRequestError:
        return
    assert type(order.count) is int
    assert order.item is None or isinstance(order.item, Item)
