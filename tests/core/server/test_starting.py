"""What a server's start makes of the environment."""

from __future__ import annotations

import pytest

from remora.options import EngineOptions
from remora.server.starting import with_hooks


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
