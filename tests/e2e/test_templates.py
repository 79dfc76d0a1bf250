"""Projects of `remora init`: each is served by the command that it names, and answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from conftest import free_ports
from remora.cli import main
from remora_tools.functions import TEMPLATES
from support.servers.live_server import client, process, until

# Stands for the package in environments without it: torch and a model take gigabytes.
TRANSFORMERS = """
def pipeline(task, model, device):
    assert (task, device) == ("text-classification", "cpu")
    return lambda texts: [{"label": "POSITIVE" if "good" in text else "NEGATIVE", "score": 0.75} for text in texts]
"""
REQUESTS: dict[str, tuple[str, Any, Any]] = {
    "function": ("distance", {"points": [[3, 4], [6, 8]]}, {"output": [5.0, 10.0]}),
    "ensemble": ("longest_word", {"text": "a long sentence"}, {"output": "sentence"}),
    "hugging-face": (
        *("sentiment", {"text": ["good", "bad"]}),
        {"label": ["POSITIVE", "NEGATIVE"], "score": [0.75, 0.75]},
    ),
    "onnx": ("linear", {"x": [[1, 1, 1], [0, 0, 1]]}, {"y": [6.5, 3.5]}),
    "triton-python": ("double", {"x": [1, 2, 3]}, {"y": [2.0, 4.0, 6.0]}),
}


def test_every_template_has_a_request() -> None:
    assert REQUESTS.keys() == TEMPLATES.keys()


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_project_is_served_by_its_command_and_answers(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if template == "onnx":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    assert main(["init", str(tmp_path / "new"), "--template", template]) == 0
    served = capsys.readouterr().out.splitlines()[-1].removeprefix("serve it: remora serve ")
    if template == "hugging-face":
        assert (tmp_path / "new" / "requirements.txt").read_text().split() == ["torch", "transformers"]
        (tmp_path / "new" / "requirements.txt").unlink()
        (tmp_path / "new" / "transformers.py").write_text(TRANSFORMERS)
    name, body, expected = REQUESTS[template]
    (port,) = free_ports(1)
    with process(Path(served), port, dict(os.environ)) as server:
        until(port, "/v2/health/ready", server)
        with client(port) as connection:
            connection.request("POST", f"/models/{name}", json.dumps(body))
            reply = connection.getresponse()
            assert (reply.status, json.loads(reply.read())) == (200, expected)
