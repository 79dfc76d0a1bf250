"""How the emulators find a server's ports: also one that closes a file, or opens its ports, while it is looked at."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from conftest import START_TIMEOUT_S
from remora.cli import main
from remora_deploy.emulate import EmulateSettings, find_platform
from remora_deploy.emulate.process import Process
from remora_deploy.emulate.stage import Stage
from support.models.python_models import write_echo

LISTENS = "import signal, socket; kept = socket.create_server(('127.0.0.1', 0)); signal.pause()"
LATE = """
import http.server, os, socket
with socket.create_server(("127.0.0.1", 0)) as other:
    other.accept()[0].close()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

    http.server.HTTPServer(("0.0.0.0", int(os.environ["SAGEMAKER_BIND_TO_PORT"])), Handler).serve_forever()
"""


def test_a_file_that_is_closed_while_it_is_looked_at_hides_no_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process([sys.executable, "-c", LISTENS], os.environ, tmp_path / "log.txt")
    try:
        while not (ports := process.listening()):
            assert process.running, process.log_tail()
        closed, readlink = iter([True]), os.readlink

        def look(path: Path) -> str:
            if next(closed, False):
                raise FileNotFoundError(path)
            return readlink(path)

        monkeypatch.setattr(os, "readlink", look)
        assert process.listening() == ports
    finally:
        process.kill()


def test_a_server_that_opens_another_port_first_is_probed_once_its_own_port_is_open() -> None:
    settings = EmulateSettings(command=(sys.executable, "-c", LATE), startup_s=START_TIMEOUT_S)
    with Stage(find_platform("sagemaker"), settings) as stage:
        stage.wait_until_ready()
        assert stage.ready
        assert stage.address.port == stage.launch.port


def test_a_folder_is_served_by_the_platforms_own_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_echo(tmp_path, "INT32")
    code = main(["emulate", "kserve", str(tmp_path), "--only", "sigterm-exit", "--format", "json"])
    shown = capsys.readouterr()
    assert code == 0, shown
    assert [row["outcome"] for row in json.loads(shown.out)] == ["passed"]


def test_a_file_that_is_no_command_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.onnx").write_text("")
    assert main(["emulate", "kserve", str(tmp_path / "model.onnx")]) == 2
    assert "model.onnx' is a file and no command: pass the folder with the models" in capsys.readouterr().err
