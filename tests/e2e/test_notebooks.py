"""Functions as models in a notebook, run by a real Jupyter kernel, whose event loop runs already."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig

import pytest

from conftest import ROOT

PYTHON = os.environ.get("BROWSER_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs an environment with a Jupyter kernel: make test-browser")
CELLS = [
    "import remora\n\n@remora.model(batch=4)\ndef scale(x: list[float]) -> list[float]:\n    return [2 * y for y in x]",
    "engine = remora.Engine(models=[scale]).start()\nengine.infer('scale', {'x': [[1.0], [2.0]]})['output'].tolist()",
    "engine.stop()\n\n@remora.model\nasync def scale(x: float) -> float:\n    return 30 * x",
    "with remora.Engine(models=[scale]) as engine:\n    print(engine.infer('scale', {'x': [1.0]})['output'])",
    "remora.serve(scale)",
    "remora.Engine(models=[scale]).infer('scale', {'x': [1.0]})",
]


def test_a_cell_defines_a_model_and_others_run_and_replace_it() -> None:
    paths = [str(ROOT / "core"), sysconfig.get_path("purelib")]  # the kernel's environment has no packages of remora
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [PYTHON, str(ROOT / "tests" / "support" / "programs" / "notebook_cells.py"), json.dumps(CELLS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    defined, first, _, second, refused, early = json.loads(done.stdout)
    assert defined == ""
    assert first == "[[2.0], [4.0]]"
    assert second == "[30.]\n"
    assert "in a notebook use remora.Engine(models=[...])" in refused
    assert "or call start()" in early
