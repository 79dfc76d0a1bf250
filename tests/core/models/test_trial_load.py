"""Files that crash their library: the child process ends, the server does not, and good files are tried once."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.backends import Source
from remora.errors import InternalError, RemoraError
from remora.models.loader import ModelLoader
from remora.models.trial_load import Trials
from remora.options import EngineOptions
from remora.proto.model_config_pb2 import ModelConfig
from remora.repository.local import scan
from support.engine.fakes import FakeClock

PATIENCE_S = 60.0
BACKEND = """
import os, signal, threading
from types import SimpleNamespace

class Backend:
    name = "fragile"

    def open(self, source, config):
        what = (source.path / "model.bin").read_text()
        with open(source.model_dir / "opened", "a") as log:
            log.write(f"{os.getpid()}\\n")
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "exit":
            os._exit(int(source.settings["status"]))
        if what == "hang":
            threading.Event().wait()
        if what == "error":
            raise ValueError("the file is torn at byte 7")
        return SimpleNamespace(
            complete=lambda config: None,
            instance=lambda config, place: SimpleNamespace(name=place.name, quick=False, close=lambda: None),
            close=lambda: None,
        )
"""
TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: 2 } output { name: "y" data_type: TYPE_FP32 dims: 2 }'
CONFIG = ModelConfig(name="m", backend="fragile")


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    code = tmp_path / "backends" / "fragile" / "backend.py"
    code.parent.mkdir(parents=True)
    code.write_text(BACKEND)
    return tmp_path / "backends"


def write(tmp_path: Path, what: str) -> Source:
    model = tmp_path / "models" / "m"
    (model / "1").mkdir(parents=True, exist_ok=True)
    (model / "1" / "model.bin").write_text(what)
    (model / "config.pbtxt").write_text(f'backend: "fragile" {TENSORS}')
    return Source("m", 1, model, model / "1", model.parent)


def openings(source: Source) -> int:
    log = source.model_dir / "opened"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("crash", "ended the process with SIGSEGV"),
        ("exit 7", "ended the process with exit status 7"),
        ("exit 0", "ended the process with exit status 0"),
    ],
)
def test_a_file_that_ends_the_child_is_refused_with_what_happened(
    tmp_path: Path, backends: Path, what: str, reason: str
) -> None:
    kind, _, status = what.partition(" ")
    source = write(tmp_path, kind)._replace(settings={"status": status})
    trials = Trials(tmp_path / "passed", str(backends))
    for _ in range(2):  # a failure is not remembered, because the machine may have been short of memory
        with pytest.raises(InternalError) as refused:
            trials.check("fragile", source, CONFIG)
        assert f"'m' version 1 at '{source.path}' {reason} in a trial load by backend 'fragile'" in str(refused.value)
        assert "set --trial-load=false" in str(refused.value)
    assert openings(source) == 2


def test_a_file_that_hangs_is_refused_after_the_time_limit(tmp_path: Path, backends: Path) -> None:
    source = write(tmp_path, "hang")
    with pytest.raises(InternalError, match="did not load within the time limit"):
        Trials(tmp_path / "passed", str(backends), limit_s=3.0).check("fragile", source, CONFIG)


def test_a_file_that_passed_is_tried_again_only_when_it_changes(tmp_path: Path, backends: Path) -> None:
    source = write(tmp_path, "good")
    for _ in range(3):  # another server remembers it too
        Trials(tmp_path / "passed", str(backends)).check("fragile", source, CONFIG)
    assert openings(source) == 1
    write(tmp_path, "good too")
    Trials(tmp_path / "passed", str(backends)).check("fragile", source, CONFIG)
    assert openings(source) == 2
    Trials(tmp_path / "passed", str(backends)).check("fragile", source._replace(settings={"key": "value"}), CONFIG)
    assert openings(source) == 3


def test_an_error_of_the_backend_is_left_to_the_load_itself(tmp_path: Path, backends: Path) -> None:
    source = write(tmp_path, "error")
    Trials(tmp_path / "passed", str(backends)).check("fragile", source, CONFIG)
    assert not (tmp_path / "passed").exists()


def test_onnx_and_python_models_start_no_child(tmp_path: Path) -> None:
    source = write(tmp_path, "crash")
    for backend in ("onnxruntime", "python", "ensemble"):
        Trials(tmp_path / "passed").check(backend, source, ModelConfig(name="m", backend=backend))
    assert not (tmp_path / "passed").exists()


@pytest.mark.parametrize(
    ("what", "text"), [("crash", "SIGSEGV"), ("error", "ValueError: the file is torn at byte 7"), ("good", "")]
)
def test_a_server_with_trial_loads_outlives_a_file_that_crashes_its_library(
    tmp_path: Path, backends: Path, monkeypatch: pytest.MonkeyPatch, what: str, text: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write(tmp_path, what)
    (folder,) = scan([tmp_path / "models"])["m"]
    loader = ModelLoader(EngineOptions(backend_directory=str(backends), trial_load=True), FakeClock(), gpus=())
    plan = loader.plan(folder, {})
    if text:
        with pytest.raises(RemoraError, match=text):
            loader.open(plan, 1)
    else:
        loader.open(plan, 1).close()
    assert openings(source) == (1 if what == "crash" else 2)
    assert len(list((tmp_path / "cache" / "remora" / "trials").iterdir())) == (what == "good")
