"""The changes that are made to recorded cases, and the list of differences that are meant to be."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutated import Accepted, Difference, Fuzz, accepted_differences, units
from mutations import Mutator

HTTP: dict[str, Any] = {
    "id": "one",
    "method": "POST",
    "path": "/v2/models/m/infer",
    "headers": {"Content-Type": "application/json"},
    "body": json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2.5]}]}),
    "compare": "exact",
    "answer": {"status": 200},
    "retry_s": 5,
}
BINARY = HTTP | {"headers": {"Inference-Header-Content-Length": str(len(HTTP["body"]))}, "body": HTTP["body"] + "abcd"}
GRPC: dict[str, Any] = {"id": "two", "method": "ModelInfer", "request": {"model_name": "m"}, "compare": "json"}
STREAM: dict[str, Any] = {"id": "three", "method": "ModelStreamInfer", "requests": [{"id": "a"}], "compare": "json"}
EMPTY = HTTP | {"method": "GET", "path": "/v2", "body": None}


@pytest.mark.parametrize("case", [HTTP, BINARY, GRPC, STREAM, EMPTY], ids=["json", "binary", "grpc", "stream", "empty"])
def test_the_same_seed_changes_a_case_in_the_same_way_and_leaves_it_alone(case: dict[str, Any]) -> None:
    before = json.dumps(case)
    one, other = ([Mutator(random.Random(7)).mutated(case) for _ in range(2)] for _ in range(2))
    assert one == other
    assert json.dumps(case) == before


def test_a_changed_case_waits_for_no_answer_and_is_nearly_always_another() -> None:
    mutator = Mutator(random.Random(3))
    changed = [mutator.mutated(HTTP) for _ in range(300)]
    assert all(not {"answer", "retry_s"} & set(case) and case["compare"] == "json" for case in changed)
    same = [
        case for case in changed if all(case.get(key) == HTTP[key] for key in ("path", "method", "headers", "body"))
    ]
    assert len(same) < 30


def test_the_header_length_follows_the_json_part_nearly_always() -> None:
    mutator = Mutator(random.Random(5))
    tails = 0
    for case in (mutator.mutated(BINARY) for _ in range(200)):
        length = case["headers"].get("Inference-Header-Content-Length", "")
        tails += length.isdigit() and case.get("body", "")[int(length) :] == "abcd"
    assert tails > 80


def test_chains_stay_whole_and_other_cases_by_themselves() -> None:
    cases = [{"id": "a"}, {"id": "b", "chain": "x"}, {"id": "c"}, {"id": "d", "chain": "x"}]
    assert [[case["id"] for case in unit] for unit in units(cases)] == [["a"], ["c"], ["b", "d"]]


def test_every_accepted_difference_has_a_reason_and_says_what_it_covers() -> None:
    rows = accepted_differences()
    nothing = Difference("", "", "", "", "")
    for row in rows:
        assert len(row.why) > 20
        assert not row.covers(nothing), row.why
        for part in (row.case, row.asked, row.theirs, row.ours, row.what):
            re.compile(part)


def test_an_accepted_difference_must_fit_in_all_that_it_says() -> None:
    row = Accepted("because", theirs="^400", ours="^404")
    assert row.covers(Difference("", "", "400 x", "404 y", ""))
    assert not row.covers(Difference("", "", "400 x", "200 y", ""))


class Replay:
    """The replayer, whose servers are lists of what was done with them; that of remora never becomes ready."""

    def __init__(self) -> None:
        self.servers: list[list[str]] = []

    def load_cases(self, path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return {}, [HTTP]

    def Server(self, command: str, *_: object, **__: object) -> Any:  # noqa: N802
        done: list[str] = []
        self.servers.append(done)

        def wait() -> None:
            if "remora serve" in command:
                raise RuntimeError("no such flag")

        target = SimpleNamespace(close=lambda: done.append("closed"))
        return SimpleNamespace(target=target, stop=lambda: done.append("stopped"), wait_until_ready=wait)


def test_a_server_that_does_not_start_is_a_difference_and_leaves_none_running() -> None:
    replay: Any = Replay()
    (difference,) = Fuzz(replay, Path("oracle"), Path("one.jsonl"), "0").differences(1.0)
    assert "no such flag" in difference.ours
    assert not any(row.covers(difference) for row in accepted_differences())
    assert replay.servers == [["closed", "stopped"]] * 2
