"""Tests of ``remora.models.callers``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from generation_models import text_inputs, tiny
from remora import Engine
from remora.engine import FrontEnd
from remora.generation.tasks import Task
from remora.in_process import as_form, as_request
from remora.models.callers import caller_of
from remora.tracing.arrival import Arrival


def named(headers: Mapping[bytes, bytes], name: str = "") -> str:
    return caller_of(headers.get, name)


def test_a_caller_is_the_name_of_its_key_or_a_digest_of_its_credential() -> None:
    assert named({b"x-api-key": b"one"}, "ann") == "ann"
    assert named({b"x-api-key": b"one"}) == named({b"authorization": b"Bearer one", b"x-api-key": b" "})
    assert named({b"x-api-key": b"one"}) != named({b"x-api-key": b"two"})
    assert "one" not in named({b"x-api-key": b"one"})
    assert named({}) == ""


def test_a_request_over_v2_carries_its_caller_to_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path)
    tasks: list[Task] = []
    with Engine(tmp_path) as engine:
        engine.traces.key_of = lambda carrier: (carrier(b"x-api-key") or b"").decode()
        generation = engine.resolve("tiny").generation
        assert generation is not None
        begin = generation.engine.begin
        monkeypatch.setattr(generation.engine, "begin", lambda task, sink: (tasks.append(task), begin(task, sink)))

        def submit(model: Any, key: bytes) -> Any:
            specs, data = as_request(model, text_inputs())
            ended: list[object] = []
            model.submit(as_form(specs, (), "", {}), data, lambda _ticket, outcome: ended.append(outcome))
            return None

        front_end = FrontEnd(submit, lambda key: Arrival("HTTP", {b"x-api-key": key}.get))
        engine.submit_to(front_end, "tiny", -1, b"ann")
        engine.submit_to(front_end, "tiny", -1, b"bob")
    assert sorted(task.caller for task in tasks) == ["ann", "bob"]
