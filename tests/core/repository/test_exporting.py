"""Export of Python files as repositories, served by an engine in threads and in worker processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import needs
from remora import Engine
from remora.config import read_config
from remora.functions import Pipeline, model
from remora.repository.exporting import Source, parse_source, pipeline_config

APP = """
import numpy as np
import remora
from rules import FACTOR

@remora.model(isolation="thread")
def scale(x: float) -> float:
    return FACTOR * x

@remora.model(batch=4, name="sums")
def total(x: remora.Array[np.float32, -1, 3]) -> remora.Array[np.float32, -1]:
    return x.sum(axis=1)

@remora.model(batch=8, isolation="thread")
def negate(x: list[float]) -> list[float]:
    return [-each for each in x]

twice = negate >> negate
def plain(x):
    return x
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "rules.py").write_text("FACTOR = 3.0\n")
    file = folder / "app.py"
    file.write_text(APP)
    return file


def _export(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, cwd=cwd)


def _linked(directory: Path, source: str, name: str = "") -> subprocess.CompletedProcess[str]:
    return _export("remora.repository.exporting", str(directory), source, name)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("app.py", Source("app.py")),
        ("a/b.py:x,y", Source("a/b.py", ("x", "y"))),
        ("package.module:x", Source("package.module", ("x",))),
        ("C:odd.py", Source("C:odd.py")),
    ],
)
def test_a_source_has_a_module_and_names(text: str, source: Source) -> None:
    assert parse_source(text) == source


def test_all_models_of_a_file_and_its_pipelines_are_written(app: Path, tmp_path: Path) -> None:
    done = _linked(tmp_path / "out", str(app))
    assert done.returncode == 0, done.stderr
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir() if entry.is_dir()) == [
        "negate",
        "scale",
        "sums",
        "twice",
    ]
    assert (tmp_path / "out" / "source.txt").read_text().splitlines() == [str(app), str(app.with_name("rules.py"))]
    with Engine(tmp_path / "out") as engine:
        assert engine.infer("scale", {"x": [2.0]})["output"].tolist() == [6.0]
        assert engine.infer("sums", {"x": np.ones((2, 3), np.float32)})["output"].tolist() == [[3.0], [3.0]]
        assert engine.infer("twice", {"x": [[2.0]]})["output"].tolist() == [[2.0]]


def test_only_named_models_are_written_and_plain_functions_can_be_named(app: Path, tmp_path: Path) -> None:
    done = _linked(tmp_path / "out", f"{app}:scale,plain")
    assert done.returncode == 0, done.stderr
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir() if entry.is_dir()) == ["plain", "scale"]
    with Engine(tmp_path / "out") as engine:
        assert engine.infer("plain", {"x": ["[1]"]})["output"].tolist() == [b"[1]"]


@needs("remora_tools")
def test_an_exported_repository_needs_neither_the_source_nor_the_folder(app: Path, tmp_path: Path) -> None:
    done = _export("remora", "export", str(tmp_path / "out"), f"{app}:scale")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(app.parent)
    shutil.move(tmp_path / "out", tmp_path / "moved")
    with Engine(tmp_path / "moved") as engine:
        assert engine.infer("scale", {"x": [2.0]})["output"].tolist() == [6.0]


