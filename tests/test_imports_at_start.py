"""What a start may import: cold start is a product, and every module here costs it milliseconds and memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from remora.plugins import HOSTS

# Each of these is imported by the first request, model or flag that needs it, and by nothing before.
LATE = (
    "azure",
    "azureml",
    "awslambdaric",
    "boto3",
    "botocore",
    "fastapi",
    "cryptography",
    "flask",
    "google.cloud",
    "google.protobuf.json_format",
    "grpc",
    "hpack",
    "importlib.metadata",
    "jwt",
    "kserve",
    "lightgbm",
    "mangum",
    "obstore",
    "onnx",
    "onnxruntime",
    "opentelemetry",
    "openvino",
    "pandas",
    "prometheus_client",
    "pydantic",
    "redis",
    "remora_deploy",
    "remora_llm",
    "remora_runtimes",
    "remora_tools",
    "requests",
    "sagemaker",
    "snapshot_restore_py",
    "starlette",
    "pynvml",
    "tensorflow",
    "tensorrt",
    "torch",
    "treelite",
    "unittest",
    "uvicorn",
    "xgboost",
    "yaml",
)
STARTS = ("remora", "remora.cli", "remora.engine", "remora.server.main")
ADAPTERS = tuple(f"remora_adapters.{name}" for name in HOSTS)

# What site imports by itself (.pth files of an editable install, for one) is not ours to answer for.
PROBE = """
import json, sys
before = set(sys.modules)
__import__(sys.argv[1])
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def late_ones(modules: Iterable[str]) -> list[str]:
    return [name for name in modules if any(name == late or name.startswith(f"{late}.") for late in LATE)]


def imported_by(module: str, environment: dict[str, str]) -> list[str]:
    """What a fresh interpreter has after one import that it had not before."""
    probe = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, module], env=environment, capture_output=True, text=True
    )
    assert probe.returncode == 0, probe.stderr
    return list(json.loads(probe.stdout))


@pytest.mark.parametrize("module", [*STARTS, *ADAPTERS])
def test_a_start_imports_nothing_that_can_wait(module: str, child_environment: dict[str, str]) -> None:
    early = late_ones(imported_by(module, child_environment))
    assert not early, f"importing {module} also imports {early}"


@pytest.mark.parametrize("module", ADAPTERS)
def test_an_adapter_imports_no_other_platform(module: str, child_environment: dict[str, str]) -> None:
    others = {
        name
        for name in imported_by(module, child_environment)
        if name.startswith("remora_adapters.") and not f"{name}.".startswith(f"{module}.")
    }
    assert not others


HOST_PROBE = """
import json, os, sys
from importlib import import_module
import_module(sys.argv[1]).host(os.environ)
print(json.dumps(sorted(set(sys.modules) & {"numpy", "google.protobuf", "remora.messages", "remora.config"})))
"""


@pytest.mark.parametrize("module", ADAPTERS)
def test_a_host_finds_its_models_before_anything_is_loaded_that_the_process_must_be_set_up_for(
    module: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    """OpenBLAS reads how many threads it may start when numpy is imported, and the HTTP port is not open yet."""
    model = tmp_path / "model" / "m"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.onnx").touch()
    places = {"AZUREML_MODEL_DIR": model.parent, "SAGEMAKER_BASE_DIR": tmp_path, "AIP_STORAGE_URI": model.parent}
    environment = {**child_environment, **{name: str(place) for name, place in places.items()}}
    probe = subprocess.run([sys.executable, "-c", HOST_PROBE, module], env=environment, capture_output=True, text=True)
    assert (probe.returncode, json.loads(probe.stdout or "null")) == (0, []), probe.stderr


# Modules of the server that its first answer over HTTP does not need.
UNNEEDED = (
    "hashlib",
    "random",
    "remora.config.pbtxt_errors",
    "remora.proto.inference_pb2",
    "remora.protocols.shared_memory",
    "remora.server.grpc.listener",
    "remora.tracing.traced",
    "remora.tracing.writer",
)


@pytest.mark.parametrize("module", ["remora.server.main", "remora.backends.onnxruntime"])
def test_what_the_first_answer_does_not_need_is_imported_later(module: str, child_environment: dict[str, str]) -> None:
    early = sorted(set(UNNEEDED) & set(imported_by(module, child_environment)))
    assert not early, f"importing {module} also imports {early}"


def test_parsing_the_flags_of_serve_imports_no_shutil(child_environment: dict[str, str]) -> None:
    parse = "from remora.cli import parse_arguments; parse_arguments(['serve', '.', '--http-port=0'])"
    code = f"{parse}; import sys; print(*sys.modules)"
    probe = subprocess.run([sys.executable, "-c", code], env=child_environment, capture_output=True, text=True)
    assert probe.returncode == 0, probe.stderr
    assert not {"shutil", "tempfile"} & set(probe.stdout.split())


def test_a_server_of_an_onnx_model_imports_nothing_that_can_wait(digits: Any, serving: Any) -> None:
    with serving(digits.models, "--allow-grpc=false", PYTHONPROFILEIMPORTTIME="1") as server:
        pass
    imported = re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", server.log.read_text(), re.MULTILINE)
    assert "remora.server.main" in imported
    early = [name for name in late_ones(imported) if not name.startswith("onnxruntime")]
    assert not early, f"a start imports {early}; python -X importtime -m remora serve ... says on whose behalf"
