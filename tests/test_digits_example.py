"""What `make serve` runs: the digits example shows the answer of the server that it started."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from conftest import DIGITS, Digits


@pytest.fixture
def other_server() -> Iterator[int]:
    """The port of a server that says to everything that it is ready."""

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_a_port_of_another_server_ends_the_example_with_the_way_out(
    digits: Digits, other_server: int, child_environment: dict[str, str]
) -> None:
    words = [sys.executable, str(DIGITS / "demo.py"), "--models", str(digits.models), "--http-port", str(other_server)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False, env=child_environment)
    assert done.returncode == 1
    assert "The same by hand" not in done.stdout
    assert f"make serve PORT={other_server + 10}" in done.stderr
    assert "is another server there? Choose another --http-port" in done.stderr


@pytest.mark.parametrize(("printed", "ready"), [("models\\nREADY after 1 s\\nmore", True), ("cannot start", False)])
def test_the_child_itself_says_that_it_is_ready(
    printed: str, ready: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DIGITS))
    demo = importlib.import_module("demo")
    words = [sys.executable, "-c", f"import sys; sys.stderr.write('{printed}')"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as child:
        assert demo.wait_until_ready(child) is ready
        for thread in threading.enumerate():
            if thread.name == "output of the server":
                thread.join()
    assert capsys.readouterr().err == printed.replace("\\n", "\n")
