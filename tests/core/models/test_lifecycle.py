"""Start, versions, readiness and stop of the models, with a fake backend [H09, M02-M17, V01, V02]."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from remora.calls import IndexEntry
from remora.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    RemoraError,
    UnavailableError,
)
from remora.models.lifecycle import Lifecycle
from remora.models.loader import ModelLoader
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.options import EngineOptions
from support.engine.fakes import DOUBLER, FakeClock, write_model
from support.engine.lifecycle_bench import ALL, PATIENCE_S, Bench, settle, versions


def with_gpus(bench: Bench, gpus: int) -> Lifecycle:
    """Started, on a machine with so many GPUs, one of which is required."""
    options = EngineOptions(model_repository=(bench.repository,), require_gpu=True)
    lifecycle = Lifecycle(options, ModelLoader(options, FakeClock(), gpus=range(gpus)), FakeClock())
    assert lifecycle.start() == {}
    return lifecycle


@pytest.mark.parametrize(
    ("gpus", "kind", "reason"),
    [
        (0, "KIND_AUTO", "--require-gpu: no NVIDIA GPU can be used"),
        (1, "KIND_CPU", "--require-gpu: 1 usable GPU(s), but every model runs on the CPU (m)"),
        (1, "KIND_GPU", ""),
    ],
)
def test_a_server_whose_required_gpu_is_idle_is_not_ready_and_says_why(
    bench: Bench, caplog: pytest.LogCaptureFixture, gpus: int, kind: str, reason: str
) -> None:
    write_model(bench.repository, "m", config=DOUBLER + f"instance_group [{{ kind: {kind} }}]")
    lifecycle = with_gpus(bench, gpus)
    assert lifecycle.is_ready() is not bool(reason)
    assert reason in "".join(lifecycle.readiness().waits_for)
    assert lifecycle.readiness().ready is lifecycle.is_ready()
    assert (f"not ready: {reason}" in caplog.text) is bool(reason)


# -- start ----------------------------------------------------------------------------------------------------------


def test_mode_none_loads_everything_at_start(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        write_model(bench.repository, name)
    lifecycle = bench.started("none")
    assert [model.name for model in lifecycle.ready_models()] == ["a", "b", "c"]
    assert lifecycle.is_ready()


@pytest.mark.parametrize(
    ("wanted", "expected"), [((), []), (("b",), ["b"]), (("b", "b", "a"), ["a", "b"]), (("*",), ["a", "b"])]
)
def test_explicit_mode_loads_what_is_named(bench: Bench, wanted: tuple[str, ...], expected: list[str]) -> None:
    for name in ("a", "b"):
        write_model(bench.repository, name)
    lifecycle = bench.started(load_model=wanted)
    assert [model.name for model in lifecycle.ready_models()] == expected
    assert lifecycle.is_ready()


@pytest.mark.parametrize(("mode", "warned"), [("none", True), ("poll", True), ("explicit", False)])
def test_a_start_without_any_model_shows_what_a_repository_looks_like(
    mode: str, warned: bool, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.started(mode, repository_poll_secs=0)
    assert (f"there are no models in '{bench.repository}'" in caplog.text) is warned
    assert ("digits/1/model.onnx" in caplog.text) is warned


def test_a_model_that_fails_at_start_is_reported_and_the_others_serve(bench: Bench) -> None:
    write_model(bench.repository, "good")
    write_model(bench.repository, "bad")
    bench.break_version("bad", "1")
    lifecycle = bench.lifecycle("none")
    failures = lifecycle.start()
    assert list(failures) == ["bad"]
    assert isinstance(failures["bad"], InvalidArgumentError)
    assert versions(lifecycle, "good") == [1]
    assert not lifecycle.is_ready()


def test_without_strict_readiness_a_failed_model_does_not_matter(bench: Bench) -> None:
    write_model(bench.repository, "bad")
    bench.break_version("bad", "1")
    lifecycle = bench.lifecycle("none", strict_readiness=False)
    lifecycle.start()
    assert lifecycle.is_ready()


def test_a_repository_that_is_not_there_is_an_error(bench: Bench) -> None:
    with pytest.raises(NotFoundError, match="failed to open model repository"):
        bench.lifecycle(model_repository=(bench.repository / "nope",)).start()


def test_without_exit_on_error_a_repository_that_is_not_there_leaves_the_server_alive_and_not_ready(
    bench: Bench,
) -> None:
    write_model(bench.repository, "m")
    absent = bench.repository.parent / "absent"
    lifecycle = bench.lifecycle("poll", model_repository=(bench.repository, absent), exit_on_error=False)
    assert lifecycle.start() == {}
    assert versions(lifecycle, "m") == [1]
    assert not lifecycle.is_ready()
    assert "was never read: failed to open model repository" in "".join(lifecycle.readiness().waits_for)
    absent.mkdir()
    lifecycle.poll()
    assert lifecycle.is_ready()


@pytest.mark.parametrize("policy", ["", "version_policy { all {} }", "version_policy { latest { num_versions: 2 } }"])
def test_an_empty_version_is_left_out_while_another_has_files(
    bench: Bench, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(bench.repository, "m", config=DOUBLER + policy)
    (bench.repository / "m" / "2").mkdir()
    (bench.repository / "m" / "2" / ".keep").touch()
    lifecycle = bench.started("none")
    assert versions(lifecycle, "m") == [1]
    assert lifecycle.is_ready()
    assert "m/2 has no files and is left out" in caplog.text


def test_a_model_without_a_config_is_completed_by_its_backend(bench: Bench) -> None:
    write_model(bench.repository, "m", config=None, file="model.onnx")
    model = bench.started("none").resolve("m")
    assert model.config.input[0].name == "IN"
    assert model.platform == "onnxruntime_onnx"


def test_a_bare_file_is_a_model(bench: Bench) -> None:
    (bench.repository / "digits.onnx").write_bytes(b"")
    lifecycle = bench.started("none", model_repository=(), paths=(bench.repository / "digits.onnx",))
    assert lifecycle.resolve("digits").version == 1


def test_a_model_in_two_repositories_is_served_from_neither(bench: Bench) -> None:
    one, two = bench.repository / "one", bench.repository / "two"
    write_model(one, "m")
    write_model(two, "m")
    lifecycle = bench.lifecycle("none", model_repository=(one, two))
    assert isinstance(lifecycle.start()["m"], InternalError)
    assert lifecycle.ready_models() == []


# -- which version --------------------------------------------------------------------------------------------------


def test_without_a_version_the_highest_ready_one_serves(bench: Bench) -> None:
    write_model(bench.repository, "m", versions=("1", "2", "10"), config=ALL)
    lifecycle = bench.started("none")
    assert lifecycle.resolve("m").version == 10
    assert lifecycle.resolve("m", 2).version == 2
    assert versions(lifecycle, "m") == [1, 2, 10]


def test_the_latest_version_alone_serves_unless_the_policy_says_more(bench: Bench) -> None:
    write_model(bench.repository, "m", versions=("1", "2"))
    assert versions(bench.started("none"), "m") == [2]


def test_a_lookup_that_fails_says_why_with_tritons_text(bench: Bench) -> None:
    write_model(bench.repository, "m", versions=("1", "2"), config=ALL)
    lifecycle = bench.started(load_model=("m",))
    lookups: list[tuple[str, int, type[RemoraError], str]] = [
        ("x", -1, NotFoundError, "Request for unknown model: 'x' is not found"),
        ("x", 1, NotFoundError, "Request for unknown model: 'x' is not found"),
        ("m", 9, NotFoundError, "Request for unknown model: 'm' version 9 is not found"),
    ]
    for name, version, kind, text in lookups:
        with pytest.raises(kind, match=f"^{re.escape(text)}$"):
            lifecycle.resolve(name, version)
    lifecycle.unload("m")
    with pytest.raises(NotFoundError, match=r"^Request for unknown model: 'm' has no available versions$"):
        lifecycle.resolve("m")
    with pytest.raises(UnavailableError, match=r"^Request for unknown model: 'm' version 1 is not at ready state$"):
        lifecycle.resolve("m", 1)


# -- index, readiness, end ------------------------------------------------------------------------------------------


def test_the_index_leaves_out_a_model_whose_load_found_no_version(bench: Bench) -> None:
    (bench.repository / "empty").mkdir(parents=True)
    (bench.repository / "empty" / "config.pbtxt").write_text(DOUBLER)
    lifecycle = bench.started()
    assert lifecycle.index(ready=False) == [IndexEntry("empty")]
    with pytest.raises(InvalidArgumentError, match="at least one version must be available"):
        lifecycle.load("empty", {})
    assert lifecycle.index(ready=False) == []


def test_the_index_names_what_was_never_loaded_and_says_why_the_rest_is_not_ready(bench: Bench) -> None:
    for name in ("bad", "gone", "new", "on"):
        write_model(bench.repository, name)
    bench.break_version("bad", "1")
    lifecycle = bench.started(load_model=("on", "gone"))
    lifecycle.unload("gone")
    settle(lifecycle)
    with pytest.raises(InvalidArgumentError):
        lifecycle.load("bad", {})
    assert lifecycle.index(ready=False) == [
        IndexEntry("bad", "1", "UNAVAILABLE", "Invalid argument: the model is broken"),
        IndexEntry("gone", "1", "UNAVAILABLE", "unloaded"),
        IndexEntry("new"),
        IndexEntry("on", "1", "READY"),
    ]
    assert lifecycle.index(ready=True) == [IndexEntry("on", "1", "READY")]


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        ([], True),
        (["load good"], True),
        (["load good", "unload good"], True),
        (["load bad"], False),
        (["load good", "load bad"], False),
        (["load nowhere"], True),
    ],
)
def test_the_server_is_ready_unless_a_model_that_should_serve_cannot(
    bench: Bench, happens: list[str], expected: bool
) -> None:
    write_model(bench.repository, "good")
    write_model(bench.repository, "bad")
    bench.break_version("bad", "1")
    lifecycle = bench.started()
    for step in happens:
        call, name = step.split()
        try:
            lifecycle.load(name, {}) if call == "load" else lifecycle.unload(name)
        except RemoraError:
            assert name != "good"
    assert lifecycle.is_ready() is expected


def test_the_server_is_not_ready_before_it_started_nor_while_it_stops(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.lifecycle("none")
    assert not lifecycle.is_ready()
    lifecycle.start()
    assert lifecycle.is_ready()
    assert lifecycle.stop(PATIENCE_S)
    assert not lifecycle.is_ready()


@pytest.mark.parametrize("strict", [True, False])
def test_a_server_that_must_be_restarted_is_neither_live_nor_ready_and_says_why(bench: Bench, strict: bool) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started("none", strict_readiness=strict)
    assert lifecycle.is_live()
    (instance,) = lifecycle.table.resolve("m").instances
    doomed: Any = instance
    doomed.trouble = "a worker is being started again"
    assert lifecycle.is_live(), "an instance that recovers by itself"
    doomed.trouble, doomed.fatal = "cudaMemcpy failed; restart the server", True
    assert not lifecycle.is_live()
    assert not lifecycle.is_ready()
    assert not lifecycle.is_model_ready("m", -1)
    readiness = lifecycle.readiness()
    assert (readiness.ready, readiness.live) == (False, False)
    assert "model 'm' version 1: cudaMemcpy failed; restart the server" in readiness.waits_for
    doomed.trouble = ""
    assert lifecycle.is_live()


def test_stop_closes_every_model_once(bench: Bench) -> None:
    for name in ("a", "b"):
        write_model(bench.repository, name)
    lifecycle = bench.started("none")
    assert lifecycle.stop(PATIENCE_S)
    assert lifecycle.stop(PATIENCE_S)
    assert [model.closed for model in bench.backend.opened] == [1, 1]
    with pytest.raises(UnavailableError, match="the server is stopping"):
        lifecycle.resolve("a")


def test_a_load_that_ends_after_the_stop_is_closed_and_not_served(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started()
    bench.backend.opening = lambda: lifecycle.stop(PATIENCE_S)
    with pytest.raises(UnavailableError, match="the server is stopping"):
        lifecycle.load("m", {})
    settle(lifecycle)
    assert lifecycle.ready_models() == []
    assert [model.closed for model in bench.backend.opened] == [1]


def test_requests_before_the_start_wait_only_if_waiting_is_allowed(bench: Bench) -> None:
    write_model(bench.repository, "m")
    waiting = bench.lifecycle("none")
    with pytest.raises(LoadingError) as loading:
        waiting.resolve("m")
    waiting.start()
    loading.value.ready.result(PATIENCE_S)
    with pytest.raises(NotFoundError):
        bench.lifecycle("none", wait_for_models=False).resolve("m")


@pytest.mark.parametrize("mode", ["none", "ondemand"])
def test_a_request_whose_model_becomes_ready_during_its_look_up_is_served(bench: Bench, mode: str) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.lifecycle(mode, load_model=("m",), repository_poll_secs=0)
    look_up = lifecycle.table.look_up

    def slowly(name: str, version: int = -1) -> ServedModel:
        try:
            return look_up(name, version)
        finally:
            if not lifecycle.readiness().started:
                lifecycle.start()

    lifecycle.table.look_up = slowly  # type: ignore[method-assign]
    assert lifecycle.resolve("m").version == 1


def test_the_latest_version_is_ready_while_another_takes_its_place(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    look_up = lifecycle.table.look_up

    def slowly(name: str, version: int = -1) -> ServedModel:
        if version == 1:
            write_model(bench.repository, "m", versions=("2",))
            lifecycle.load("m", {})
        return look_up(name, version)

    lifecycle.table.look_up = slowly  # type: ignore[method-assign]
    assert lifecycle.is_model_ready("m@latest", -1)


def test_the_only_model_is_known_once_all_of_the_start_have_come(bench: Bench) -> None:
    write_model(bench.repository, "m")
    waiting = bench.lifecycle("none")
    with pytest.raises(LoadingError) as loading:
        waiting.only_model()
    waiting.start()
    loading.value.ready.result(PATIENCE_S)
    assert waiting.only_model() == "m"
    assert bench.lifecycle("none", wait_for_models=False).only_model() == ""


def test_there_is_an_only_model_as_long_as_one_serves_in_whatever_versions(bench: Bench) -> None:
    for name in ("m", "n"):
        write_model(bench.repository, name, versions=("1", "2"), config=ALL)
    lifecycle = bench.started("explicit", load_model=("m",))
    names = [lifecycle.only_model()]
    for change in (lambda: lifecycle.load("n", {}), lambda: lifecycle.unload("m"), lambda: lifecycle.unload("n")):
        change()
        names.append(lifecycle.only_model())
    assert names == ["m", "", "n", ""]


def test_on_demand_the_only_model_is_the_only_one_that_could_be_loaded(bench: Bench) -> None:
    write_model(bench.repository, "m")
    assert bench.started("ondemand", repository_poll_secs=0).only_model() == "m"
    write_model(bench.repository, "n")
    lifecycle = bench.started("ondemand", repository_poll_secs=0)
    lifecycle.wait_for("m", -1, PATIENCE_S)
    assert lifecycle.only_model() == "", "the order of requests must not decide"


def test_requests_that_wait_for_a_failing_start_are_answered_and_nothing_is_ready(bench: Bench) -> None:
    lifecycle = bench.lifecycle("none", model_repository=(bench.repository / "nowhere",))
    with pytest.raises(LoadingError) as loading:
        lifecycle.resolve("m")
    with pytest.raises(NotFoundError):
        lifecycle.start()
    with pytest.raises(UnavailableError, match="could not be loaded"):
        loading.value.ready.result(0)
    with pytest.raises(UnavailableError, match="could not be loaded"):
        lifecycle.wait_for("m", -1)
    assert not lifecycle.is_ready()
    assert not lifecycle.readiness().started


@pytest.mark.parametrize("mode", ["none", "ondemand"])
def test_requests_that_wait_for_a_load_are_answered_when_the_server_stops(bench: Bench, mode: str) -> None:
    loading, may_end = threading.Event(), threading.Event()

    def during() -> None:
        loading.set()
        assert may_end.wait(PATIENCE_S)

    write_model(bench.repository, "m")
    lifecycle = bench.lifecycle(mode, repository_poll_secs=0)
    bench.backend.opening = during
    starting = threading.Thread(target=lifecycle.start)
    starting.start()
    if mode == "ondemand":
        starting.join(PATIENCE_S)
    with pytest.raises(LoadingError) as waits:
        lifecycle.resolve("m")
    assert loading.wait(PATIENCE_S)
    lifecycle.stop(0.0)
    with pytest.raises(UnavailableError, match="the server is stopping"):
        waits.value.ready.result(0)
    may_end.set()
    starting.join(PATIENCE_S)
    assert not lifecycle.is_ready()


def test_the_awaited_loads_are_described(bench: Bench) -> None:
    write_model(bench.repository, "bad")
    bench.break_version("bad", "1")
    lifecycle = bench.lifecycle("none")
    assert lifecycle.readiness().waits_for == ("the models of the start are being loaded",)
    lifecycle.start()
    assert lifecycle.readiness().waits_for == (
        "model 'bad' version 1 is UNAVAILABLE: Invalid argument: the model is broken",
    )
    lifecycle.begin_drain()
    assert "the server is draining" in lifecycle.readiness().waits_for
