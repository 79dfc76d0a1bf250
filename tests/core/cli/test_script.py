"""Server of a script's own models."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from remora.cli.script import serve
from remora.functions import ModelDefinitionError, model
from support.servers.live_server import client, free_port, until

SCRIPT = """
import remora

@remora.model(isolation="thread")
def double(x: float) -> float:
    return 2 * x

@remora.model(isolation="thread")
def hidden(x: float) -> float:
    return x

if __name__ == "__main__":
    raise SystemExit(remora.serve(double, http_port={port}, allow_grpc=False, allow_metrics=False))
"""


def test_a_script_serves_the_models_that_it_names_until_sigterm(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "app.py").write_text(SCRIPT.format(port=port))
    server = subprocess.Popen([sys.executable, "app.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        until(port, "/v2/health/ready", server)
        with client(port) as connection:
            connection.request("POST", "/v2/models/double/generate", '{"x": 1.5}')
            assert b'"output":3.0' in connection.getresponse().read()
            connection.request("GET", "/v2/models/hidden")
            assert connection.getresponse().status == 404
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()


def test_only_variables_of_the_script_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[__name__])  # a parallel run has a main without a file
    with pytest.raises(ModelDefinitionError, match="is not a variable of"):
        serve(model(name="unknown")(lambda x: x))


def test_a_program_without_a_file_is_refused() -> None:
    code = "import remora\nremora.serve()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "remora.serve needs a script; in a notebook use remora.Engine(models=[...])" in done.stderr
