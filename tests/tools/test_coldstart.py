"""`remora bench coldstart` against real servers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from remora.cli import main


@pytest.mark.parametrize("budget", ["0s", "-1s", "soon", "5h"])
def test_a_budget_is_a_time(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "coldstart", f"--budget={budget}", "models"])
    assert "expected a time such as 2s or 1500ms" in capsys.readouterr().err


def test_a_start_is_measured_and_a_budget_decides(
    digits: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "coldstart", str(digits.models), "--serve=--allow-grpc=false", "--save", str(tmp_path / "report")]
    assert main([*words, "--budget=100s", "--json-out"]) == 0
    report = json.loads(capsys.readouterr().out)
    loaded_ms = max(step["begin_ms"] + step["ms"] for step in report["models"])
    assert report["first_answer_ms"] >= loaded_ms > 0, "it may come just before all else is ready"
    assert report["total_ms"] >= loaded_ms
    assert {step["step"] for step in report["models"]} >= {"config", "session"}
    assert main([*words, "--budget=1ms", "--baseline", str(tmp_path / "report")]) == 1
    said = capsys.readouterr()
    first_line = said.out.splitlines()[0]
    assert re.fullmatch(r"first answer \d+\.\d s, over the budget of 0\.001 s", first_line)
    assert re.search(r"took \d+ ms, \d+ ms over its budget of 1 ms: '[a-zA-Z ]+' took", said.err)
    assert "interpreter" in said.out


def test_a_server_that_does_not_start_fails_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "coldstart", str(tmp_path / "absent")]) == 1
    assert "absent" in capsys.readouterr().err
