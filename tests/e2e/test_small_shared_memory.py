"""Python models where containers have no /dev/shm to speak of: it may be read-only, or 1 MiB, and nothing changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array + 1)]) for array in arrays]
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: -1 }
output { name: "OUT" data_type: TYPE_INT32 dims: -1 }
"""
ASK = """
import os, sys
import numpy as np
from remora import Engine

with Engine(sys.argv[1], backend_config=("python,isolation=process",)) as engine:
    values = np.arange(4 << 20, dtype=np.int32)
    assert (engine.infer("add", {"IN": values})["OUT"] == values + 1).all()
statistics = os.statvfs("/dev/shm")
print("read-only" if statistics.f_flag & os.ST_RDONLY else f"{statistics.f_blocks * statistics.f_frsize} bytes")
"""


def in_namespace(mount: str, *command: str) -> list[str]:
    """The command with another /dev/shm, which no other process sees."""
    script = f'mount -t tmpfs -o {mount} none /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", *command]


@pytest.fixture(scope="module")
def namespaces() -> None:
    try:
        tried = subprocess.run(in_namespace("size=1m", "true"), capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs unshare, of util-linux")
    if tried.returncode:
        pytest.skip(f"needs the right to mount in a new namespace: {tried.stderr.strip()}")


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(("mount", "seen"), [("ro,size=1m", "read-only"), ("size=1m", "1048576 bytes")])
def test_a_python_model_answers_16_mib_without_dev_shm(
    mount: str, seen: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    folder = tmp_path / "add" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "add" / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    command = in_namespace(mount, sys.executable, "-c", ASK, str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == seen
