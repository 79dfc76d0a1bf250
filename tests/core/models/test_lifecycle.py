"""Which versions serve: loads that are all or nothing, unloads, index and readiness [H09, M02-M17, V01, V02]."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fakes import DOUBLER, FakeBackend, FakeClock, Replies, write_model
from remora.calls import IndexEntry
from remora.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    RemoraError,
    RetiredError,
    UnavailableError,
)
from remora.messages import InferForm, InputSpec, Response
from remora.models import loader as loading
from remora.models.lifecycle import Lifecycle
from remora.models.loader import LoadPlan, ModelLoader
from remora.models.served_model import ServedModel, Steps
from remora.models.table import LoadingError
from remora.options import EngineOptions
from remora.repository import Fingerprint, ModelFolder
from remora.repository.local import LocalRepository

ALL = DOUBLER + "version_policy { all { } }"
PATIENCE_S = 30.0


@dataclass
class Bench:
    """A repository in a separate folder, and the backend that serves it."""

    repository: Path
    backend: FakeBackend

    def lifecycle(self, mode: str = "explicit", **settings: Any) -> Lifecycle:
        """Not started yet."""
        settings.setdefault("model_repository", (self.repository,))
        options = EngineOptions(model_control_mode=mode, **settings)
        return Lifecycle(options, ModelLoader(options, FakeClock()), FakeClock())

    def started(self, mode: str = "explicit", **settings: Any) -> Lifecycle:
        lifecycle = self.lifecycle(mode, **settings)
        assert lifecycle.start() == {}
        return lifecycle

    def break_version(self, name: str, version: str) -> None:
        (self.repository / name / version / "broken").touch()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An empty repository whose models the fake backend serves."""
    backend = FakeBackend()
    monkeypatch.setattr(loading, "find_backend", backend.find)
    return Bench(tmp_path, backend)


def settle(lifecycle: Lifecycle) -> None:
    """Wait until what was retired is closed."""
    for thread in lifecycle._loads.closing:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def versions(lifecycle: Lifecycle, name: str) -> list[int]:
    state = lifecycle.state(name)
    return state.ready_versions if state else []


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


# -- load and unload ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["load", "unload"])
def test_clients_may_change_nothing_outside_explicit_mode(bench: Bench, call: str) -> None:
    lifecycle = bench.started("none")
    with pytest.raises(UnavailableError, match=r"^explicit model load / unload is not allowed if polling is enabled$"):
        lifecycle.load("m", {}) if call == "load" else lifecycle.unload("m")


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (None, {}),
        ("no config {", {}),
        ('name: "other"\n' + DOUBLER, {}),
        (DOUBLER, {"config": "{not json"}),
        (DOUBLER, {"nope": "x"}),
    ],
    ids=["nowhere", "unreadable", "another-name", "override-unreadable", "unknown-parameter"],
)
def test_what_cannot_be_planned_is_one_text(bench: Bench, config: str | None, parameters: dict[str, str]) -> None:
    if config is not None:
        write_model(bench.repository, "m", config=config)
    lifecycle = bench.started()
    with pytest.raises(RemoraError) as failed:
        lifecycle.load("m", parameters)
    if "nope" not in parameters:
        assert str(failed.value) == "failed to load 'm', failed to poll from model repository"
        assert isinstance(failed.value, InternalError)
    assert lifecycle.state("m") is None
    assert lifecycle.is_ready()


@pytest.mark.parametrize("name", ["..", "../m", "a/b", "/etc", ".", ""])
def test_a_name_is_never_a_path(bench: Bench, name: str) -> None:
    write_model(bench.repository, "m")
    with pytest.raises(InternalError, match="failed to poll from model repository"):
        bench.started().load(name, {})


def test_a_load_that_fails_says_which_version_and_why(bench: Bench) -> None:
    write_model(bench.repository, "m", versions=("1", "2"), config=ALL)
    bench.break_version("m", "1")
    lifecycle = bench.started()
    text = "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: the model is broken;\n"
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(text)}$"):
        lifecycle.load("m", {})
    assert versions(lifecycle, "m") == []
    settle(lifecycle)
    assert [model.closed for model in bench.backend.opened] == [1]


