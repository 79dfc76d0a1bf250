"""The images with CUDA, built and run where there is no GPU: they have to start, say so, and answer with the processor.

Gigabytes, so only under `make test-gpu-image`. What a GPU does with it is for a machine that has one.
"""

from __future__ import annotations

import json
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, free_ports

BUDGETS = tomllib.loads((ROOT / "containers" / "budgets.toml").read_text())
USERS = {"as-root": 0, "as-10001": 10001}

pytestmark = pytest.mark.timeout(1800)


def test_it_adds_no_more_than_its_budget(gpu_image: Any, figures: list[str]) -> None:
    files = [path.lstat() for path in (gpu_image.root / "opt" / "remora").rglob("*")]
    megabytes = sum(each.st_size for each in files) / 1e6
    figures.append(f"{gpu_image.name}: {megabytes:.0f} MB beyond the base")
    assert megabytes <= BUDGETS[gpu_image.name]["megabytes"]


def test_it_holds_one_runtime_and_each_library_of_cuda_once(gpu_image: Any) -> None:
    document = json.loads((gpu_image.root / "opt" / "remora" / "sbom.cdx.json").read_text())
    names = {each["name"] for each in document["components"]}
    assert {"onnxruntime-gpu", f"nvidia-cudnn-cu{gpu_image.name.removeprefix('cuda')}"} <= names
    assert "onnxruntime" not in names
    assert gpu_image.config["Labels"]["remora.cuda"] == gpu_image.name.removeprefix("cuda")
    for library in ("libcublas.so.*", "libcudnn.so.*", "libcudart.so.*"):
        found = [path for path in gpu_image.root.rglob(library) if not path.is_symlink()]
        assert len(found) == 1, found
    assert not list(gpu_image.root.rglob("libcuda.so*")), "the driver is the host's"


@pytest.mark.parametrize("uid", USERS.values(), ids=USERS)
def test_without_a_gpu_it_says_so_and_answers_with_the_processor(
    uid: int, gpu_image: Any, models: Path, digits: Any, figures: list[str]
) -> None:
    http, grpc, metrics = free_ports(3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    with gpu_image.running(ports, uid=uid, mounts={"/mnt/models": models}, environment={}) as container:
        container.answer(f"http://127.0.0.1:{http}/v2/health/ready")
        figures.append(f"{gpu_image.name}, uid {uid}: ready after {time.monotonic() - container.started_s:.2f} s")
        body = (digits.requests / "seven.json").read_bytes()
        answer = json.loads(container.answer(f"http://127.0.0.1:{http}/v2/models/digits/infer", body))
        assert answer["model_name"] == "digits"
        assert container.stop() == 0
    warnings = [line for line in container.said().splitlines() if "running on the CPU instead" in line]
    figures.append(f"{gpu_image.name}, uid {uid}, without a GPU: {warnings[0] if warnings else 'no word'}")
    assert len(warnings) == 1, container.said()
