"""Temporary folders: what ends with their process, and what the next start removes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import needs
from remora.system.temporary_folders import TemporaryFolder, remove_left_behind

KILLED = """
import os, signal
{making}
os.kill(os.getpid(), signal.SIGKILL)
"""
MAKERS = {
    "sent": 'from remora.repository.sent import SentModel\nkept = SentModel("m", {"1/model.onnx": b"x"})',
    "models": (
        "from remora.repository.functions import ObjectModels\n"
        "def double(x: int) -> int: return 2 * x\nkept = ObjectModels([double])"
    ),
    "sagemaker": "import os, remora_adapters.sagemaker as sagemaker\nkept = sagemaker.host(os.environ)",
    "capture": 'from remora.system.temporary_folders import TemporaryFolder\nkept = TemporaryFolder("capture")',
}


def test_a_folder_is_removed_with_its_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = TemporaryFolder("sent")
    assert list(folder.path.iterdir()) == []
    del folder
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs("remora_adapters") if kind == "sagemaker" else ()) for kind in MAKERS]
)
def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lives = TemporaryFolder(kind)
    (tmp_path / f"remora-{kind}-of-another").mkdir()
    (tmp_path / "remora-link").symlink_to(tmp_path / f"remora-{kind}-of-another")
    others = {path.name for path in tmp_path.iterdir()}
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "SAGEMAKER_MULTI_MODEL": "true",
    }
    code = KILLED.format(making=MAKERS[kind])
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    left = {path.name for path in tmp_path.iterdir()} - others
    assert [name.startswith(f"remora-{kind}-") for name in left] == [True], ended.stderr
    remove_left_behind()
    assert {path.name for path in tmp_path.iterdir()} == others
    assert lives.path.is_dir()
