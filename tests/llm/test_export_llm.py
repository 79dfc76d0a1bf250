"""Command `export-llm`, with a script in place of the exporter's interpreter."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from remora.cli import main
from remora_llm.export_llm import TOOLS
from support.process.makefiles import make_text

EXPORTER = """#!/bin/sh
# env HF_HUB_OFFLINE=1 PYTHON -m MODULE -i SOURCE -o TARGET -p PRECISION -e DEVICE -c CACHE
echo "$HF_HUB_OFFLINE $2 $8 ${10}"
[ -e "$4/broken" ] && exit 3
mkdir -p "$6" && cp "$4/config.json" "$6/genai_config.json"
"""


@pytest.fixture
def exporter(tmp_path: Path) -> str:
    script = tmp_path / "python"
    script.write_text(EXPORTER)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "repository" / "chat" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def test_a_folder_is_exported_and_its_serve_command_shown(
    exporter: str, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export-llm", str(source), "--python", exporter, "--precision", "fp32"]) == 0
    out, err = capfd.readouterr()
    assert (tmp_path / "models" / "chat" / "1" / "genai_config.json").is_file()
    assert "serve it: remora serve models" in out
    assert "1 onnxruntime_genai.models.builder fp32 cpu" in err
    assert not list((tmp_path / "models" / "chat").glob(".*"))


def test_a_failed_export_leaves_nothing_and_names_the_status(
    exporter: str, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (source / "broken").touch()
    model = tmp_path / "models" / "m"
    assert main(["export-llm", str(source), "--python", exporter, "--output", str(model)]) == 1
    assert "the exporter ended with status 3" in capfd.readouterr().err
    assert list(model.iterdir()) == []


@pytest.mark.parametrize(
    ("remove", "add", "words"),
    [
        ("config.json", "", "has no config.json"),
        ("model.safetensors", "", "has no weights"),
        ("", "genai_config.json", "exported already"),
    ],
)
def test_a_folder_that_cannot_be_exported_is_refused(
    remove: str, add: str, words: str, source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if remove:
        (source / remove).unlink()
    if add:
        (source / add).touch()
    assert main(["export-llm", str(source)]) == 2
    assert words in capfd.readouterr().err


def test_an_existing_version_is_not_overwritten(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export-llm", str(source), "--output", str(source.parent)]) == 2
    assert "exists: name another folder" in capfd.readouterr().err


def test_without_a_package_index_the_way_out_is_named(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["export-llm", str(source), "--output", str(tmp_path / "m")]) == 1
    err = capfd.readouterr().err
    assert "cannot install" in err
    assert "pass its interpreter by --python" in err


def test_make_llm_installs_the_same_tools() -> None:
    (found,) = re.findall(r"^LLM_TOOLS := (.*)$", make_text(), re.MULTILINE)
    assert tuple(found.split()) == TOOLS
