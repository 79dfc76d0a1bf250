"""Loads of a model beside unloads of the same model."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from fakes import write_model
from lifecycle_bench import ALL, PATIENCE_S, Bench, settle, versions
from no_threads import refuse_threads
from remora.models.lifecycle import Lifecycle

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
