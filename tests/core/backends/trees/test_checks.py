"""What is no tree is refused."""

from __future__ import annotations

import numpy as np
import pytest

from remora.backends.trees.checks import check_tree
from remora.errors import InternalError

LEFT, RIGHT, SPLIT = [1, 3, -1, -1, -1], [2, 4, -1, -1, -1], [0, 3, 0, 0, 0]


def check(left: list[int] = LEFT, right: list[int] = RIGHT, split: list[int] = SPLIT) -> None:
    inner = np.array(LEFT) != -1
    check_tree(np.array(left), np.array(right), np.array(split), inner, 4)


def test_a_tree_is_let_through() -> None:
    check()


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
def test_what_is_no_tree_is_refused(changes: dict[str, list[int]], reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        check(**changes)
