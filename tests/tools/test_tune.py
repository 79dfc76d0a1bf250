"""`remora tune` as a command with real models: ONNX, Python, ensembles, limits, files and refusals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import onnx
import pytest

from remora.cli import main
from remora.config import read_config
from remora_tools.commands import bytes_of, duration_s_of, objective_of
from remora_tools.deciders.objective import Slo
from remora_tools.tune import ProgressTable, run_search
from remora_tools.tuning import Refused, Result, Trial
from remora_tools.tuning.search import Search
from support.engine.served_model_formula import Formula, goal_of
from support.models import model_folders, onnx_models
from support.process.eventually import eventually

QUICK = ("--window=0.1s", "--budget=6s", "--quiet")
EASY = "--slo=p99<=30s"
"""An objective that a loaded machine holds too."""

SLEEPER = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.004)
        x = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each)]) for each in x]
"""
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
from remora.cli import main
sys.exit(main(sys.argv[1:]))
"""
SLEEPER_CONFIG = """
backend: "python" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
instance_group { count: 1 kind: KIND_CPU }
parameters { key: "ISOLATION" value { string_value: "thread" } }
"""


def onnx_model(root: Path) -> Path:
    (root / "tiny" / "1").mkdir(parents=True)
    onnx.save(onnx_models.layers(2, 8, 2), root / "tiny" / "1" / "model.onnx")
    return root


def sleeper(root: Path, more: str = "") -> Path:
    (root / "sleeper" / "1").mkdir(parents=True)
    (root / "sleeper" / "1" / "model.py").write_text(SLEEPER)
    (root / "sleeper" / "config.pbtxt").write_text(SLEEPER_CONFIG + more)
    return root


def tuned(place: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the command and return its exit code and the JSON."""
    out = place.parent / "tuned.json"
    code = main(["tune", str(place), f"--json={out}", *QUICK, *words])
    return code, json.loads(out.read_text())


def test_a_model_that_gains_from_batches_gets_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = sleeper(tmp_path / "models")
    page = tmp_path / "page.html"
    code, found = tuned(repository, EASY, f"--report={page}", "--apply", "--budget=60s")
    assert code == 0
    assert found["holds"]
    # One request takes 4 ms, and a batch of any size as well.
    assert found["best"]["requests_per_s"] > 1.5 * found["present"]["requests_per_s"]
    best = found["best"]["models"]["sleeper"]
    written = read_config(repository / "sleeper" / "config.pbtxt")
    assert written.max_batch_size == best["max_batch_size"] >= 8
    assert written.HasField("dynamic_batching") == best["dynamic_batching"]
    assert written.instance_group[0].count == best["instances"]
    assert written.input[0].name == "x"
    assert "ISOLATION" in written.parameters
    out = capsys.readouterr().out
    assert "best for p99<=30000ms: " in out
    assert "# sleeper/config.pbtxt\n" in out
    assert f"sleeper: wrote {repository / 'sleeper' / 'config.pbtxt'}" in out
    assert "<svg" in page.read_text()
    # The configuration that was written is the present one of the next run.
    _, again = tuned(repository, EASY, "--rate=5")
    assert again["present"]["models"]["sleeper"] == best


def test_an_onnx_model_without_a_configuration_is_tuned(tmp_path: Path) -> None:
    repository = onnx_model(tmp_path / "models")
    code, found = tuned(repository, EASY)
    assert code == 0
    assert found["best"]["requests_per_s"] > 0
    assert found["best"]["models"]["tiny"]["threads"] >= 1
    assert not (repository / "tiny" / "config.pbtxt").exists()


def test_a_model_file_is_tuned_and_has_no_place_for_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.onnx"
    onnx.save(onnx_models.layers(2, 2), file)
    code, found = tuned(file, EASY, "--rate=5")
    assert code == 0
    assert found["best"]["models"]["tiny"]["instances"] >= 1
    assert main(["tune", str(file), EASY, "--apply"]) == 1
    assert "move it to tiny/1/tiny.onnx" in capsys.readouterr().err


def test_the_models_of_an_ensemble_are_tuned_with_its_load(tmp_path: Path) -> None:
    for name in ("first", "second"):
        model_folders.model(tmp_path / "models", name, model_folders.COMPLETE, model_folders.negation())
    model_folders.ensemble(tmp_path / "models")
    code, found = tuned(tmp_path / "models", EASY)
    assert code == 0
    assert set(found["best"]["models"]) == {"first", "second"}
    assert set(found["config_pbtxt"]) == {"first", "second"}


def test_several_models_share_a_limit_of_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = sleeper(onnx_model(tmp_path / "models"))
    code, found = tuned(repository, EASY, "--memory=64GiB")
    assert code == 0
    assert set(found["best"]["models"]) == {"tiny", "sleeper"}
    assert 0 < found["best"]["memory_bytes"] < 64 << 30
    code, found = tuned(repository, EASY, "--memory=1MiB", "--rate=5")
    assert code == 1
    assert "the models take" in capsys.readouterr().out


