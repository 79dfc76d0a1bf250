"""What a start may import: cold start is a product, and every module here costs it milliseconds and memory."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

# Each of these is imported by the first request, model or flag that needs it, and by nothing before.
LATE = (
    "boto3",
    "fastapi",
    "google.protobuf.json_format",
    "grpc",
    "importlib.metadata",
    "mangum",
    "obstore",
    "onnx",
    "onnxruntime",
    "opentelemetry",
    "pandas",
    "prometheus_client",
    "pydantic",
    "requests",
    "starlette",
    "tensorrt",
    "torch",
    "unittest",
    "uvicorn",
    "yaml",
)
STARTS = ("remora", "remora.cli", "remora.engine", "remora.server.main")

# What site imports by itself (.pth files of an editable install, for one) is not ours to answer for.
PROBE = """
import json, sys
before = set(sys.modules)
__import__(sys.argv[1])
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("module", STARTS)
def test_a_start_imports_nothing_that_can_wait(module: str, child_environment: dict[str, str]) -> None:
    if not exists(module):
        pytest.skip(f"{module} is not there yet")
    probe = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, module], env=child_environment, capture_output=True, text=True
    )
    assert probe.returncode == 0, probe.stderr
    loaded = json.loads(probe.stdout)
    early = [name for name in loaded if any(name == late or name.startswith(f"{late}.") for late in LATE)]
    assert not early, f"importing {module} also imports {early}"
