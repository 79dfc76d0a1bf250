"""Commands and judgements of releases amid loads, and without threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.calls import ModelRelease
from remora.engine import Engine
from remora.errors import InvalidArgumentError
from remora.traffic import releases
from remora.traffic.releases import Release
from remora_tools.rollout.judgement import ROLLBACK, Verdict
from support.engine.fakes import FakeClock
from support.models.released_engine import released_engine
from support.process.eventually import eventually
from support.process.no_threads import refuse_threads
from support.servers.live_server import PATIENCE_S, write_version


def _release(engine: Engine, action: str = "", **parameters: Any) -> dict[str, Any]:
    return engine.perform(ModelRelease("m", action, parameters))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    for version in (2, 3):
        write_version(root, version)
    return root


class _Lock:
    """Lock of releases that records when a thread has to wait for it."""

    def __init__(self, lock: Any, waited: threading.Event) -> None:
        self._lock = lock
        self._waited = waited

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_command_does_not_bring_back_an_arm_that_a_load_rolls_back_meanwhile(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_weight, goes_on = releases.set_weight, threading.Event()

    with released_engine(repository, model_control_mode="explicit", load_model=("m",)) as engine:
        _release(engine, "start", version=2, weight=10)
        found = engine._lifecycle.releases
        monkeypatch.setattr(found, "_lock", _Lock(found._lock, goes_on))

        def load() -> None:
            engine.load("m")
            goes_on.set()

        loading = threading.Thread(target=load)

        def set_late(release: Release, *what: Any, **how: Any) -> Release:
            (repository / "m" / "2" / "model.py").write_text("raise ValueError('broken file')")
            loading.start()
            assert goes_on.wait(PATIENCE_S)
            return set_weight(release, *what, **how)

        monkeypatch.setattr(releases, "set_weight", set_late)
        assert _release(engine, "weight", weight=20)
        loading.join(PATIENCE_S)
        status = _release(engine)
        assert (status["stage"], status["rejected"]) == ("settled", [2])


def test_an_answer_is_sent_and_judged_later_if_no_thread_can_start(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer() -> int:
        clock.advance(1_000_000_000)
        return int(engine.infer("m", {"IN": np.array([[1]], np.int32)}, timeout_s=PATIENCE_S)["OUT"][0, 0])

    with released_engine(repository, clock=FakeClock()) as engine:
        clock: Any = engine._clock
        _release(engine, "start", version=2, weight="50%", automatic=True)
        found = engine._lifecycle.releases
        monkeypatch.setattr(found, "_verdict", lambda _key: Verdict(ROLLBACK, "it is slow"))
        with monkeypatch.context() as without_threads:
            refuse_threads(without_threads, "remora release")
            assert answer() in (2, 3)
            assert found._live["m"].release.stage == "running"
        assert answer() in (2, 3)
        eventually(lambda: found._live["m"].release.stage == "settled")


def test_an_arm_that_cannot_begin_does_not_bring_back_another_that_its_load_rolls_back(repository: Path) -> None:
    broken = "raise ValueError('broken file')"
    with released_engine(repository, model_control_mode="explicit", load_model=("m",)) as engine:
        _release(engine, "start", version=2, weight=10)
        write_version(repository, 4)
        for version in (2, 4):
            (repository / "m" / str(version) / "model.py").write_text(broken)
        with pytest.raises(InvalidArgumentError, match="version 4 of model 'm' is not released"):
            _release(engine, "start", version=4, weight=10, alias="b")
        status = _release(engine)
        assert (status["stage"], status["rejected"]) == ("settled", [2])
