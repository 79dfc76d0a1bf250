"""Copies of an inference component: containers beside each other, each with what it was given of the host."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from conftest import end, free_ports
from support.process.eventually import eventually
from support.servers.hosting import ask, write_scale
from support.servers.sagemaker_door import V2

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

JSON = {"Content-Type": "application/json"}


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    eventually(lambda: ask(port, "GET", "/ping").status == 200, process=process, log=log)


def test_copies_share_a_host_and_end_independently(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_scale(tmp_path / "model" / "scale")
    processor = str(min(os.sched_getaffinity(0)))
    words = ["taskset", "--cpu-list", processor, sys.executable, "-m", "remora_adapters.sagemaker", "serve"]
    copies = {}
    with ExitStack() as stack:
        for port in free_ports(2):
            environ = {"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_BIND_TO_PORT": str(port)}
            environ |= {"CUDA_VISIBLE_DEVICES": ""}  # as a component without accelerators has it
            with (tmp_path / f"{port}.txt").open("wb") as log:
                copies[port] = subprocess.Popen(words, env=child_environment | environ, stdout=log, stderr=log)
            stack.callback(copies[port].wait)
            stack.callback(copies[port].kill)
        for port, copy in copies.items():
            wait_until_ready(copy, port, tmp_path / f"{port}.txt")
            assert ask(port, "POST", "/invocations", V2, JSON).status == 200
        (first, one), (second, other) = copies.items()
        assert end(one) == 0
        assert ask(second, "POST", "/invocations", V2, JSON).status == 200
        masks = set()
        for task in Path(f"/proc/{other.pid}/task").iterdir():
            with suppress(ProcessLookupError):  # a thread that ends meanwhile
                masks.add(frozenset(os.sched_getaffinity(int(task.name))))
        assert masks == {frozenset({int(processor)})}
        with pytest.raises(ConnectionRefusedError):
            ask(first, "GET", "/ping")
        assert end(other) == 0
