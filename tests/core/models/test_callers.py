"""Tests of ``remora.models.callers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remora import Engine
from remora.engine import FrontEnd
from remora.in_process import as_form, as_request
from remora.tracing.arrival import Arrival
from remora_llm.generation.tasks import Task
from support.models.generation_models import text_inputs, tiny


@pytest.mark.parametrize("checks_keys", [True, False])
def test_a_request_over_v2_carries_its_caller_to_the_engine(
    checks_keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that is not checked names no caller."""
    tiny(tmp_path)
    tasks: list[Task] = []
    with Engine(tmp_path) as engine:
        if checks_keys:
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
    assert sorted(task.caller for task in tasks) == (["ann", "bob"] if checks_keys else ["", ""])
