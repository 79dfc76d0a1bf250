"""Loads of a model beside unloads of the same model."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from remora.calls import IndexEntry
from remora.errors import InvalidArgumentError
from remora.models.lifecycle import Lifecycle
from remora.models.loader import LoadPlan
from support.engine.fakes import FakeBackendModel, write_model
from support.engine.lifecycle_bench import ALL, PATIENCE_S, Bench, settle, versions
from support.process.no_threads import refuse_threads

TWO_INSTANCES = "instance_group { count: 2 kind: KIND_CPU }"


def in_another_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def unloads_while_opening(bench: Bench, lifecycle: Lifecycle) -> None:
    """Have the next version that is opened find its model unloaded."""

    def unload() -> None:
        bench.backend.opening = lambda: None
        in_another_thread(lambda: lifecycle.unload("m"))

    bench.backend.opening = unload


def test_a_load_opens_what_it_wanted_to_keep_again_if_that_is_unloaded_meanwhile(bench: Bench) -> None:
    write_model(bench.repository, "m", config=ALL)
    lifecycle = bench.started(load_model=("m",))
    write_model(bench.repository, "m", versions=("2",), config=ALL)
    unloads_while_opening(bench, lifecycle)
    lifecycle.load("m", {})
    assert versions(lifecycle, "m") == [1, 2]
    settle(lifecycle)


def test_a_load_that_changes_instances_opens_the_model_again_if_it_is_unloaded_meanwhile(bench: Bench) -> None:
    write_model(bench.repository, "m", config=ALL)
    lifecycle = bench.started(load_model=("m",))
    write_model(bench.repository, "m", versions=("2",), config=ALL + TWO_INSTANCES)
    unloads_while_opening(bench, lifecycle)
    lifecycle.load("m", {})
    assert versions(lifecycle, "m") == [1, 2]
    assert [model.instance_count for model in lifecycle.ready_models()] == [2, 2]
    settle(lifecycle)
    assert [model.closed for model in bench.backend.opened] == [1, 0, 0]


@pytest.mark.parametrize("next_command", ["unload", "stop"])
def test_an_unload_for_which_no_thread_can_start_takes_effect_and_the_model_is_closed_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, next_command: str
) -> None:
    for name in ("m", "other"):
        write_model(bench.repository, name)
    lifecycle = bench.started(load_model=("m", "other"))
    with monkeypatch.context() as without_threads:
        refuse_threads(without_threads, "remora close")
        lifecycle.unload("m")
        assert versions(lifecycle, "m") == []
        assert not lifecycle.wait_until_closed(PATIENCE_S)
    assert "unloaded versions keep their memory until the next load or unload: can't start new thread" in caplog.text
    assert [model.closed for model in bench.backend.opened] == [0, 0]
    if next_command == "unload":
        lifecycle.unload("other")
        settle(lifecycle)
    else:
        assert lifecycle.stop(PATIENCE_S)
    assert [model.closed for model in bench.backend.opened] == [1, 1]


class StuckPart:
    """Part of a model that cannot be closed."""

    def close(self) -> None:
        raise ValueError("the driver is gone")


def stick(model: FakeBackendModel, part: str) -> None:
    """Have one part of a model raise when it is closed."""
    stuck = model.instances[0] if part == "instance" else model
    stuck.close = StuckPart().close  # type: ignore[method-assign]


@pytest.mark.parametrize("part", ["instance", "model"])
def test_a_version_whose_part_cannot_be_closed_is_unloaded_and_its_other_parts_are_closed(
    bench: Bench, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    write_model(bench.repository, "m", config=ALL + TWO_INSTANCES)
    lifecycle = bench.started(load_model=("m",))
    (opened,) = bench.backend.opened
    stick(opened, part)
    lifecycle.unload("m")
    settle(lifecycle)
    assert lifecycle.index(ready=False) == [IndexEntry("m", "1", "UNAVAILABLE", "unloaded")]
    assert opened.instances[1].closed == 1
    assert opened.closed == (part == "instance")
    assert "model 'm': an error occurred while it was being closed" in caplog.text
    assert "the driver is gone" in caplog.text


def test_a_stop_closes_every_model_though_a_part_of_one_cannot_be_closed(bench: Bench) -> None:
    for name in ("a", "b"):
        write_model(bench.repository, name)
    lifecycle = bench.started("none")
    for opened in bench.backend.opened:
        stick(opened, "instance")
    assert lifecycle.stop(PATIENCE_S)
    assert [opened.closed for opened in bench.backend.opened] == [1, 1]


def test_instances_that_leave_and_cannot_be_closed_do_not_fail_the_change(bench: Bench) -> None:
    folder = write_model(bench.repository, "m", config=ALL + TWO_INSTANCES)
    lifecycle = bench.started(load_model=("m",))
    (opened,) = bench.backend.opened
    for instance in opened.instances:
        instance.close = StuckPart().close  # type: ignore[method-assign]
    (folder / "config.pbtxt").write_text(ALL)
    lifecycle.load("m", {})
    assert lifecycle.resolve("m").instance_count == 1
    assert lifecycle.is_ready()


def test_a_version_whose_files_cannot_be_fetched_for_whatever_reason_is_not_left_in_loading(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(*_: object) -> LoadPlan:
        raise ValueError("the storage answers nonsense")

    write_model(bench.repository, "m")
    lifecycle = bench.started()
    monkeypatch.setattr(LoadPlan, "fetched", fetched)
    with pytest.raises(InvalidArgumentError, match="ValueError: the storage answers nonsense"):
        lifecycle.load("m", {})
    why = "Internal: ValueError: the storage answers nonsense"
    assert lifecycle.index(ready=False) == [IndexEntry("m", "1", "UNAVAILABLE", why)]
    assert not lifecycle.is_ready()
