"""Lists that are built and freed in steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.json.long_lists import extend, release


@given(st.lists(st.integers()), st.lists(st.lists(st.integers())))
def test_a_list_is_extended_by_the_elements_of_all_parts(before: list[int], parts: list[list[int]]) -> None:
    values = list(before)
    extend(values, iter(parts), sum(map(len, parts)))
    assert values == before + [each for part in parts for each in part]


def test_a_list_is_not_moved_while_it_grows() -> None:
    values: list[int] = []
    sizes: list[int] = []

    def parts() -> Iterator[list[int]]:
        for _ in range(10):
            yield [0] * 1_000
            sizes.append(sys.getsizeof(values))

    extend(values, parts(), 10_000)
    assert len(values) == 10_000
    assert min(sizes) == max(sizes) >= 10_000 * 8


@pytest.mark.parametrize("document", [[[1, [2, {"a": [3]}]]] * 50, {"a": [[1]] * 50, "b": {"c": [1] * 50}}, [], 7])
def test_all_containers_of_a_released_document_are_empty(document: Any) -> None:
    inner = document.get("a") if isinstance(document, dict) else document
    release(document)
    assert not inner or inner == 7
    assert not document or document == 7
