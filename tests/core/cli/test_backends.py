"""`remora backends`: the table, and that it knows every built-in backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora import plugins
from remora.cli import main
from remora.cli.backends import table
from remora.system.install_advice import install_command


def rows(installed: dict[str, str], gpus: int = 0) -> dict[str, tuple[str, ...]]:
    return {
        row[0]: row[1:]
        for row in table(installed.get, gpus, [("linear", "linear-backend 1.0"), ("python", "")], ["mine"])
    }


def test_every_backend_of_the_project_is_listed() -> None:
    assert set(plugins.BACKENDS) <= set(rows({}))


def test_what_is_missing_comes_with_the_line_that_installs_it() -> None:
    found = rows({"torch": "2.13.0"})
    assert found["pytorch"] == ("torch 2.13.0", "CPU", "model.pt, model.pt2")
    assert found["openvino"] == ("not installed", "", "model.xml, model.onnx", install_command("openvino"))
    assert found["native"][:2] == ("built in", "CPU")


def test_gpus_are_reported_if_the_installed_build_can_use_them() -> None:
    assert rows({"onnxruntime": "1.20"}, 2)["onnxruntime"][1] == "CPU"
    assert rows({"onnxruntime-gpu": "1.20"}, 2)["onnxruntime"][1] == "CPU, 2 GPUs"
    assert rows({"torch": "2.13.0+cpu"}, 1)["pytorch"][1] == "CPU"
    assert rows({"torch": "2.13.0"}, 1)["pytorch"][1] == "CPU, 1 GPU"


def test_backends_of_others_are_listed_once() -> None:
    found = rows({})
    assert found["linear"] == ("linear-backend 1.0", "", "")
    assert found["mine"][0] == "in the backend directory"
    assert found["python"][0] == "built in"


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, file in (("one", "backend.py"), ("two", "model.py"), ("three", "libremora_three.so"), ("four", "readme")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    assert main(["backends", "--backend-directory", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("BACKEND")
    assert [name for name in ("one", "two", "three", "four") if f"\n{name} " in printed] == ["one", "two", "three"]