def test_a_failed_reload_leaves_what_serves_in_service(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    before = lifecycle.resolve("m")
    bench.break_version("m", "1")
    with pytest.raises(InvalidArgumentError):
        lifecycle.load("m", {})
    assert lifecycle.resolve("m") is before
    write_model(bench.repository, "m", versions=("2",))
    bench.break_version("m", "2")
    with pytest.raises(InvalidArgumentError):
        lifecycle.load("m", {})
    assert lifecycle.resolve("m") is before
    assert bench.backend.opened[0].closed == 0


def test_a_model_without_versions_cannot_be_loaded(bench: Bench) -> None:
    write_model(bench.repository, "m", versions=())
    lifecycle = bench.started()
    with pytest.raises(InvalidArgumentError, match="at least one version must be available under the version policy"):
        lifecycle.load("m", {})
    assert not lifecycle.is_ready()


def test_a_reload_takes_over_and_what_was_replaced_is_closed(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    write_model(bench.repository, "m", versions=("2",))
    lifecycle.load("m", {})
    settle(lifecycle)
    assert versions(lifecycle, "m") == [2]
    first, second = bench.backend.opened
    assert (first.closed, first.instances[0].closed) == (1, 1)
    assert second.closed == 0
    assert lifecycle.index(ready=False) == [
        IndexEntry("m", "1", "UNAVAILABLE", "unloaded"),
        IndexEntry("m", "2", "READY"),
    ]
    assert lifecycle.is_ready()


def test_a_config_in_the_request_counts_until_the_next_load_without_one(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started()
    override = """{"backend": "fake", "max_batch_size": 3,
                   "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
                   "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}]}"""
    lifecycle.load("m", {"config": override})
    assert lifecycle.resolve("m").signature.max_batch_size == 3
    lifecycle.load("m", {})
    assert lifecycle.resolve("m").signature.max_batch_size == 8


def test_unloading_twice_or_what_is_not_there_is_fine(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    for name in ("m", "m", "nope"):
        lifecycle.unload(name)
    settle(lifecycle)
    assert bench.backend.opened[0].closed == 1
    assert lifecycle.state("nope") is None


def test_an_unloaded_model_can_come_back(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    lifecycle.unload("m")
    lifecycle.load("m", {})
    assert lifecycle.resolve("m").version == 1


def test_an_unload_answers_at_once_and_lets_what_runs_finish(bench: Bench) -> None:
    running, may_end, answered = threading.Event(), threading.Event(), threading.Event()

    def during() -> None:
        running.set()
        assert may_end.wait(PATIENCE_S)

    bench.backend.during = during
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    replies = Replies()

    def reply(*answer: Any) -> None:
        replies(*answer)
        answered.set()

    ticket = lifecycle.resolve("m").submit(InferForm((InputSpec("IN", "INT32", (1, 1)),)), [b"\x07\x00\x00\x00"], reply)
    assert running.wait(PATIENCE_S)
    lifecycle.unload("m")
    assert bench.backend.opened[0].closed == 0
    may_end.set()
    assert answered.wait(PATIENCE_S)
    settle(lifecycle)
    assert replies.only(ticket).outputs[0].data.tolist() == [[14]]  # type: ignore[union-attr]
    assert bench.backend.opened[0].closed == 1


def test_loads_of_one_model_take_turns_and_nothing_is_left_open(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started()
    threads = [threading.Thread(target=lifecycle.load, args=("m", {})) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert lifecycle.stop(PATIENCE_S)
    assert [model.closed for model in bench.backend.opened] == [1] * len(bench.backend.opened)


# -- reloads that change little ---------------------------------------------------------------------------------------


def test_a_reload_of_what_did_not_change_does_nothing(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    before = lifecycle.resolve("m")
    lifecycle.load("m", {})
    assert lifecycle.resolve("m") is before
    assert len(bench.backend.opened) == 1


def test_a_version_that_comes_leaves_the_others_as_they_are(bench: Bench) -> None:
    write_model(bench.repository, "m", config=ALL)
    lifecycle = bench.started(load_model=("m",))
    first = lifecycle.resolve("m")
    write_model(bench.repository, "m", versions=("2",), config=ALL)
    lifecycle.load("m", {})
    assert versions(lifecycle, "m") == [1, 2]
    assert lifecycle.resolve("m", 1) is first


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 2)])
def test_instances_come_and_go_in_place(bench: Bench, before: int, after: int) -> None:
    folder = write_model(bench.repository, "m", config=DOUBLER + f"instance_group {{ count: {before} }}")
    lifecycle = bench.started(load_model=("m",))
    model = lifecycle.resolve("m")
    (folder / "config.pbtxt").write_text(DOUBLER + f"instance_group {{ count: {after} }}")
    lifecycle.load("m", {})
    assert lifecycle.resolve("m") is model
    assert model.config.instance_group[0].count == after
    (opened,) = bench.backend.opened
    assert [instance.closed for instance in opened.instances].count(0) == after
    assert len(opened.instances) == max(before, after), "what was there already stays"
    assert answer_of(model) == 14


def test_new_instances_that_fail_leave_the_model_as_it_was(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    (folder / "config.pbtxt").write_text(DOUBLER + "instance_group { count: 2 }")

    def instance(*_: object) -> None:
        raise InternalError("no memory")

    monkeypatch.setattr(bench.backend.opened[0], "instance", instance)
    with pytest.raises(InvalidArgumentError, match="no memory"):
        lifecycle.load("m", {})
    model = lifecycle.resolve("m")
    assert answer_of(model) == 14
    assert model.config.instance_group[0].count != 2
    assert lifecycle.is_ready()


def answer_of(model: ServedModel) -> int:
    """What becomes of 7."""
    replies, answered = Replies(), threading.Event()

    def reply(*answer: Any) -> None:
        replies(*answer)
        answered.set()

    ticket = model.submit(InferForm((InputSpec("IN", "INT32", (1, 1)),)), [b"\x07\x00\x00\x00"], reply)
    assert answered.wait(PATIENCE_S)
    return int(replies.only(ticket).outputs[0].data[0, 0])  # type: ignore[union-attr]


def test_a_request_that_looked_its_model_up_before_it_was_replaced_is_told_to_look_again(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    stale = lifecycle.resolve("m")
    write_model(bench.repository, "m", versions=("2",))
    lifecycle.load("m", {})
    settle(lifecycle)
    with pytest.raises(RetiredError):
        answer_of(stale)
    assert answer_of(lifecycle.resolve("m")) == 14
    assert not any(stale.statistics.failures.values())


@pytest.mark.parametrize(("retries", "loads"), [(0, False), (1, False), (2, True)])
def test_a_load_that_fails_is_tried_again_as_often_as_the_option_says(bench: Bench, retries: int, loads: bool) -> None:
    write_model(bench.repository, "m")
    failures = [InternalError("the licence server is away")] * 2

    def opening() -> None:
        if failures:
            raise failures.pop()

    bench.backend.opening = opening
    lifecycle = bench.lifecycle("none", model_load_retry_count=retries)
    assert (lifecycle.start() == {}) is loads


SEQUENCES = (
    DOUBLER
    + """
sequence_batching { max_sequence_idle_microseconds: 60000000 direct { }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } }
"""
)


def ask_sequence(
    lifecycle: Lifecycle, *, start: bool = False, end: bool = False, sequence: int = 5
) -> Response | RemoraError:
    """The answer to a request of a sequence."""
    replies, answered = Replies(), threading.Event()

    def reply(*answer: Any) -> None:
        replies(*answer)
        answered.set()

    form = InferForm((InputSpec("IN", "INT32", (1, 1)),), sequence_id=sequence, sequence_start=start, sequence_end=end)
    ticket = lifecycle.resolve("m").submit(form, [b"\x07\x00\x00\x00"], reply)
    assert answered.wait(PATIENCE_S)
    return replies.only(ticket)


def test_a_sequence_ends_where_it_began_though_another_version_has_taken_over(bench: Bench) -> None:
    write_model(bench.repository, "m", config=SEQUENCES)
    lifecycle = bench.started(load_model=("m",))
    ask = partial(ask_sequence, lifecycle)
    assert isinstance(ask(start=True), Response)
    write_model(bench.repository, "m", versions=("2",), config=SEQUENCES)
    lifecycle.load("m", {})
    old, new = (opened.instances[0] for opened in bench.backend.opened)
    assert isinstance(ask(), Response)
    assert isinstance(ask(start=True, sequence=6), Response), "a new one begins with what serves now"
    assert (len(old.batches), len(new.batches)) == (2, 1)
    assert bench.backend.opened[0].closed == 0
    assert isinstance(ask(end=True), Response)
    settle(lifecycle)
    assert bench.backend.opened[0].closed == 1
    assert lifecycle.resolve("m").predecessor is None


def test_a_sequence_finds_back_through_two_swaps(bench: Bench) -> None:
    write_model(bench.repository, "m", config=SEQUENCES)
    lifecycle = bench.started(load_model=("m",))
    ask = partial(ask_sequence, lifecycle)
    assert isinstance(ask(start=True), Response)
    for version in ("2", "3"):
        write_model(bench.repository, "m", versions=(version,), config=SEQUENCES)
        lifecycle.load("m", {})
    assert isinstance(ask(), Response)
    assert isinstance(ask(end=True), Response)
    settle(lifecycle)
    assert [opened.closed for opened in bench.backend.opened] == [1, 1, 0]
    assert lifecycle.resolve("m").predecessor is None


# -- what comes with the request --------------------------------------------------------------------------------------

SENT = {"config": '{"backend": "fake"}', "file:7/fake.bin": b"x"}


def test_files_in_the_request_are_a_model_of_their_own(bench: Bench) -> None:
    lifecycle = bench.started()
    lifecycle.load("sent", SENT)
    assert versions(lifecycle, "sent") == [7]
    assert lifecycle.index(ready=False) == [], "no repository has it"
    home = bench.backend.opened[0].source.path
    assert (home / "fake.bin").read_bytes() == b"x"
    lifecycle.load("sent", SENT)
    assert len(bench.backend.opened) == 1, "the same files again"
    lifecycle.load("sent", {**SENT, "file:7/fake.bin": b"y"})
    assert len(bench.backend.opened) == 2


def test_a_model_of_the_repository_is_overridden_until_the_next_load_without_files(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    lifecycle.load("m", SENT)
    assert versions(lifecycle, "m") == [7]
    lifecycle.load("m", {})
    assert versions(lifecycle, "m") == [1]


@pytest.mark.parametrize(
    "parameters",
    [
        {"file:1/fake.bin": b""},
        {**SENT, "file:../x": b""},
        {**SENT, "file:/etc/x": b""},
        {"config": "{", **SENT, "file:1": b""},
    ],
    ids=["without-config", "climbs", "absolute", "a-file-and-a-folder"],
)
def test_files_that_cannot_be_taken_are_one_text(bench: Bench, parameters: dict[str, str | bytes]) -> None:
    lifecycle = bench.started()
    with pytest.raises(InternalError, match=r"^failed to load 'sent', failed to poll from model repository$"):
        lifecycle.load("sent", {"file:1/x/y": b"", **parameters} if "file:1" in parameters else parameters)
    assert lifecycle.state("sent") is None


# -- polling ----------------------------------------------------------------------------------------------------------


def test_a_poll_follows_what_comes_changes_and_goes(bench: Bench) -> None:
    write_model(bench.repository, "stays")
    changes = write_model(bench.repository, "changes")
    goes = write_model(bench.repository, "goes")
    lifecycle = bench.started("poll", repository_poll_secs=0)
    stays = lifecycle.resolve("stays")
    (changes / "1" / "fake.bin").write_bytes(b"other")
    shutil.rmtree(goes)
    write_model(bench.repository, "comes")
    assert lifecycle.poll() == {}
    assert [model.name for model in lifecycle.ready_models()] == ["changes", "comes", "stays"]
    assert lifecycle.resolve("stays") is stays
    assert [model.source.name for model in bench.backend.opened].count("changes") == 2
    assert lifecycle.is_ready()
    assert lifecycle.poll() == {}
    assert len(bench.backend.opened) == 5, "nothing changed"


def test_a_poll_serves_the_version_that_was_put_beside(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started("poll", repository_poll_secs=0)
    write_model(bench.repository, "m", versions=("2",))
    lifecycle.poll()
    assert versions(lifecycle, "m") == [2]


def test_a_change_that_cannot_be_loaded_leaves_what_serves_and_is_tried_at_each_poll(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started("poll", repository_poll_secs=0)
    before = lifecycle.resolve("m")
    bench.break_version("m", "1")
    for _ in range(2):
        assert list(lifecycle.poll()) == ["m"]
        assert lifecycle.resolve("m") is before
    (bench.repository / "m" / "1" / "broken").unlink()
    write_model(bench.repository, "m", versions=("2",))
    assert lifecycle.poll() == {}
    assert versions(lifecycle, "m") == [2]


def test_a_model_that_is_found_twice_goes_until_one_is_left(bench: Bench) -> None:
    one, two = bench.repository / "one", bench.repository / "two"
    write_model(one, "m")
    two.mkdir()
    lifecycle = bench.started("poll", repository_poll_secs=0, model_repository=(one, two))
    write_model(two, "m")
    lifecycle.poll()
    assert lifecycle.ready_models() == []
    assert lifecycle.index(ready=False) == [
        IndexEntry("m", "", "UNAVAILABLE", "model appears in two or more repositories")
    ]
    shutil.rmtree(two / "m")
    lifecycle.poll()
    assert versions(lifecycle, "m") == [1]


def test_a_poll_that_fails_does_not_end_polling(bench: Bench) -> None:
    write_model(bench.repository, "m")
    polled = threading.Semaphore(0)
    lifecycle = bench.lifecycle("poll", repository_poll_secs=1e-3)
    real = lifecycle.poll

    def poll() -> dict[str, RemoraError]:
        polled.release()
        real()
        raise RuntimeError("the disk is away")

    lifecycle.poll = poll  # type: ignore[method-assign]
    lifecycle.start()
    for _ in range(3):
        assert polled.acquire(timeout=PATIENCE_S)
    assert lifecycle.stop(PATIENCE_S)


class DiskAway(ModelLoader):
    """Plans, and then finds that the disk is away."""

    def open(self, plan: LoadPlan, number: int, steps: Steps | None = None) -> ServedModel:
        raise OSError("the disk is away")


class FilesAway(ModelLoader):
    """Plans with a repository that cannot be read any more."""

    def plan(self, folder: ModelFolder, *rest: Any, **more: Any) -> LoadPlan:
        class Away(LocalRepository):
            def fetch(self, name: str, versions: Collection[int] | None = None) -> ModelFolder:
                raise OSError("the disk is away")

        return super().plan(folder, *rest, **more)._replace(repository=Away(folder.path.parent))


def test_a_model_that_goes_while_the_memory_is_counted_takes_none_of_it(bench: Bench) -> None:
    for name in ("going", "other"):
        write_model(bench.repository, name)
    lifecycle = bench.started(load_model=("going",), model_memory_budget=1 << 30)
    newest = lifecycle.table.newest

    def newest_then_gone(key: str) -> ServedModel | None:
        found = newest(key)
        if key == "going" and found is not None:
            lifecycle.unload("going")
        return found

    lifecycle.table.newest = newest_then_gone  # type: ignore[method-assign]
    lifecycle.load("other", {})
    assert versions(lifecycle, "other") == [1]


class Oddity(ModelLoader):
    """Trips over one of the models."""

    def plan(self, folder: ModelFolder, *rest: Any, **more: Any) -> LoadPlan:
        if folder.name == "odd":
            raise ValueError("nobody has thought of this")
        return super().plan(folder, *rest, **more)


def test_a_model_that_cannot_be_planned_for_whatever_reason_keeps_no_other_from_serving(bench: Bench) -> None:
    for name in ("odd", "plain"):
        write_model(bench.repository, name)
    options = EngineOptions(model_repository=(bench.repository,), model_control_mode="none")
    lifecycle = Lifecycle(options, Oddity(options, FakeClock()), FakeClock())
    assert lifecycle.start()["odd"].message == "failed to load 'odd', failed to poll from model repository"
    assert [model.name for model in lifecycle.ready_models()] == ["plain"]


def test_a_poll_that_cannot_look_at_one_model_goes_on_with_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("away", "plain"):
        write_model(bench.repository, name)
    lifecycle = bench.started("poll", repository_poll_secs=0)
    look = LocalRepository.fingerprint

    def fingerprint(repository: LocalRepository, name: str) -> Fingerprint:
        if name == "away":
            raise PermissionError("the disk is away")
        return look(repository, name)

    monkeypatch.setattr(LocalRepository, "fingerprint", fingerprint)
    write_model(bench.repository, "plain", versions=("2",))
    assert [*lifecycle.poll()] == ["away"]
    assert (versions(lifecycle, "plain"), versions(lifecycle, "away")) == ([2], [1]), "what serves goes on"


@pytest.mark.parametrize("loader", [DiskAway, FilesAway])
def test_a_load_that_breaks_off_for_whatever_reason_leaves_the_model_unavailable_and_not_loading(
    bench: Bench, loader: type[ModelLoader]
) -> None:
    write_model(bench.repository, "m")
    options = EngineOptions(model_repository=(bench.repository,), model_control_mode="poll", repository_poll_secs=0)
    lifecycle = Lifecycle(options, loader(options, FakeClock()), FakeClock())
    for failures in (lifecycle.start(), lifecycle.poll()):
        assert "the disk is away" in failures["m"].message
        assert lifecycle.index(ready=False) == [
            IndexEntry("m", "1", "UNAVAILABLE", "Internal: OSError: the disk is away")
        ]


# -- namespaces -------------------------------------------------------------------------------------------------------


def test_with_namespaces_models_of_one_name_stand_beside_each_other(bench: Bench) -> None:
    one, two = bench.repository / "one", bench.repository / "two"
    for place in (one, two):
        write_model(place, "m")
    write_model(two, "single")
    lifecycle = bench.started("none", model_repository=(one, two), model_namespacing=True)
    assert [model.name for model in lifecycle.ready_models()] == ["m", "m", "single"]
    assert lifecycle.resolve("single").name == "single"
    with pytest.raises(InvalidArgumentError, match="There are 2 identifiers of model 'm' in global map"):
        lifecycle.resolve("m")
    with pytest.raises(InvalidArgumentError, match="Request for unknown model: 'nope' is not found"):
        lifecycle.resolve("nope")
    assert [entry.name for entry in lifecycle.index(ready=True)] == ["m", "m", "single"]
    assert [model.metric_labels for model in lifecycle.ready_models()] == [
        (("namespace", str(place)),) for place in (one, two, two)
    ]
    assert lifecycle.table.called("single") is not None
    assert lifecycle.table.called("m") is lifecycle.table.called("nope") is None


def test_with_namespaces_errors_name_the_model_by_its_namespace_as_long_as_it_is_to_serve(bench: Bench) -> None:
    for name in ("m", "bad"):
        write_model(bench.repository, name)
    bench.break_version("bad", "1")
    lifecycle = bench.lifecycle("explicit", model_namespacing=True, load_model=("m", "bad"))
    lifecycle.start()
    model = f"Request for unknown model: '{bench.repository}"
    for name, version, told in (
        ("m", 7, f"{model}::m' version 7 is not found"),
        ("bad", 7, f"{model}::bad' version 7 is not found"),
        ("bad", 1, f"{model}::bad' version 1 is not at ready state"),
        ("bad", -1, f"{model}::bad' has no available versions"),
    ):
        with pytest.raises(RemoraError, match=f"^{told}$"):
            lifecycle.resolve(name, version)
    lifecycle.unload("m")
    for version in (-1, 1, 7):
        with pytest.raises(NotFoundError, match=r"^Identifier of model 'm' is not found in global map$"):
            lifecycle.resolve("m", version)
    assert lifecycle.table.called("m") is not None
    with pytest.raises(NotFoundError, match=f"^{model}::m' has no available versions$"):
        lifecycle.resolve(f"{bench.repository}::m")


def test_with_namespaces_a_name_means_the_one_that_is_to_serve_and_not_one_that_goes(bench: Bench) -> None:
    one, two = bench.repository / "one", bench.repository / "two"
    for place in (one, two):
        write_model(place, "m")
    lifecycle = bench.started("none", model_repository=(one, two), model_namespacing=True)
    first = lifecycle.resolve(f"{one}::m")
    assert first.borrow(), "so that it goes slowly"
    lifecycle.unload_key(f"{one}::m")
    assert lifecycle.resolve("m") is lifecycle.resolve(f"{two}::m")
    lifecycle.unload_key(f"{two}::m")
    with pytest.raises(NotFoundError, match=r"^Identifier of model 'm' is not found in global map$"):
        lifecycle.resolve("m")
    first.give_back()
    settle(lifecycle)


def test_with_namespaces_a_model_without_versions_is_known_by_its_own(bench: Bench) -> None:
    (bench.repository / "empty").mkdir(parents=True)
    (bench.repository / "empty" / "config.pbtxt").write_text(DOUBLER)
    lifecycle = bench.lifecycle("none", model_namespacing=True)
    lifecycle.start()
    with pytest.raises(NotFoundError, match=f"'{bench.repository}::empty' has no available versions"):
        lifecycle.resolve("empty")


def test_with_namespaces_a_name_is_loaded_and_unloaded_everywhere(bench: Bench) -> None:
    one, two = bench.repository / "one", bench.repository / "two"
    for place in (one, two):
        write_model(place, "m")
    lifecycle = bench.started(model_repository=(one, two), model_namespacing=True)
    lifecycle.load("m", {})
    assert len(lifecycle.ready_models()) == 2
    lifecycle.unload("m")
    assert lifecycle.ready_models() == []


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
    (instance,) = lifecycle.table.resolve("m")._instances
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


# -- labels ---------------------------------------------------------------------------------------------------------

LABELLED = DOUBLER.replace('name: "OUT"', 'name: "OUT" label_filename: "labels.txt"')


def test_labels_are_the_lines_of_the_outputs_file(bench: Bench) -> None:
    (write_model(bench.repository, "m", config=LABELLED) / "labels.txt").write_text("one\ntwo\n")
    assert bench.started("none").resolve("m").labels_of("OUT") == ("one", "two")


@pytest.mark.parametrize("name", ["nope.txt", "../secret.txt"])
def test_labels_that_cannot_be_read_or_lie_elsewhere_fail_the_load(bench: Bench, name: str) -> None:
    write_model(bench.repository, "m", config=LABELLED.replace("labels.txt", name))
    (bench.repository / "secret.txt").write_text("secret")
    (error,) = bench.lifecycle("none").start().values()
    assert name in str(error)
    assert "secret\n" not in str(error)
    assert str(bench.repository) not in str(error), "clients are told, and where a server keeps its models is its own"


# -- on demand --------------------------------------------------------------------------------------------------------


def big_model(bench: Bench, name: str) -> None:
    """A model of 10 bytes."""
    (write_model(bench.repository, name) / "1" / "fake.bin").write_bytes(b"0123456789")


def test_on_demand_a_model_is_loaded_by_the_first_who_waits_for_it(bench: Bench) -> None:
    big_model(bench, "m")
    lifecycle = bench.started("ondemand", repository_poll_secs=0)
    assert lifecycle.ready_models() == []
    assert lifecycle.is_ready()
    assert lifecycle.is_model_ready("m", -1), "its first request would be served"
    with pytest.raises(LoadingError) as loading:
        lifecycle.resolve("m")
    loading.value.ready.result(PATIENCE_S)
    assert lifecycle.resolve("m").version == 1
    assert lifecycle.wait_for("m", -1) is lifecycle.resolve("m")
    with pytest.raises(NotFoundError, match="'nope' is not found"):
        lifecycle.resolve("nope")


def test_on_demand_the_least_recently_used_goes_and_comes_back(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        big_model(bench, name)
    clock = FakeClock()
    options = EngineOptions(
        model_repository=(bench.repository,), model_control_mode="ondemand", model_memory_budget=40, load_model=("c",)
    )
    lifecycle = Lifecycle(options, ModelLoader(options, clock), clock)
    assert lifecycle.start() == {}
    for name in ("a", "b", "a"):
        clock.advance(10**9)
        lifecycle.wait_for(name, -1, PATIENCE_S)
        served = {model.name for model in lifecycle.ready_models()}
        assert served == {"c", name}, "c stays, and there is room for one more"
    lifecycle.stop(PATIENCE_S)


def test_on_demand_a_busy_model_stays_and_the_other_load_is_refused(bench: Bench) -> None:
    running, may_end = threading.Event(), threading.Event()

    def during() -> None:
        running.set()
        assert may_end.wait(PATIENCE_S)

    for name in ("a", "b"):
        big_model(bench, name)
    lifecycle = bench.started("ondemand", repository_poll_secs=0, model_memory_budget=30)
    bench.backend.during = during
    model = lifecycle.wait_for("a", -1)
    asking = threading.Thread(target=answer_of, args=(model,))
    asking.start()
    assert running.wait(PATIENCE_S)
    with pytest.raises(InvalidArgumentError, match="of the budget for models"):
        lifecycle.wait_for("b", -1)
    may_end.set()
    asking.join(PATIENCE_S)
    assert lifecycle.resolve("a") is model


def test_a_model_counts_at_every_moment_between_its_load_and_its_service(bench: Bench) -> None:
    for name in ("a", "b"):
        big_model(bench, name)
    lifecycle = bench.started(model_memory_budget=30)
    gate, table = lifecycle._loads._gate, lifecycle.table
    replace, refused, looked = table.replace, list[str](), threading.Event()

    class Lock:
        """Records when a thread has to wait for it."""

        lock = gate._lock

        def __enter__(self) -> None:
            if not self.lock.acquire(blocking=False):
                looked.set()
                self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def load_other() -> None:
        try:
            lifecycle.load("b", {})
        except InvalidArgumentError as error:
            refused.append(str(error))
        looked.set()

    other = threading.Thread(target=load_other)

    def publish(*what: Any) -> Any:
        other.start()
        assert looked.wait(PATIENCE_S)
        return replace(*what)

    gate._lock = Lock()  # type: ignore[assignment]
    table.replace = publish  # type: ignore[method-assign]
    lifecycle.load("a", {})
    other.join(PATIENCE_S)
    assert len(refused) == 1
    assert [model.name for model in lifecycle.ready_models()] == ["a"]


def test_a_load_that_does_not_fit_into_memory_is_refused_with_the_numbers(bench: Bench) -> None:
    big_model(bench, "m")
    lifecycle = bench.started(model_memory_budget=15)
    with pytest.raises(InvalidArgumentError, match=r"Unavailable: loading it takes about 0 MiB \(2.0 times"):
        lifecycle.load("m", {})
    assert bench.backend.opened == []


def test_a_poll_on_demand_reloads_what_is_loaded_and_loads_nothing_else(bench: Bench) -> None:
    for name in ("a", "b"):
        big_model(bench, name)
    lifecycle = bench.started("ondemand", repository_poll_secs=0)
    first = lifecycle.wait_for("a", -1)
    (bench.repository / "a" / "1" / "fake.bin").write_bytes(b"other")
    big_model(bench, "new")
    lifecycle.poll()
    assert [model.name for model in lifecycle.ready_models()] == ["a"]
    assert lifecycle.resolve("a") is not first
    assert lifecycle.wait_for("new", -1).name == "new"


def test_requests_before_the_start_wait_unless_they_may_not(bench: Bench) -> None:
    write_model(bench.repository, "m")
    waiting = bench.lifecycle("none")
    with pytest.raises(LoadingError) as loading:
        waiting.resolve("m")
    waiting.start()
    loading.value.ready.result(PATIENCE_S)
    with pytest.raises(NotFoundError):
        bench.lifecycle("none", wait_for_models=False).resolve("m")


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
    assert bench.started("ondemand").only_model() == "m"
    write_model(bench.repository, "n")
    lifecycle = bench.started("ondemand")
    lifecycle.wait_for("m", -1, PATIENCE_S)
    assert lifecycle.only_model() == "", "whichever was asked first must not decide"


def test_who_waits_for_a_start_that_fails_is_told_and_nothing_is_ready(bench: Bench) -> None:
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
def test_who_waits_for_a_load_is_told_when_the_server_stops(bench: Bench, mode: str) -> None:
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


def test_what_is_waited_for_is_told_in_words(bench: Bench) -> None:
    write_model(bench.repository, "bad")
    bench.break_version("bad", "1")
    lifecycle = bench.lifecycle("none")
    assert lifecycle.readiness().waits_for == ("the models of the start are being loaded",)
    lifecycle.start()
    assert lifecycle.readiness().waits_for == (
        "model 'bad' version 1 is UNAVAILABLE: Invalid argument: the model is broken",
    )
    lifecycle.draining = True
    assert "the server is draining" in lifecycle.readiness().waits_for
