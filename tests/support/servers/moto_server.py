"""Server of `aws_stand_in` in a separate environment (`make .venv-storage/stamp`)."""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, end
from support.process.eventually import eventually

STAND_IN = Path(__file__).with_name("aws_stand_in.py")
PYTHON = ROOT / ".venv-storage" / "bin" / "python"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "sk", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def running_moto(folder: Path) -> Iterator[str]:
    """Yield the URL of a running moto with its log in ``folder``. Skips without moto."""
    if not PYTHON.exists():
        pytest.skip("moto is not installed: make test-storage")
    with (folder / "moto.log").open("wb") as log:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        with subprocess.Popen([PYTHON, STAND_IN], **pipes) as process:
            try:
                url = process.stdout.readline().decode().strip()
                assert url, (folder / "moto.log").read_text()
                yield url
            finally:
                end(process)


def moto_version() -> str:
    asked = "import importlib.metadata; print(importlib.metadata.version('moto'))"
    return subprocess.run([PYTHON, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def wait_for(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait for an answer. Fails if the process exits or on a timeout."""

    def answers() -> bool:
        with suppress(urllib.error.HTTPError):  # any status is an answer
            urllib.request.urlopen(url, timeout=5).close()
        return True

    eventually(answers, process=process)
