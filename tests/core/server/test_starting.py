"""What a server's start makes of the environment."""

from __future__ import annotations

import pytest

from remora.options import EngineOptions
from remora.server.starting import with_hooks


def test_the_variable_of_tritons_scheduler_tests_becomes_an_option() -> None:
    assert with_hooks(EngineOptions(), {"TRITONSERVER_DELAY_SCHEDULER": "8"}).delay_scheduler == 8
    assert with_hooks(EngineOptions(), {}).delay_scheduler == 0


def test_a_variable_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="TRITONSERVER_DELAY_SCHEDULER must be a whole number of requests, got 'x'"):
        with_hooks(EngineOptions(), {"TRITONSERVER_DELAY_SCHEDULER": "x"})
