"""Command `remora version`, which prints the installed versions."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from remora._version import __version__
from remora.cli.output import columns

_RUNTIMES = (
    # Distributions, not modules: runtimes of models, codecs and front ends.
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "tensorrt",
    "openvino",
    "tensorflow",
    "xgboost",
    "lightgbm",
    "scikit-learn",
    "protobuf",
    "orjson",
    "httptools",
    "uvloop",
    "fastapi",
    "grpcio",
    "obstore",
)


def versions(options: argparse.Namespace) -> int:
    """Run the command."""
    rows = [("remora", __version__), ("python", platform.python_version())]
    for name in _RUNTIMES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            continue
    print(columns(rows))
    return 0
