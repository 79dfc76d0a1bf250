"""`remora cost`: the table, the JSON, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from remora.cli import main

BURSTS = "".join(f"{hour * 3600 + second}\n" for hour in range(3) for second in range(0, 300, 10))


@pytest.fixture
def log(tmp_path: Path) -> str:
    """Three hours, five busy minutes in each."""
    path = tmp_path / "requests.log"
    path.write_text(BURSTS)
    return str(path)


def test_bursts_with_long_pauses_are_cheaper_without_an_instance_between(
    log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cost", log, "--price", "1", "--cold-start", "60", "--most-delayed", "20", "--json-out"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 90
    assert found["break_even_gap_s"] == 60
    assert found["best"]["starts"] == 2
    assert found["best"]["cost"] < found["always_on"]["cost"] / 4
    assert found["always_on"]["retention_s"] is None


def test_the_table_marks_the_cheapest_and_says_what_it_saves(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", log, "--price", "1", "--cold-start", "60", "--per-request", "0.01"]) == 0
    said = capsys.readouterr().out
    assert said.count("<- cheapest") == 1
    assert "a pause of 60 s" in said
    assert "always on is cheaper from 100 requests an hour" in said


def test_where_waiting_is_dear_the_instance_stays(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", log, "--price", "1", "--cold-start", "600", "--delayed", "1"]) == 0
    assert "nothing saved: keep it on" in capsys.readouterr().out


def test_standard_input_is_a_log_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n2\n"))
    assert main(["cost", "-", "--price", "1", "--cold-start", "1"]) == 0
    assert capsys.readouterr().out.startswith("2 requests")


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["--price", "1", "--cold-start", "1"], "no time", 2),
        (["--price", "1", "--cold-start", "1", "absent"], "absent", 1),
    ],
)
def test_a_log_that_cannot_be_read_is_reported_in_one_line(
    arguments: list[str], said: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.log"
    wrong.write_text("no time here\n")
    given = arguments if len(arguments) > 4 else [*arguments, str(wrong)]
    assert main(["cost", *given]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("wrong", [["--price", "-1"], ["--price", "nan"], ["--price", "x"]])
def test_amounts_are_numbers_that_are_not_negative(wrong: list[str], log: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cost", log, "--cold-start", "1", *wrong])
    assert ended.value.code == 2
