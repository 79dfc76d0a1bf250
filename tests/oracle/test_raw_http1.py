"""Raw bytes over HTTP/1 have the outcome that Triton gave, or the one that the recording gives a reason for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Serving
from support.servers.real_triton import needs_triton, triton_server

sys.path.insert(0, str(Path(__file__).parent))

from raw_http1 import Case, answers_in, outcomes, recording, without_bodies, write_model

REASONS, CASES = recording()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> dict[str, dict[str, Any]]:
    """Outcomes of a server of ours by case."""
    models = tmp_path_factory.mktemp("raw") / "models"
    write_model(models)
    with serving(models) as server:
        played = outcomes(server.http, CASES, [case.expected for case in CASES])
        return dict(zip((case.id for case in CASES), played, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bytes_have_the_outcome_of_triton_or_the_one_with_a_reason(
    case: Case, found: dict[str, dict[str, Any]]
) -> None:
    outcome = found[case.id]
    assert case.matches(outcome), f"expected {case.expected}, found {outcome}"


def test_each_intended_difference_is_one_and_has_a_reason() -> None:
    differing = [case for case in CASES if case.here is not None]
    assert {case.reason for case in differing} == set(REASONS)
    for case in differing:
        assert case.here not in [without_bodies(outcome) for outcome in case.triton] or len(case.triton) > 1, case.id


def test_no_recorded_outcome_stays_without_one_of_ours_if_triton_gave_several() -> None:
    assert all(case.here is not None for case in CASES if len(case.triton) > 1)


@needs_triton
def test_triton_gives_the_recorded_outcomes(tmp_path: Path) -> None:
    steady = [case for case in CASES if len(case.triton) == 1]
    write_model(tmp_path / "models")
    with triton_server(tmp_path / "models", tmp_path / "triton.log") as ports:
        seen = outcomes(ports[0], steady, [case.triton[0] for case in steady])
    assert {case.id: outcome for case, outcome in zip(steady, seen, strict=True)} == {
        case.id: case.triton[0] for case in steady
    }


@pytest.mark.parametrize(
    ("data", "answers"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", [(200, "{}")]),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{", []),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad Request\r\n\r\n", [(100, ""), (400, "")]),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", [(200, "{}")]),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", []),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", [(200, ""), (200, "")]),
    ],
    ids=["whole", "cut", "interim", "chunked", "chunked and cut", "to a HEAD"],
)
def test_answers_are_read_from_raw_bytes(data: bytes, answers: list[tuple[int, str]]) -> None:
    assert [(answer["status"], answer["body"]) for answer in answers_in(data)] == answers
