"""How a function begins: with threads for what its memory pays for, and so that copies of a snapshot differ."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from remora_adapters.aws_lambda import load, own_processors
from support.servers.hosting import write_scale

pytest.importorskip("mangum", reason="mangum is not installed: pip install '.[lambda]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


class Context:
    """What Lambda tells about an invocation."""

    def get_remaining_time_in_millis(self) -> int:
        return 60_000


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_scale(tmp_path / "scale")
    return tmp_path


@pytest.mark.parametrize(
    ("memory", "left"),
    [("128", {2}), ("1769", {2}), ("1770", {2, 3}), ("3538", {2, 3}), ("10240", {2, 3, 5}), ("", {2, 3, 5})],
)
def test_a_function_has_a_processor_for_each_1769_mb_of_its_memory(memory: str, left: set[int]) -> None:
    assert own_processors({"AWS_LAMBDA_FUNCTION_MEMORY_SIZE": memory}, {5, 2, 3}) == left


def test_models_have_threads_for_the_processors_that_the_memory_pays_for(
    repository: Path, child_environment: dict[str, str]
) -> None:
    code = """
import os
from remora.system.cpus import usable_cpus
from remora_adapters.aws_lambda import load
load(os.environ).close()
print(usable_cpus())
"""
    environ = {**child_environment, "REMORA_MODEL_REPOSITORY": str(repository)}
    environ["AWS_LAMBDA_FUNCTION_MEMORY_SIZE"] = "1024"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=280)
    assert done.stdout.split() == ["1"], done.stderr


class Hooks:
    """What AWS's runtime client offers for SnapStart; it calls what was registered."""

    def __init__(self) -> None:
        self.before: list[Callable[[], object]] = []
        self.after: list[Callable[[], object]] = []

    def register_before_snapshot(self, hook: Callable[[], object]) -> None:
        self.before.append(hook)

    def register_after_restore(self, hook: Callable[[], object]) -> None:
        self.after.append(hook)


def test_copies_of_a_snapshot_draw_different_numbers(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = Hooks()
    monkeypatch.setitem(sys.modules, "snapshot_restore_py", cast(Any, hooks))
    environ = {"REMORA_MODEL_REPOSITORY": str(repository), "AWS_LAMBDA_INITIALIZATION_TYPE": "snap-start"}
    function = load(environ)
    try:
        for hook in hooks.before:
            hook()
        snapshot = random.getstate(), np.random.get_state()
        drawn = []
        for _ in range(2):
            random.setstate(snapshot[0])
            np.random.set_state(snapshot[1])
            for hook in hooks.after:
                hook()
            drawn.append((random.getrandbits(64), np.random.randint(1 << 62)))
        assert drawn[0][0] != drawn[1][0]
        assert drawn[0][1] != drawn[1][1]
        assert function(REQUEST, Context())["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
    finally:
        function.close()


def test_only_functions_with_snapshots_register_for_them(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = Hooks()
    monkeypatch.setitem(sys.modules, "snapshot_restore_py", cast(Any, hooks))
    load({"REMORA_MODEL_REPOSITORY": str(repository), "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand"}).close()
    assert hooks.before + hooks.after == []
