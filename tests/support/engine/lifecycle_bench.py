"""Lifecycle over a temporary repository and the fake backend."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remora.messages import InferForm, InputSpec
from remora.models.lifecycle import Lifecycle
from remora.models.loader import ModelLoader
from remora.models.served_model import ServedModel
from remora.options import EngineOptions
from support.engine.fakes import DOUBLER, FakeBackend, FakeClock, Replies

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


def settle(lifecycle: Lifecycle) -> None:
    """Wait until what was retired is closed."""
    assert lifecycle.wait_until_closed(PATIENCE_S)


def versions(lifecycle: Lifecycle, name: str) -> list[int]:
    state = lifecycle.state(name)
    return state.ready_versions if state else []


def answer_of(model: ServedModel) -> int:
    """What becomes of 7."""
    replies, answered = Replies(), threading.Event()

    def reply(*answer: Any) -> None:
        replies(*answer)
        answered.set()

    ticket = model.submit(InferForm((InputSpec("IN", "INT32", (1, 1)),)), [b"\x07\x00\x00\x00"], reply)
    assert answered.wait(PATIENCE_S)
    return int(replies.only(ticket).outputs[0].data[0, 0])  # type: ignore[union-attr]
