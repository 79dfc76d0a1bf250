"""`remora models` against a real server: index, load with what is sent along, unload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remora.cli import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["models", *words])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_model_is_loaded_with_files_sent_along_and_unloaded(
    digits: Any, serving: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.pbtxt").write_text('backend: "onnxruntime"')
    weights = digits.models / "digits" / "1" / "model.onnx"
    with serving(digits.models, "--model-control-mode=explicit", "--allow-grpc=false") as server:
        url = f"--url=http://127.0.0.1:{server.http}"
        assert run(capsys, "index", url, "--json-out") == (0, json.dumps([{"name": "digits"}], indent=2) + "\n")
        sent = ("--config", str(tmp_path / "config.pbtxt"), "--file", f"7/model.onnx={weights}")
        assert run(capsys, "load", "elsewhere", url, *sent)[0] == 0
        assert main(["infer", "elsewhere", "--version=7", "--random", url]) == 0
        assert run(capsys, "unload", "elsewhere", url)[0] == 0
        assert main(["infer", "elsewhere", "--random", url]) == 1
        assert run(capsys, "load", "elsewhere", url)[0] == 1, "nothing of it is in the repository"
