"""What a server's start makes of the environment."""

from __future__ import annotations

import pytest

from remora.options import EngineOptions
from remora.server.startup import with_gpu_requirement, with_hooks


def test_the_variables_of_tritons_scheduler_tests_become_options() -> None:
    both = {"TRITONSERVER_DELAY_SCHEDULER": "12", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "3"}
    options = with_hooks(EngineOptions(), both)
    assert (options.delay_scheduler, options.backlog_delay_scheduler) == (12, 3)
    assert with_hooks(EngineOptions(), {"TRITONSERVER_DELAY_SCHEDULER": "8"}).delay_scheduler == 8
    assert with_hooks(EngineOptions(), {}).delay_scheduler == 0


@pytest.mark.parametrize("variable", ["TRITONSERVER_DELAY_SCHEDULER", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"])
def test_a_variable_that_is_not_a_number_is_refused(variable: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} must be a whole number of requests, got 'x'"):
        with_hooks(EngineOptions(), {variable: "x"})


@pytest.mark.parametrize(("value", "required"), [("true", True), ("1", True), ("false", False), ("", False)])
def test_a_variable_requires_a_gpu_where_no_flag_can(value: str, required: bool) -> None:
    assert with_gpu_requirement(EngineOptions(), {"REMORA_REQUIRE_GPU": value}).require_gpu is required
    assert with_gpu_requirement(EngineOptions(require_gpu=True), {"REMORA_REQUIRE_GPU": value}).require_gpu


def test_a_requirement_that_is_not_a_boolean_is_refused() -> None:
    with pytest.raises(ValueError, match="REMORA_REQUIRE_GPU must be true or false, got 'yes'"):
        with_gpu_requirement(EngineOptions(), {"REMORA_REQUIRE_GPU": "yes"})
