"""Ctrl-C ends commands that run models in their process, whatever the models do."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from conftest import needs
from remora.cli.interrupts import open_models, run_aside
from support.process.eventually import eventually

PATIENCE_S = 60.0
ENDLESS = """
import time
from pathlib import Path

class TritonPythonModel:
    def initialize(self, args):
        Path({begun!r}).touch()
        while True:
            time.sleep(0.01)

    def execute(self, requests):
        raise NotImplementedError
"""
CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
instance_group { count: 1 kind: KIND_CPU }
parameters { key: "ISOLATION" value { string_value: "thread" } }
"""
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
from remora.cli import main
sys.exit(main(sys.argv[1:]))
"""


class FakeEngine:
    """Engine that records how it is stopped."""

    def __init__(self) -> None:
        self.begun_in: threading.Thread | None = None
        self.stops: list[float | None] = []

    def start(self) -> FakeEngine:
        self.begun_in = threading.current_thread()
        return self

    def stop(self, timeout_s: float | None = None) -> bool:
        self.stops.append(timeout_s)
        return True


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also in a shell's background job."""

    def raise_interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, raise_interrupt)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_wait_and_not_the_work() -> None:
    waiting_ended, done = threading.Event(), threading.Event()
    caller = threading.get_ident()

    def work() -> None:
        signal.pthread_kill(caller, signal.SIGINT)
        waiting_ended.wait(PATIENCE_S)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        run_aside(work)
    waiting_ended.set()
    assert done.wait(PATIENCE_S)


def test_a_result_and_an_error_reach_the_caller() -> None:
    assert run_aside(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_aside(lambda: 1 // 0)


def test_models_are_loaded_in_another_thread() -> None:
    engine = FakeEngine()
    with open_models(engine):  # type: ignore[arg-type]
        assert engine.begun_in not in (None, threading.main_thread())
        assert engine.stops == []
    assert engine.stops == [None]


@pytest.mark.parametrize(("error", "is_limited"), [(ValueError, False), (KeyboardInterrupt, True)])
def test_only_after_an_interrupt_requests_in_flight_have_little_time(
    error: type[BaseException], is_limited: bool
) -> None:
    engine = FakeEngine()
    with pytest.raises(error), open_models(engine):  # type: ignore[arg-type]
        raise error
    (timeout_s,) = engine.stops
    assert (timeout_s is not None) == is_limited


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        pytest.param("score MODELS in.csv out.csv", (130,), marks=needs("remora_tools")),
        pytest.param("tune MODELS --slo=p99<=1s", (130,), marks=needs("remora_tools")),
        pytest.param("infer --repository=MODELS endless --random", (130,), marks=needs("remora_tools")),
        ("serve MODELS --http-port=0 --grpc-port=0 --metrics-port=0", (130, 0)),  # 0 once it handles signals
    ],
    ids=["score", "tune", "infer", "serve"],
)
def test_an_interrupt_during_a_load_ends_the_command_and_is_no_failure_of_the_model(
    words: str, codes: tuple[int, ...], tmp_path: Path, child_environment: dict[str, str]
) -> None:
    folder, begun, log = tmp_path / "models" / "endless", tmp_path / "begun", tmp_path / "err"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(ENDLESS.format(begun=str(begun)))
    (folder / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "in.csv").write_text("x\n1\n")
    arguments = [word.replace("MODELS", str(tmp_path / "models")) for word in words.split(" ")]
    with log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], cwd=tmp_path, stderr=err, env=child_environment
        )
    try:
        eventually(begun.exists, process=process, log=log)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) in codes, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "KeyboardInterrupt" not in log.read_text()
