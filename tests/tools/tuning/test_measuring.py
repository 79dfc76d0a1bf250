"""Trials on an engine in this process: durations, loads, changed settings, failures and overload."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from remora.engine import Engine
from remora.options import EngineOptions
from remora.server.startup import with_workers
from remora_tools.tuning import CostResult, CostTrial, Load, LoadResult, LoadTrial, Refused, Runtime
from remora_tools.tuning.measuring import TrialEngine, loop_in_thread
from support.models import model_folders
from support.process.eventually import eventually

REQUEST = argparse.Namespace(
    json=None, npy=[], input=[], random=False, shape=[], output=[], classes=0, batch=0
)  # fmt: skip

PATIENCE_S = 60.0

SLOW = """
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        threading.Event().wait(0.02)
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in inputs]
"""


@contextmanager
def trial_engine(root: Path, **options: object) -> Iterator[tuple[TrialEngine, Engine]]:
    settings = EngineOptions(paths=(str(root),), model_control_mode="explicit", load_model=("*",))
    with loop_in_thread() as loop, Engine(options=with_workers(settings)) as engine:
        yield TrialEngine(engine, loop, argparse.Namespace(**{**vars(REQUEST), **options}), cores=2), engine


def pipeline(root: Path) -> Path:
    for name in ("first", "second"):
        model_folders.model(root, name, model_folders.COMPLETE, model_folders.negation())
    model_folders.ensemble(root)
    return root


def test_a_system_has_the_models_of_an_ensemble_and_its_route(tmp_path: Path) -> None:
    with trial_engine(pipeline(tmp_path)) as (trials, _):
        system = trials.system
        assert [model.name for model in system.models] == ["first", "second"]
        assert system.routes == ((0, 1),)
        assert system.most_rows == 8
        assert system.models[0].batches[-1] == 128
        assert (2, Runtime(1)) in system.models[0].slots


def test_each_step_of_an_ensemble_has_its_duration_by_rows(tmp_path: Path) -> None:
    with trial_engine(pipeline(tmp_path)) as (trials, _):
        for rows in (1, 4):
            result = trials.run(CostTrial(trials.system.present, rows))
            assert isinstance(result, CostResult)
            assert [set(each) for each in result.costs] == [{rows}, {rows}]
            assert all(ns > 0 for each in result.costs for ns in each.values())
            assert result.memory_bytes > 1 << 20
            assert result.spent_s > 0


@pytest.mark.parametrize("load", [Load(4), Load(0, 50.0)])
def test_a_load_is_answered_and_measured(load: Load, tmp_path: Path) -> None:
    with trial_engine(pipeline(tmp_path)) as (trials, engine):
        result = trials.run(LoadTrial(trials.system.present, load, 0.1))
        assert isinstance(result, LoadResult)
        assert result.rate_per_s > 0
        assert result.latency_ns > 0
        assert result.failures == 0
        eventually(lambda: not engine.running)  # a request is counted as running until after its answer


def test_a_step_in_a_worker_may_outlast_the_measurement(tmp_path: Path) -> None:
    """The end of a measurement cancels its requests, while the worker still runs a step of theirs."""
    model_folders.model(tmp_path, "first", model_folders.COMPLETE, model_folders.negation())
    slow = model_folders.model(tmp_path, "second", model_folders.COMPLETE.replace("onnxruntime", "python"))
    (slow / "1").mkdir()
    (slow / "1" / "model.py").write_text(SLOW)
    model_folders.ensemble(tmp_path)
    with trial_engine(tmp_path) as (trials, _):
        for _ in range(4):
            result = trials.run(CostTrial(trials.system.present, 1))
            assert isinstance(result, CostResult)
            assert result.costs[1], "each measurement has answers"


def test_a_plan_is_loaded_and_the_present_one_again(tmp_path: Path) -> None:
    with trial_engine(pipeline(tmp_path)) as (trials, engine):
        present = trials.system.present
        new = present[0]._replace(limit=32, dynamic=True, instances=1, runtime=Runtime(1))
        assert isinstance(trials.run(LoadTrial((new, present[1]), Load(1), 0.05)), LoadResult)
        config = engine.resolve("first").config
        assert config.max_batch_size == 32
        assert config.instance_group[0].count == 1
        assert config.parameters["intra_op_thread_count"].string_value == "1"
        assert isinstance(trials.run(LoadTrial(present, Load(1), 0.05)), LoadResult)
        assert engine.resolve("first").config == trials.configs["first"]


def test_settings_that_do_not_load_are_refused_and_leave_the_engine_usable(tmp_path: Path) -> None:
    with trial_engine(pipeline(tmp_path)) as (trials, _):
        present = trials.system.present
        broken = present[0]._replace(runtime=Runtime(1, "no-such-accelerator"))
        result = trials.run(LoadTrial((broken, present[1]), Load(1), 0.05))
        assert isinstance(result, Refused)
        assert "no-such-accelerator" in result.reason
        assert isinstance(trials.run(LoadTrial(present, Load(1), 0.05)), LoadResult)


def test_an_interrupt_does_not_wait_for_the_measurement_in_progress() -> None:
    begun, finished, proceed = threading.Event(), threading.Event(), asyncio.Event()

    async def measure() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.wait_for(proceed.wait(), PATIENCE_S)
            finished.set()

    loops: list[asyncio.AbstractEventLoop] = []

    def interrupt() -> None:
        with loop_in_thread() as loop:
            loops.append(loop)
            asyncio.run_coroutine_threadsafe(measure(), loop)
            assert begun.wait(PATIENCE_S)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    loops[0].call_soon_threadsafe(proceed.set)
    assert finished.wait(PATIENCE_S)


def test_a_loop_that_cannot_begin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> NoReturn:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio.events, "new_event_loop", refused)
    with pytest.raises(OSError, match="Too many open files"), loop_in_thread():
        pytest.fail("there is no loop")


def test_an_overload_ends_with_an_empty_queue(tmp_path: Path) -> None:
    with trial_engine(pipeline(tmp_path)) as (trials, engine):
        result = trials.run(LoadTrial(trials.system.present, Load(0, 1e9), 0.1))
        assert isinstance(result, LoadResult)
        assert result.rate_per_s < 1e9
        eventually(lambda: not engine.running)  # a request is counted as running until after its answer


def test_a_request_may_be_given(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 3), "f4"))
    with trial_engine(pipeline(tmp_path / "models"), npy=[("x", str(tmp_path / "x.npy"))]) as (trials, engine):
        assert trials.system.rows == 2
        result = trials.run(CostTrial(trials.system.present, 4))
        assert isinstance(result, CostResult)
        assert set(result.costs[0]) == {4}
        eventually(lambda: not engine.running)  # a request is counted as running until after its answer
