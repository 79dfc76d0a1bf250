"""The language model `tiny` for tests, made once for a process."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "docs" / "examples" / "chat" / "tiny_model.py"


@cache
def _made() -> Path:
    for module in ("onnx", "onnxruntime", "tokenizers"):
        pytest.importorskip(module)
    spec = importlib.util.spec_from_file_location("tiny_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.write_tiny(Path(tempfile.mkdtemp(prefix="remora-tiny-")))
    return folder


def tiny(repository: Path, name: str = "tiny", config: str = "") -> Path:
    """Write `tiny` into a repository, and return its version's directory."""
    version = repository / name / "1"
    shutil.copytree(_made(), version)
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return version


def text_inputs(text: str = "Once", stream: bool = False, **parameters: Any) -> dict[str, Any]:
    """Return the inputs of a request to a language model for 12 tokens, the likeliest ones."""
    sampling = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, **parameters}
    return {
        "text_input": np.array([text.encode()], object),
        "stream": np.array([stream]),
        "exclude_input_in_output": np.array([True]),
        "sampling_parameters": np.array([json.dumps(sampling).encode()], object),
    }
