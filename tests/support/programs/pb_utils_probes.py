"""Expressions over ``pb_utils`` with what Triton 2.51 made of them, and the model that evaluates them."""

from __future__ import annotations

import json
from pathlib import Path

_DATA = json.loads((Path(__file__).parents[2] / "oracle" / "pb_utils_probes.json").read_text(encoding="utf-8"))
MODEL = Path(__file__).parent / "pb_utils_probe.py"
CONFIG = """backend: "python"
input { name: "EXPRESSION" data_type: TYPE_STRING dims: [-1] }
output { name: "VERDICT" data_type: TYPE_STRING dims: [-1] }
"""
TRITON: dict[str, str] = _DATA["probes"]
"""Expressions with Triton's verdicts."""
DIFFERENCES: dict[str, dict[str, str]] = _DATA["differences"]
"""Expressions whose verdicts differ here, with the reason."""


def write_model(repository: Path) -> None:
    """Write the model ``probe`` into a repository."""
    version = repository / "probe" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_bytes(MODEL.read_bytes())
    (version.parent / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
