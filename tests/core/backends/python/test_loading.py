"""Importing model files side by side: siblings, globals, failures, and nothing left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from remora.backends import Execution, Placement, Source
from remora.backends.python import PythonBackend
from remora.backends.python.loading import load_module
from remora.errors import InternalError
from remora.messages import InferForm, Request, Response
from remora.proto.model_config_pb2 import ModelConfig

CONFIG = text_format.Parse('name: "m" output { name: "OUT" data_type: TYPE_STRING dims: 1 }', ModelConfig())
CLASS = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([str(WHO())]))])]
"""


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path: Path) -> Iterator[None]:
    before = set(sys.modules)
    yield
    assert not [name for name in set(sys.modules) - before if "remora_model_" in name]
    assert not list(tmp_path.rglob("__pycache__"))
    assert not list(tmp_path.rglob("*.pyc"))


def answers(root: Path, models: dict[str, dict[str, str]]) -> list[str]:
    """What each model says of itself when all are loaded and run together."""
    opened = []
    for name, files in models.items():
        for file, code in files.items():
            path = root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code, encoding="utf-8")
        opened.append(PythonBackend().open(Source(name, 1, root / name, root / name / "1", root), CONFIG))
    instances = [model.instance(CONFIG, Placement(f"m_{number}")) for number, model in enumerate(opened)]
    said = []
    for instance in instances:
        (outcome,) = instance.execute(Execution([Request(InferForm(()), {}, ("OUT",), 1, None)]))
        assert isinstance(outcome, Response)
        said.append(outcome.outputs[0].data[0].decode())
    for instance in instances:
        instance.close()
    for model in opened:
        model.close()
    return said


def load_failure(root: Path, code: str) -> str:
    with pytest.raises(InternalError) as caught:
        answers(root, {"m": {"1/model.py": code}})
    return caught.value.message


IMPORTS = {
    "a plain import": "import helper\nWHO = lambda: helper.NAME",
    "a from import": "from helper import NAME\nWHO = lambda: NAME",
    "a relative import": "from .helper import NAME\nWHO = lambda: NAME",
    "an import in a function": "def WHO():\n    import helper as h\n    return h.NAME",
    "a package": "import parts.inner\nWHO = lambda: parts.inner.NAME",
    "a package under another name": "import parts.inner as p\nWHO = lambda: p.NAME",
    "a package that imports itself": "from parts import again\nWHO = lambda: again.inner.NAME",
    "a folder without __init__": "import loose.piece\nWHO = lambda: loose.piece.NAME",
    "the model's folder": "import shared_by_versions as s\nWHO = lambda: s.NAME",
    "the model itself": "NAME = '{0}'\ndef WHO():\n    import model\n    return model.NAME",
    "a function of importlib": "import importlib\nWHO = lambda: importlib.import_module('.helper', __package__).NAME",
}


def files(name: str, code: str) -> dict[str, str]:
    said = f"NAME = {name!r}\n"
    return {
        "1/model.py": code.replace("{0}", name) + CLASS,
        "1/helper.py": said,
        "1/parts/__init__.py": "",
        "1/parts/inner.py": said,
        "1/parts/again.py": "import parts.inner as inner\n",
        "1/loose/piece.py": said,
        "shared_by_versions.py": said,
    }


@pytest.mark.parametrize("how", IMPORTS)
def test_two_models_each_find_their_own_siblings(tmp_path: Path, how: str) -> None:
    assert answers(tmp_path, {name: files(name, IMPORTS[how]) for name in ("a", "b")}) == ["a", "b"]


def test_a_sibling_that_no_import_statement_names_is_found_for_the_model_that_asks(tmp_path: Path) -> None:
    code = "import importlib\ndef WHO():\n    return importlib.import_module('helper').NAME"
    assert answers(tmp_path, {"a": files("a", code)}) == ["a"]
    assert answers(tmp_path, {"b": files("b", code)}) == ["b"], "the first one's must be gone with it"
    assert "helper" not in sys.modules


