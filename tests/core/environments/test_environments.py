"""Progress of an installation of packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.environments import _Progress


def test_installed_packages_are_counted_with_the_total_of_pips_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    (site / "pip-24.0.dist-info").mkdir(parents=True)
    progress = _Progress("model 'm'", tmp_path)
    with caplog.at_level("INFO", logger="remora.models"):
        progress.read("Collecting one==1 (from -r requirements.txt)")
        progress.update()
        progress.read("Installing collected packages: one, two, three")
        progress.update()
        for name in ("one", "two"):
            (site / f"{name}-1.dist-info").mkdir()
        progress.update()
        progress.update()
        (site / "three-1.dist-info").mkdir()
        progress.update()
    assert [record.message for record in caplog.records] == [
        "model 'm': installing one",
        "model 'm': installed 2 of 3 packages",
        "model 'm': installed 3 of 3 packages",
    ]
