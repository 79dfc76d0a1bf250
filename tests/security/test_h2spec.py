"""h2spec, the conformance tests of HTTP/2, against a server whose HTTP port also takes HTTP/2.

h2spec is not a Python package. Put it on PATH: it builds with Go and Debian's golang-github-spf13-cobra-dev,
golang-github-fatih-color-dev and golang-golang-x-net-dev, or comes with its releases.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.servers.live_server import free_port, process, until

PATIENCE_S = 1_500.0
CASE_S = 10
"""What a case waits for a frame. Only a case that fails waits so long, so that a busy machine fails none."""
LEAST_PASSED = 145
"""Of 146. The other one sends no preface, so the port answers it as HTTP/1.1."""
H2SPEC = shutil.which("h2spec")


@pytest.mark.skipif(H2SPEC is None, reason="h2spec is not on PATH")
def test_h2spec_passes_as_much_as_it_did(tmp_path: Path, child_environment: dict[str, str]) -> None:
    (tmp_path / "models").mkdir()
    port = free_port()
    with process(
        tmp_path / "models", port, child_environment, "--allow-grpc=true", "--grpc-on-http-port=true"
    ) as server:
        until(port, "/v2/health/live", server)
        # A path whose answer has a body, because some cases wait for a DATA frame.
        command = [str(H2SPEC), "--host=127.0.0.1", f"--port={port}", "--path=/v2", f"--timeout={CASE_S}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        until(port, "/v2/health/live", server)
    found = re.search(r"(\d+) tests, (\d+) passed", done.stdout)
    assert found is not None, done.stdout + done.stderr
    print(found[0])
    assert int(found[2]) >= LEAST_PASSED, done.stdout[done.stdout.index("Failures") :]
