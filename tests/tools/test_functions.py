"""Commands `init` and `export`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from remora.cli import main
from remora_tools.functions import TEMPLATES


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_written_and_its_serve_command_shown(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "new"), "--template", template]) == 0
    assert "serve it: remora serve" in capsys.readouterr().out
    for name in TEMPLATES[template]:
        wanted = TEMPLATES[template][name]
        assert (tmp_path / "new" / name).read_bytes() == (wanted if isinstance(wanted, bytes) else wanted.encode())


def test_existing_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "app.py").write_text("mine")
    assert main(["init", str(tmp_path)]) == 1
    assert "app.py exists: name another folder" in capsys.readouterr().err
    assert (tmp_path / "app.py").read_text() == "mine"


def test_the_test_of_the_function_template_passes(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path)]) == 0
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_app.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_script_of_the_onnx_template_writes_its_model(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    assert main(["init", str(tmp_path), "--template", "onnx"]) == 0
    model = tmp_path / "models" / "linear" / "1" / "model.onnx"
    written = onnx.load(model)
    model.unlink()
    subprocess.run([sys.executable, tmp_path / "make_model.py"], check=True)
    assert onnx.load(model) == written


def test_export_refuses_a_folder_with_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["export", str(tmp_path), "app.py"]) == 1
    assert "is not an empty folder" in capsys.readouterr().err


def test_export_reports_what_is_wrong_with_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "gone.py")]) == 1
    assert "no such file" in capsys.readouterr().err
