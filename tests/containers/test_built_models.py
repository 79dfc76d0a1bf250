"""The context of `remora build`, built by buildah without flags and run: a function that needs a package."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import free_ports
from containers.conftest import unpacked
from remora.cli import main
from support.process.small_wheels import write_wheel

APP = """
import remora
import remora_probe

@remora.model
def answer(x: int) -> int:
    return x + remora_probe.ANSWER
"""

pytestmark = pytest.mark.timeout(900)


def test_the_image_of_a_function_serves_it_on_a_read_only_root(
    buildah: list[str], base: str, context: Path, tmp_path: Path, figures: list[str]
) -> None:
    wheels = tmp_path / "wheels"
    shutil.copytree(context / "dist", wheels)
    write_wheel(wheels, "remora-probe", "1.2", "ANSWER = 42\n")
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "requirements.txt").write_text("remora-probe>=1\n")
    target = tmp_path / "context"
    words = ["--wheels", str(wheels), "--base-image", base, "--output", str(target)]
    assert main(["build", str(tmp_path / "app.py"), *words]) == 0
    tag = "localhost/remora-function:test"
    command = [*buildah, "build", "--quiet", "--isolation=chroot", "--pull=never", "--tag", tag, str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    image: Any = unpacked(buildah, "function", tag)
    http, grpc, metrics = free_ports(3)
    flags = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    with image.running([*image.config.get("Cmd", ()), *flags], uid=10001, mounts={}, environment={}) as container:
        container.answer(f"http://127.0.0.1:{http}/v2/health/ready")
        answered = container.answer(f"http://127.0.0.1:{http}/models/answer", b'{"x": 4}')
        assert json.loads(answered) == {"output": 46}
        assert container.stop() == 0
        assert "making an environment" not in container.said()
    figures.append("function: built by buildah build CONTEXT, without flags")
