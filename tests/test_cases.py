"""Cases of docs/cases.md: each runs, with the results that its page names. Their figures are not compared."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

CASES = ROOT / "docs" / "examples" / "cases"


def figures_of(environment: dict[str, str], script: str, *flags: str) -> dict[str, str]:
    """Return what a case printed."""
    command = [sys.executable, str(CASES / script), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in done.stdout.splitlines())


def test_a_gru_keeps_the_state_of_each_card(child_environment: dict[str, str]) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[demo]'")
    found = figures_of(child_environment, "fraud.py", "--seconds", "0.5", "--rate", "0")
    assert int(found["payments"].replace(",", "")) > 0
    assert int(found["different scores"].replace(",", "")) > 100
    assert float(found["p50 ms"]) > 0


def test_texts_are_corrected_before_their_deadline(child_environment: dict[str, str]) -> None:
    found = figures_of(child_environment, "correction.py", "--seconds", "2", "--users", "2")
    assert int(found["sentences"].replace(",", "")) > 0
    assert float(found["misspelt words found again"].rstrip("%")) > 80


def test_models_are_updated_without_a_lost_request(child_environment: dict[str, str]) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[demo]'")
    found = figures_of(child_environment, "hundred_models.py", "--models", "12", "--clients", "2")
    assert (found["models updated"], found["lost"], found["versions after"]) == ("12", "0", "2")


def test_the_page_has_the_command_of_each_case() -> None:
    page = (ROOT / "docs" / "cases.md").read_text()
    for script in CASES.glob("*.py"):
        if script.name not in ("serving.py", "correction_app.py"):
            assert f"python {Path('docs/examples/cases') / script.name}" in page