def test_the_standard_library_wins_over_a_sibling_and_a_package_over_a_folder_of_data(tmp_path: Path) -> None:
    code = "import json, numpy\nWHO = lambda: hasattr(json, 'dumps') and hasattr(numpy, 'zeros')"
    model = {"1/model.py": code + CLASS, "1/json.py": "", "1/numpy/data.txt": ""}
    assert answers(tmp_path, {"m": model}) == ["True"]


def test_the_file_on_disk_runs_and_not_byte_code_beside_it(tmp_path: Path) -> None:
    assert answers(tmp_path, {"m": files("old", IMPORTS["a plain import"])}) == ["old"]
    assert answers(tmp_path, {"m": files("new", IMPORTS["a plain import"])}) == ["new"]


def test_dataclasses_and_pickles_find_the_models_module(tmp_path: Path) -> None:
    code = (
        "from dataclasses import dataclass\nimport copy, sys\n@dataclass\nclass Point:\n    x: 'int' = 3\n"
        "WHO = lambda: (copy.deepcopy(Point()).x, sys.modules[Point.__module__].Point is Point)"
    )
    assert answers(tmp_path, {"m": {"1/model.py": code + CLASS}}) == ["(3, True)"]


def test_our_api_wins_over_another_module_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", np)
    model = {"1/model.py": "WHO = lambda: 1" + CLASS, "1/triton_python_backend_utils.py": "raise SystemExit"}
    assert answers(tmp_path, {"m": model}) == ["1"]


def test_models_that_load_at_the_same_time_do_not_trip_over_the_importers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python removes importers of None, such as that of its archive, and the second removal raises KeyError."""
    file = tmp_path / "model.py"
    file.write_text("x = 1\n")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(40):
                for number in range(200):
                    monkeypatch.setitem(sys.path_importer_cache, f"/absent/{number}.zip", None)
                for loaded in pool.map(lambda number: load_module(file, f"m{number}", [tmp_path]), range(8)):
                    loaded.close()
    finally:
        sys.setswitchinterval(interval)


def test_a_load_error_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "m" / "1" / "model.py"
    assert load_failure(tmp_path, "\n\n1 / 0\n") == (
        f"ZeroDivisionError: division by zero\n\nAt:\n  {file}(3): <module>\n"
    )
    assert load_failure(tmp_path, "def f():\n    return (\n") == "SyntaxError: '(' was never closed (model.py, line 2)"
    assert load_failure(tmp_path, "raise SystemExit('no')").startswith("SystemExit: no")


@pytest.mark.parametrize(("module", "package"), [("skimage", "scikit-image"), ("cv2", "opencv")])
def test_a_missing_module_comes_with_the_line_that_installs_it(
    tmp_path: Path, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    text = load_failure(tmp_path, f"\nimport {module}.part\n")
    assert f"model.py(2): <module>\nInstall it into the server's environment: pip install {package}" in text


@pytest.mark.parametrize("place", ["requirements.txt", "1/requirements.txt"])
def test_a_model_with_its_own_requirements_gets_missing_modules_there(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "skimage", None)
    requirements = tmp_path / "m" / place
    requirements.parent.mkdir(parents=True, exist_ok=True)
    requirements.write_text("numpy\n")
    text = load_failure(tmp_path, "import skimage\n")
    assert "Add it to requirements.txt of the model: scikit-image\n" in text
    assert "pip install" not in text


@pytest.mark.parametrize(
    ("module", "hint"),
    [("transfomers", "Did you mean 'transformers'?"), ("zzqx", "No package is known for 'zzqx': check its name.")],
)
def test_a_name_that_may_be_a_typing_error_gets_no_install_command(tmp_path: Path, module: str, hint: str) -> None:
    text = load_failure(tmp_path, f"import {module}\n")
    assert hint in text
    assert "pip install" not in text


def test_a_file_without_a_model_says_what_belongs_into_it(tmp_path: Path) -> None:
    assert load_failure(tmp_path, "").startswith(
        "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"
    )
    assert load_failure(tmp_path, "class TritonPythonModel: pass") == (
        "Python model 1/model.py does not implement `execute` method."
    )
