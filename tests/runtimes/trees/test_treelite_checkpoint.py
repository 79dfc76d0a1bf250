"""Refusal of checkpoints that would make Treelite read or write out of bounds.

They are written here, without the library.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from remora.errors import InternalError
from remora_runtimes.trees.treelite_checkpoint import check_checkpoint


def array(values: Any, dtype: str) -> bytes:
    found = np.array(values, dtype)
    return struct.pack("<Q", found.size) + found.tobytes()


TREE: dict[str, tuple[Any, str]] = {
    "node_type": ([1, 2, 0, 0, 0], "i1"),
    "left": ([1, 3, -1, -1, -1], "<i4"),
    "right": ([2, 4, -1, -1, -1], "<i4"),
    "split": ([0, 3, -1, -1, -1], "<i4"),
    "default_left": ([0, 1, 0, 0, 0], "u1"),
    "leaf_value": ([0, 0, 1, 2, 3], "<f4"),
    "threshold": ([0.5, 0, 0, 0, 0], "<f4"),
    "operator": ([2, 0, 0, 0, 0], "i1"),
    "flipped": ([0, 1, 0, 0, 0], "u1"),
    "vectors": ([], "<f4"),
    "vector_begins": ([0] * 5, "<u8"),
    "vector_ends": ([0] * 5, "<u8"),
    "categories": ([4, 7], "<u4"),
    "category_begins": ([0, 0, 2, 2, 2], "<u8"),
    "category_ends": ([0, 2, 2, 2, 2], "<u8"),
    "data_count": ([], "<u8"),
    "data_count_present": ([], "u1"),
    "sum_hess": ([1] * 5, "<f8"),
    "sum_hess_present": ([1] * 5, "u1"),
    "gain": ([], "<f8"),
    "gain_present": ([], "u1"),
}


def checkpoint(**changes: Any) -> bytes:
    """One tree of five nodes over four features; ``changes`` are of `TREE` or of what stands before it."""
    said: dict[str, Any] = {
        "version": (4, 8, 1), "kinds": (2, 2), "trees": 1, "features": 4, "task": 0, "classes": [1], "shape": [1, 1],
        "target": [0], "class": [0], "scores": [0.5], "extras": 0, "nodes": 5, "end": b"",
    }  # fmt: skip
    said |= {key: value for key, value in changes.items() if key in said}
    rows = {key: changes.get(key, values) for key, (values, _) in TREE.items()}
    return b"".join(
        [
            struct.pack("<3i", *said["version"]),
            bytes(said["kinds"]),
            struct.pack("<QiBBi", said["trees"], said["features"], said["task"], 0, 1),
            *(array(said[key], "<i4") for key in ("classes", "shape", "target", "class")),
            array(list(b"sigmoid"), "u1"),
            struct.pack("<2f", 1, 1),
            array(said["scores"], "<f8"),
            array(list(b"{}"), "u1"),
            struct.pack("<i", said["extras"]),
            struct.pack("<iB", said["nodes"], 1),
            *(array(rows[key], dtype) for key, (_, dtype) in TREE.items()),
            struct.pack("<2i", 0, 0),
            said["end"],
        ]
    )


def test_a_forest_is_let_through() -> None:
    check_checkpoint(checkpoint())
    check_checkpoint(
        checkpoint(
            task=2,
            classes=[2],
            shape=[1, 2],
            **{"class": [-1]},
            scores=[0, 0],
            vectors=[1, 2, 3, 4, 5, 6],
            vector_begins=[0, 0, 0, 2, 4],
            vector_ends=[0, 0, 2, 4, 6],
        )
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": (3, 9, 0)}, "version 3.9: load it with Treelite 4"),
        ({"kinds": (1, 1)}, "neither FP32 nor FP64"),
        ({"trees": 2**63}, "instead of 9223372036854775808"),
        ({"trees": 2, "target": [0, 0], "class": [0, 0]}, "wants .* bytes at byte"),
        ({"classes": [0]}, "fewer classes than one"),
        ({"classes": [2**31 - 1]}, "instead of 2147483647"),
        ({"shape": [1, 9]}, "do not match its classes"),
        ({"target": [1]}, "a class that is not there"),
        ({"class": [1]}, "a class that is not there"),
        ({"scores": []}, "has 0 instead of 1"),
        ({"extras": 2**31 - 1}, "a later version"),
        ({"nodes": 2**31 - 1}, "instead of 2147483647"),
        ({"nodes": 0}, "has no nodes"),
        ({"node_type": [1, 2, 0, 0, 9]}, "a child that is not there"),
        ({"node_type": [1, 9, 0, 0, 0]}, "a kind that is not there"),
        ({"left": [10**8, 3, -1, -1, -1]}, "a child that is not there"),
        ({"left": [0, 3, -1, -1, -1]}, "a child that is not there"),
        ({"left": [1, 1, -1, -1, -1]}, "two parents"),
        ({"left": [1, 3, -1, -1, 1]}, "a kind that is not there"),
        ({"right": [2]}, "has 1 instead of 5"),
        ({"split": [0, 4, -1, -1, -1]}, "not among the 4"),
        ({"operator": [9, 0, 0, 0, 0]}, "a kind that is not there"),
        ({"default_left": [2, 0, 0, 0, 0]}, "a kind that is not there"),
        ({"vector_ends": [0, 0, 9, 0, 0]}, "values or categories that are not there"),
        ({"category_ends": [0, 2**40, 2, 2, 2]}, "values or categories that are not there"),
        ({"category_begins": [0, 3, 2, 2, 2]}, "values or categories that are not there"),
        ({"sum_hess": [1]}, "statistics of other nodes"),
        ({"end": b"more"}, "the checkpoint ends at byte"),
    ],
)
def test_an_invalid_forest_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        check_checkpoint(checkpoint(**changes))


def test_a_leaf_without_its_vector_is_refused() -> None:
    with pytest.raises(InternalError, match="leaves without values"):
        check_checkpoint(checkpoint(task=2, classes=[2], shape=[1, 2], **{"class": [-1]}, scores=[0, 0]))


def test_a_checkpoint_cut_anywhere_is_refused() -> None:
    whole = checkpoint()
    for end in range(len(whole)):
        with pytest.raises(InternalError):
            check_checkpoint(whole[:end])
