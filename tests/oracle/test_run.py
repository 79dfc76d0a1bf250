"""What the replayer found, held to the list of known differences: only cases that were replayed count."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run import ids_of, judge


def report(*differing: str) -> dict[str, Any]:
    rows = [{"id": case, "file": "f", "shows": "x", "what": "y"} for case in differing]
    return {"mismatches": rows, "files": {"f": "1/2"}, "score": "1/2"}


@pytest.mark.parametrize(
    ("differing", "listed", "replayed", "failed"),
    [
        ((), (), "ab", 0),
        (("a",), ("a",), "ab", 0),
        (("a",), (), "ab", 1),
        ((), ("a",), "ab", 1),
        ((), ("a",), "b", 0),
    ],
    ids=["all equal", "listed and differs", "a surprise", "listed but equal", "listed, of a file left out"],
)
def test_exactly_the_listed_cases_that_were_replayed_may_differ(
    differing: tuple[str, ...], listed: tuple[str, ...], replayed: str, failed: int
) -> None:
    expected = dict.fromkeys(listed, "because")
    assert judge(report(*differing), expected, set(replayed), show_listed=False) == failed


def test_the_cases_of_a_file_are_those_with_an_id_wherever_it_lies(tmp_path: Path) -> None:
    rows = [{"setup": {"flags": []}}, {"id": "a"}, {"id": "b"}]
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert ids_of(tmp_path / "one.jsonl") == {"a", "b"}
