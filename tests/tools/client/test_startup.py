"""`remora startup` against real servers, and the ledger of a real process."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from typing import Any

import pytest

from remora.cli import main
from remora_tools.client.startup import as_text


def test_the_phases_of_a_real_process_sum_to_its_age(
    digits: Any, serving: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process's age is the kernel's figure; the phases are read from another clock, which may be a while later."""
    begin = time.monotonic()
    with serving(digits.models) as server:
        url = f"http://127.0.0.1:{server.http}"
        report = {"ready": False}
        while not report["ready"]:  # HTTP answers before gRPC is there; the test's timeout ends this
            assert main(["startup", "--url", url, "--json-out"]) == 0
            report = json.loads(capsys.readouterr().out)
        seen_ms = (time.monotonic() - begin) * 1e3
        assert main(["startup", "--url", url, "--imports"]) == 0
        text = capsys.readouterr().out
        metrics = f"http://127.0.0.1:{server.metrics}/metrics"
        page = urllib.request.urlopen(metrics, timeout=60).read().decode()
    # Its last line is written when it is ready.
    told = re.search(r"READY after ([\d.]+) s", server.log.read_text())
    assert told
    age_ms = float(told[1]) * 1e3
    phases_ms = sum(phase["ms"] for phase in report["phases"])
    assert phases_ms > 0.98 * age_ms - 15, "to 2 %, and what is rounded away of a READY line"
    assert phases_ms < 1.02 * seen_ms + 15
    assert phases_ms == pytest.approx(report["total_ms"], abs=0.01)
    assert "session" in text
    assert "numpy" in text
    assert 'remora_startup_phase_seconds{phase="interpreter"}' in page


def test_a_report_is_shown_as_tables() -> None:
    report = {
        "ready": True,
        "total_ms": 100.0,
        "first_answer_ms": 120.0,
        "phases": [{"phase": "interpreter", "begin_ms": 0.0, "ms": 40.0}],
        "models": [
            {"model": "m", "step": "download", "begin_ms": 50.0, "ms": 30.0, "bytes": 3_000_000, "mb_per_s": 100}
        ],
        "imports": [{"module": "numpy", "begin_ms": 40.0, "ms": 25.0, "within": "remora.engine"}],
    }
    text = as_text(report, imports=False)
    assert "m download" in text
    assert "3.0 MB, 100 MB/s" in text
    assert text.startswith("ready after 100 ms, first answer after 120 ms\n\n")
    assert "numpy" not in text
    assert "slow imports: 1, shown with --imports" in text
    assert "numpy" in as_text(report, imports=True)
