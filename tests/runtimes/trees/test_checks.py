"""Refusal of node tables that do not form a tree."""

from __future__ import annotations

import numpy as np
import pytest

from remora.errors import InternalError
from remora_runtimes.trees.checks import check_tree

LEFT, RIGHT, SPLIT = [1, 3, -1, -1, -1], [2, 4, -1, -1, -1], [0, 3, 0, 0, 0]


def check(left: list[int] = LEFT, right: list[int] = RIGHT, split: list[int] = SPLIT) -> int:
    inner = np.array(LEFT) != -1
    return check_tree(np.array(left), np.array(right), np.array(split), inner, 4)


def test_a_tree_is_let_through_with_its_depth() -> None:
    assert check() == 2
    leaf = np.array([-1])
    assert check_tree(leaf, leaf, leaf, leaf == 0, 4) == 0


def test_a_tree_deeper_than_any_that_was_grown_is_refused() -> None:
    def chain(nodes: int) -> int:
        at = np.arange(nodes)
        left, right = np.full(2 * nodes + 1, -1), np.full(2 * nodes + 1, -1)
        left[:nodes], right[:nodes] = at + 1, at + nodes + 1
        return check_tree(left, right, np.zeros_like(left), left != -1, 1)

    assert chain(4096) == 4096
    with pytest.raises(InternalError, match="deeper than 4096"):
        chain(300_000)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"left": [10**8, 3, -1, -1, -1]}, "a child that is not there"),
        ({"left": [-7, 3, -1, -1, -1]}, "a child that is not there"),
        ({"left": [0, 3, -1, -1, -1]}, "a child that is not there"),  # back to the root
        ({"left": [1, 1, -1, -1, -1]}, "two parents"),
        ({"left": [1]}, "without children's numbers"),
        ({"split": [0, 4, 0, 0, 0]}, "not among the 4"),
        ({"split": [-1, 0, 0, 0, 0]}, "not among the 4"),
    ],
)
def test_an_invalid_tree_is_refused(changes: dict[str, list[int]], reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        check(**changes)
