"""`remora backends`: what can run here, on which devices, and the line that installs the rest; nothing is imported."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from remora.backends.registry import BUILT_IN, installed_backends
from remora.cli.output import columns
from remora.system.gpus import Gpus
from remora.system.install_advice import install_command


class Runtime(NamedTuple):
    """The distributions that a backend runs on, any of them; those that support GPUs; the extra that installs them."""

    files: str
    distributions: tuple[str, ...] = ()
    on_gpu: tuple[str, ...] = ()
    extra: str = ""


RUNTIMES = {
    "onnxruntime": Runtime("model.onnx", ("onnxruntime-gpu", "onnxruntime"), ("onnxruntime-gpu",), "onnx"),
    "pytorch": Runtime("model.pt, model.pt2", ("torch",), ("torch",), "torch"),
    "tensorflow": Runtime("model.savedmodel", ("tensorflow", "tensorflow-cpu"), ("tensorflow",), "tensorflow"),
    "openvino": Runtime("model.xml, model.onnx", ("openvino",), (), "openvino"),
    "fil": Runtime(
        "xgboost.json, xgboost.ubj, model.txt, checkpoint.tl",
        ("xgboost", "xgboost-cpu", "lightgbm", "treelite"),
        (),
        "trees",
    ),
    "tensorrt": Runtime("model.plan", ("tensorrt",), ("tensorrt",), "tensorrt"),
    "native": Runtime("model.so"),
    "python": Runtime("model.py"),
    "ensemble": Runtime("configuration only"),
}
"""What is known of the built-in backends, by name."""


def backends(options: argparse.Namespace) -> int:
    """Print the table."""
    print(
        columns(table(_installed_version, len(Gpus().visible()), installed_backends(), _in(options.backend_directory)))
    )
    return 0


def table(
    version: Callable[[str], str | None], gpus: int, offered: Sequence[tuple[str, str]], folders: Sequence[str]
) -> list[tuple[str, ...]]:
    """One row a backend: name, runtime and version, devices, files, and the line that installs what is missing.

    Args:
        version: the installed version of a distribution, None when it is not installed.
        gpus: how many GPUs the process may use.
        offered: name and distribution of the backends that packages offer.
        folders: names of the backends in ``--backend-directory``.
    """
    rows: list[tuple[str, ...]] = [("BACKEND", "RUNTIME", "DEVICES", "FILES")]
    for name, runtime in RUNTIMES.items():
        there = [(each, found) for each in runtime.distributions if (found := version(each)) is not None]
        if runtime.distributions and not there:
            rows.append((name, "not installed", "", runtime.files, install_command(runtime.extra)))
            continue
        shown = ", ".join(f"{each} {found}" for each, found in there) or "built in"
        rows.append((name, shown, _devices(runtime, there, gpus), runtime.files))
    rows += [(name, distribution, "", "") for name, distribution in offered if name not in BUILT_IN]
    rows += [(name, "in the backend directory", "", "") for name in folders]
    return rows


def _devices(runtime: Runtime, there: Sequence[tuple[str, str]], gpus: int) -> str:
    """GPUs where there are some and the runtime is a build that can use them."""
    able = any(each in runtime.on_gpu and not found.endswith("+cpu") for each, found in there)
    if not (able and gpus):
        return "CPU"
    return f"CPU, {gpus} GPU{'s' if gpus > 1 else ''}"


def _installed_version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _in(directory: str) -> list[str]:
    """The backends that lie in a backend directory, by name."""
    if not directory:
        return []
    found = []
    for folder in sorted(path for path in Path(directory).iterdir() if path.is_dir()):
        files = ("backend.py", "model.py", f"libremora_{folder.name}.so")
        if folder.name not in BUILT_IN and any((folder / file).is_file() for file in files):
            found.append(folder.name)
    return found
