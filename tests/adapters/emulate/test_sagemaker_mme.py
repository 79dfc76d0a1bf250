"""The multi-model checks against small servers, each right but for one fault: exactly the check meant for it fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from remora_adapters.emulate import Settings
from remora_adapters.emulate.running import FAILED, SKIPPED, play
from remora_adapters.emulate.sagemaker_mme import MODELS, PLATFORM

SERVER = Path(__file__).parent / "faulty_sagemaker_mme.py"
FAULTS = {
    "": set(),
    "needs-model": {"ready"},
    "list-null": {"list-empty"},
    "no-load": {"load"},
    "bad-show": {"show"},
    "load-again": {"load-again"},
    "by-target": {"invoke"},
    "unknown-400": {"unknown"},
    "shared": {"apart"},
    "any-url": {"below-root"},
    "bad-500": {"bad-load"},
    "blocks": {"ping-while-loading"},
    "stale": {"unload"},
    "leaks": {"memory"},
    "oom-400": {"out-of-memory"},
}


@pytest.mark.parametrize(("fault", "expected"), FAULTS.items(), ids=lambda value: value or "none")
def test_a_fault_fails_exactly_the_check_that_is_there_for_it(fault: str, expected: set[str], tmp_path: Path) -> None:
    for name in ("model", "large"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"1" * (8 << 20))
    (tmp_path / "large" / "too-large").write_text("")
    settings = Settings(
        command=(sys.executable, str(SERVER)),
        model=tmp_path / "model",
        body=b"[1]",
        # The second keeps the allocator from holding on to a model of the miniature for the next one.
        environ={"FAULT": fault, "MALLOC_MMAP_THRESHOLD_": "65536"},
        startup_s=1.0 if fault == "needs-model" else 20.0,
        given={"oom-model": str(tmp_path / "large")},
    )
    verdicts = play(PLATFORM, settings)
    assert {row.id for row in verdicts if row.outcome == FAILED} == expected, verdicts
    if not fault:
        assert not [row for row in verdicts if row.outcome == SKIPPED]


def test_every_check_of_the_multi_model_api_has_a_fault_planted_for_it() -> None:
    assert {check.id for check in MODELS} <= set().union(*FAULTS.values())


def test_without_a_folder_or_a_body_the_checks_that_need_one_are_skipped_with_the_reason() -> None:
    settings = Settings(command=(sys.executable, str(SERVER)), startup_s=20.0)
    rows = {row.id: row for row in play(PLATFORM, settings, ["load", "unknown", "memory"])}
    assert (rows["load"].outcome, rows["unknown"].outcome) == (SKIPPED, "passed")
    assert "--model DIR" in rows["load"].found
