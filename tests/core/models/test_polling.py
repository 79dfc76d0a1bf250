"""Polling of a repository, and repositories that fail."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection
from typing import Any

import pytest

from remora.calls import IndexEntry
from remora.errors import (
    RemoraError,
)
from remora.models.lifecycle import Lifecycle
from remora.models.loader import LoadPlan, ModelLoader
from remora.models.polling import RepositoryPolls
from remora.models.served_model import ServedModel, Steps
from remora.options import EngineOptions
from remora.repository import Fingerprint, ModelFolder
from remora.repository.local import LocalRepository
from support.engine.fakes import FakeClock, write_model
from support.engine.lifecycle_bench import PATIENCE_S, Bench, versions


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


def test_a_poll_that_fails_does_not_end_polling(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(bench.repository, "m")
    polled = threading.Semaphore(0)
    lifecycle = bench.lifecycle("poll", repository_poll_secs=1e-3)
    real = RepositoryPolls.poll

    def poll(polls: RepositoryPolls) -> dict[str, RemoraError]:
        polled.release()
        real(polls)
        raise RuntimeError("the disk is away")

    monkeypatch.setattr(RepositoryPolls, "poll", poll)
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


def test_a_model_that_is_unloaded_while_memory_is_counted_does_not_count(bench: Bench) -> None:
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
            raise ValueError("an unexpected failure")
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


def test_a_model_that_a_request_loads_during_a_poll_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    lifecycle = bench.started("ondemand", repository_poll_secs=0)
    catalog = lifecycle._catalog
    models = catalog.models

    def load_afterwards() -> list[str]:
        offered = models()
        monkeypatch.setattr(catalog, "models", models)
        write_model(bench.repository, "m")
        lifecycle.load("m", {})
        return offered

    monkeypatch.setattr(catalog, "models", load_afterwards)
    lifecycle.poll()
    assert versions(lifecycle, "m") == [1]


def test_polls_that_begin_while_the_server_stops_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[threading.Event] = []

    def start(polls: RepositoryPolls, _interval_s: float) -> None:
        begun.append(polls._ended)

    write_model(bench.repository, "m")
    lifecycle = bench.lifecycle("poll", repository_poll_secs=1)
    open_polls = lifecycle._open_polls

    def open_late() -> RepositoryPolls:
        lifecycle.stop(PATIENCE_S)
        return open_polls()

    monkeypatch.setattr(lifecycle, "_open_polls", open_late)
    monkeypatch.setattr(RepositoryPolls, "start", start)
    lifecycle.start()
    assert [ended.is_set() for ended in begun] == [True] * len(begun)
    assert begun


def test_a_version_that_comes_while_its_model_is_planned_is_served_by_the_next_poll(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.lifecycle("poll", repository_poll_secs=0)
    fetch = LocalRepository.fetch

    def fetch_before(*what: Any) -> ModelFolder:
        found = fetch(*what)
        monkeypatch.setattr(LocalRepository, "fetch", fetch)
        write_model(bench.repository, "m", versions=("2",))
        return found

    monkeypatch.setattr(LocalRepository, "fetch", fetch_before)
    assert lifecycle.start() == {}
    assert versions(lifecycle, "m") == [1]
    lifecycle.poll()
    assert versions(lifecycle, "m") == [2]