def test_an_objective_that_nothing_holds_is_a_failure_with_the_closest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = tuned(sleeper(tmp_path / "models"), "--slo=p99<=1ms")
    assert code == 1
    assert not found["holds"]
    assert found["best"]["latency_ms"] > 1
    out = capsys.readouterr().out
    assert "no configuration holds p99<=1ms: in the closest one p99 is " in out
    assert "config.pbtxt" not in out


def test_a_model_that_keeps_sequences_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = sleeper(tmp_path / "models", more="sequence_batching { }")
    assert main(["tune", str(repository), EASY, *QUICK]) == 1
    err = capsys.readouterr().err
    assert err.startswith("remora tune: model 'sleeper' keeps sequences: ")
    assert "remora bench load --sequence N" in err


def test_a_model_that_always_fails_gives_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = sleeper(tmp_path / "models")
    file = repository / "sleeper" / "1" / "model.py"
    file.write_text(file.read_text().replace("time.sleep(0.004)", "raise ValueError('a broken model')"))
    assert main(["tune", str(repository), EASY, *QUICK]) == 1
    assert "a broken model" in capsys.readouterr().out


def test_functions_get_the_arguments_of_their_decorator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = tmp_path / "app.py"
    app.write_text("import remora\n\n\n@remora.model\ndef double(x: int) -> int:\n    return 2 * x\n")
    assert main(["tune", str(app), EASY, "--apply"]) == 1
    assert "@remora.model(...)" in capsys.readouterr().err
    assert main(["tune", str(app), EASY, "--rate=5", *QUICK]) == 0
    assert "@remora.model(instances=1)" in capsys.readouterr().out


def test_an_interrupt_prints_the_best_so_far(tmp_path: Path) -> None:
    repository = sleeper(tmp_path / "models")
    words = [sys.executable, "-c", INTERRUPTIBLE, "tune", str(repository), EASY, "--window=0.2s", "--budget=10m"]
    log = tmp_path / "err"
    with log.open("wb") as err:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=err)
    try:
        eventually(lambda: b"req/s" in log.read_bytes(), process=process, log=log)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, log.read_text()
    assert "interrupted: this is the best so far" in log.read_text()
    assert b"best for p99<=30000ms: " in out
    assert b"Traceback" not in log.read_bytes()


class FakeTrials:
    """Trials that the user interrupts."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.waiting_ended = threading.Event()

    def run(self, trial: Trial) -> Result:
        self.thread = threading.current_thread()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self.waiting_ended.wait(60.0)
        return Refused("interrupted")


def test_an_interrupt_is_never_raised_inside_of_a_trial(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(number: int, frame: object) -> None:  # as the second interrupt
        raise KeyboardInterrupt

    system, goal, trials = Formula(2e6, 1e5).system(), goal_of(20), FakeTrials()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_search(Search(system, goal), trials, ProgressTable(system, goal, quiet=False))  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, before)
        trials.waiting_ended.set()
    assert trials.thread not in (None, threading.main_thread())
    assert capsys.readouterr().err == "interrupted: this is the best so far\n"


def test_a_terminal_shows_a_table_that_is_redrawn(tmp_path: Path) -> None:
    repository = sleeper(tmp_path / "models")
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "remora", "tune", str(repository), EASY, "--window=0.1s", "--budget=3s"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := _read(ours):
            shown += piece
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"\x1b[" in shown
    assert b"configuration" in shown
    assert b"; measuring no batching, 1 instance, " in shown


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the process has closed its end
        return b""


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("p99<=20ms", Slo(99.0, 20_000_000)),
        ("p99.9 < 1.5s", Slo(99.9, 1_500_000_000)),
        ("p50<=500us", Slo(50.0, 500_000)),
    ],
)
def test_an_objective_is_a_percentile_and_a_limit(text: str, slo: Slo) -> None:
    assert objective_of(text) == slo


@pytest.mark.parametrize(
    "text", ["", "20ms", "p99>=20ms", "p0<=1ms", "p100<=1ms", "p99<=0ms", "p99<=20", "p99<=20ms x"]
)
def test_another_objective_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "models", f"--slo={text}"])
    assert re.search(r"argument --slo: expected a (percentile|time)", capsys.readouterr().err)


def test_times_and_sizes_have_units() -> None:
    assert duration_s_of("2m") == 120
    assert duration_s_of("1.5h") == 5400
    assert bytes_of("2GiB") == 2 << 30
    assert bytes_of("500MB") == 500 << 20
    assert bytes_of("1024") == 1024


@pytest.mark.parametrize("rate", ["0", "-1", "fast", "nan", "2000000"])
def test_a_rate_that_is_none_is_refused_as_a_rate(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["tune", "models", EASY, f"--rate={rate}"])
    assert refusal.value.code == 2
    assert f"--rate: expected requests per second, above 0 to 1,000,000, got '{rate}'" in capsys.readouterr().err
