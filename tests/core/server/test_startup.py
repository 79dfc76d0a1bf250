"""What a server's start makes of the environment, and that it goes on by itself."""

from __future__ import annotations

import threading

import pytest

from remora.options import EngineOptions
from remora.server.startup import begin, with_hooks

PATIENCE_S = 30.0


def test_the_variables_of_tritons_scheduler_tests_become_options() -> None:
    both = {"TRITONSERVER_DELAY_SCHEDULER": "12", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "3"}
    options = with_hooks(EngineOptions(), both)
    assert (options.delay_scheduler, options.backlog_delay_scheduler) == (12, 3)
    assert with_hooks(EngineOptions(), {"TRITONSERVER_DELAY_SCHEDULER": "8"}).delay_scheduler == 8
    assert with_hooks(EngineOptions(), {}).delay_scheduler == 0


@pytest.mark.parametrize("variable", ["TRITONSERVER_DELAY_SCHEDULER", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"])
def test_a_variable_that_is_no_number_is_refused(variable: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} must be a whole number of requests, got 'x'"):
        with_hooks(EngineOptions(), {variable: "x"})


def test_a_start_goes_on_when_nobody_waits_for_it_any_more() -> None:
    started = threading.Event()

    class Engine:
        def start(self) -> Engine:
            assert started.wait(PATIENCE_S)
            return self

    engine = Engine()
    loading = begin(engine)  # type: ignore[arg-type]
    assert not loading.cancel()
    started.set()
    assert loading.result(PATIENCE_S) is engine
