"""What the log tells of loads: each with its reason, and a failure that polls repeat once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from remora.models import loader as loading
from remora.models.lifecycle import Lifecycle
from remora.models.loader import ModelLoader
from remora.options import EngineOptions
from support.engine.fakes import FakeBackend, FakeClock, write_model


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    caplog.set_level(logging.INFO, "remora.models")
    return caplog


def lifecycle(repository: Path, mode: str) -> Lifecycle:
    options = EngineOptions(model_control_mode=mode, model_repository=(repository,), repository_poll_secs=0)
    return Lifecycle(options, ModelLoader(options, FakeClock()), FakeClock())


def lines(log: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in log.records]
    log.clear()
    return found


def test_each_load_swap_and_unload_that_a_client_asks_for_is_one_line(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "m")
    models = lifecycle(tmp_path, "explicit")
    models.start()
    models.load("m", {})
    assert lines(log) == ["model 'm': version 1 loaded in 0 ms (a client asked for it)"]
    write_model(tmp_path, "m", versions=("2",))
    models.load("m", {})
    assert lines(log) == ["model 'm': version 2 loaded in 0 ms, version 1 retired (a client asked for it)"]
    models.unload("m")
    assert lines(log) == ["model 'm': version 2 unloaded (a client asked for it)"]


def test_the_models_of_the_start_are_in_a_table_instead(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "m")
    lifecycle(tmp_path, "none").start()
    assert lines(log) == []


def test_a_poll_tells_why_models_come_and_go(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "m")
    models = lifecycle(tmp_path, "poll")
    models.start()
    write_model(tmp_path, "m", versions=("2",))
    models.poll()
    assert lines(log) == ["model 'm': version 2 loaded in 0 ms, version 1 retired (its files have changed)"]
    (tmp_path / "m").rename(tmp_path.parent / "elsewhere")
    models.poll()
    assert lines(log) == ["model 'm': version 2 unloaded (its folder is gone)"]


def test_polls_log_a_failure_once_until_its_files_change(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "m")
    (tmp_path / "m" / "1" / "broken").touch()
    models = lifecycle(tmp_path, "poll")
    models.start()
    assert [line.partition(":")[0] for line in lines(log)] == ["cannot load 'm' version 1"]
    for _ in range(3):
        models.poll()
    assert lines(log) == []
    (tmp_path / "m" / "1" / "more").touch()
    models.poll()
    models.poll()
    assert [line.partition(":")[0] for line in lines(log)] == ["cannot load 'm' version 1"]
    (tmp_path / "m" / "1" / "broken").unlink()
    models.poll()
    assert lines(log) == ["model 'm': version 1 loaded in 0 ms (its files have changed)"]