@needs("remora_tools")
def test_an_exported_model_runs_without_remora(app: Path, tmp_path: Path) -> None:
    """The version folder is on Triton's path, and only numpy and Triton's module are installed there."""
    assert _export("remora", "export", str(tmp_path / "out"), f"{app}:scale").returncode == 0
    version = tmp_path / "out" / "scale" / "1"
    (tmp_path / "triton_python_backend_utils.py").write_text(
        "from types import SimpleNamespace as Box\n"
        "class Tensor(Box):\n"
        "    def __init__(self, name, array): super().__init__(name=name, array=array)\n"
        "    def as_numpy(self): return self.array\n"
        "class InferenceResponse(Box):\n"
        "    pass\n"
        "def get_input_tensor_by_name(request, name): return request.get(name)\n"
    )
    script = (
        "import sys, numpy as np; sys.meta_path.insert(0, type('Block', (), {'find_spec': staticmethod(lambda name, "
        "path, target=None: (_ for _ in ()).throw(ImportError(name)) if name.startswith('remora_adapters') else None)}"
        f"))\nsys.path[:0] = [{str(version)!r}, {str(tmp_path)!r}]\n"
        "import remora, model, triton_python_backend_utils as pb\n"
        "assert 'scale/1' in remora.__file__, remora.__file__\n"
        "m = model.TritonPythonModel(); m.initialize({'model_config': '{}'})\n"
        "(answer,) = m.execute([{'x': pb.Tensor('x', np.array([2.0]))}])\n"
        "print(answer.output_tensors[0].array.tolist())\n"
        "assert not [name for name in sys.modules if name.startswith('remora.') and 'functions' not in name]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[6.0]\n", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "app.py defines no model: put @remora.model above a function or a class"),
        ("def f(x): ...", "its functions are f"),
        ("class TritonPythonModel: ...", "name the file model.py"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
        ("def (", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import remora\n@remora.model\ndef f(x: complex) -> int: ...", "parameter 'x': complex is not a tensor"),
        (
            "import remora\na = remora.model(name='m')(lambda x: x)\nb = remora.model(name='m')(lambda x: x)",
            "two models are called 'm'",
        ),
        ("import remora\nf = remora.model(name='f')(lambda x: x)\nremora.serve(f)", "runs on import"),
    ],
)
def test_a_file_that_cannot_be_served_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "app.py").write_text(text)
    done = _linked(tmp_path / "out", str(tmp_path / "app.py"))
    assert done.returncode == 1
    assert message in done.stderr
    assert "repository/exporting.py" not in done.stderr


def test_a_file_with_the_name_of_a_library_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "types.py").write_text("")
    done = _linked(tmp_path / "out", str(tmp_path / "types.py"))
    assert "'types.py' cannot be imported under its name" in done.stderr


def test_the_only_model_can_get_another_name(app: Path, tmp_path: Path) -> None:
    assert _linked(tmp_path / "out", f"{app}:scale", "other").returncode == 0
    with Engine(tmp_path / "out") as engine:
        assert engine.infer("other", {"x": [2.0]})["output"].tolist() == [6.0]


@needs("remora_tools")
def test_a_step_that_another_module_defines_is_imported_from_there(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(
        "import remora\n\n@remora.model(isolation='thread')\ndef half(x: float) -> float:\n    return x / 2\n"
    )
    (tmp_path / "app.py").write_text("import steps\n\nquarter = steps.half >> steps.half\n")
    for words in (("remora.repository.exporting", "linked", "app.py", ""), ("remora", "export", "copied", "app.py")):
        done = _export(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        with Engine(tmp_path / next(word for word in words if word in ("linked", "copied"))) as engine:
            assert engine.infer("quarter", {"x": [2.0]})["output"].tolist() == [0.5]


def test_a_step_without_a_variable_is_refused(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import remora\n\ndef made():\n    @remora.model\n    def inner(x: float) -> float: ...\n    return inner\n"
        "inner = made()\nouter = inner >> inner\ndel inner\n"
    )
    done = _linked(tmp_path / "out", str(tmp_path / "app.py"))
    assert done.returncode == 1
    assert "model 'inner'" in done.stderr
    assert "no variable of its module" in done.stderr


@needs("remora_tools")
def test_two_files_of_one_name_are_refused(app: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(app, other / "app.py")
    done = _export("remora", "export", str(tmp_path / "out"), f"{app}:scale", f"{other / 'app.py'}:negate")
    assert done.returncode == 1
    assert "has the same module name 'app'; rename one of them" in done.stderr


def test_a_pipeline_names_its_tensors_that_hold_json() -> None:
    @model
    def split(text: str) -> dict:
        return {"words": text.split()}

    @model
    def first(words: dict) -> dict:
        return {"first": words["words"][0]}

    config = pipeline_config(Pipeline(split.wire(text="text", output="w"), first.wire(words="w", output="answer")))
    assert config["parameters"]["JSON_TENSORS"] == {"string_value": "answer"}


@needs("remora_tools")
def test_copied_models_have_a_configuration_that_triton_reads(app: Path, tmp_path: Path) -> None:
    assert _export("remora", "export", str(tmp_path / "out"), f"{app}:negate").returncode == 0
    assert _linked(tmp_path / "linked", f"{app}:negate").returncode == 0
    names = ("config.pbtxt", "config.json")
    copied, linked = (
        read_config(tmp_path / place / "negate" / name) for place, name in zip(("out", "linked"), names, strict=True)
    )
    del linked.parameters["MODULE_PATH"]
    assert copied == linked
