"""What makes an engine ready, and which reasons are given while it is not."""

from __future__ import annotations

from typing import Any

import pytest

from remora.models.readiness import ReadinessState
from remora.models.table import ModelTable
from remora.options import EngineOptions

LOADING = "the models of the start are being loaded"
DRAINING = "the server is draining"


class Table(ModelTable):
    """Table without models, with a given health."""

    def __init__(self, fatal: str = "", troubles: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._fatal, self._given = fatal, list(troubles)

    def fatal(self) -> str:
        return self._fatal

    def troubles(self) -> list[str]:
        return self._given

    def is_fine(self) -> bool:
        return not self._given


def state(table: Table | None = None, gpu_count: int = 0, **options: Any) -> ReadinessState:
    made = ReadinessState(EngineOptions(**options), table or Table(), gpu_count)
    made.started = True
    return made


def test_an_engine_is_ready_once_its_startup_has_ended() -> None:
    starting = state()
    starting.started = False
    assert starting.now() == (False, False, False, (LOADING,), True)
    starting.started = True
    assert starting.now() == (True, True, False, (), True)


def test_each_hold_keeps_it_unready_until_it_is_released() -> None:
    ready = state()
    first, second = ready.hold("gRPC is being opened"), ready.hold("front processes start")
    assert ready.now().waits_for == ("gRPC is being opened", "front processes start")
    first()
    assert not ready.now().started
    second()
    assert ready.is_ready()


@pytest.mark.parametrize("ending", ["draining", "stopping"])
def test_an_end_makes_it_unready_and_leaves_it_live(ending: str) -> None:
    ready = state()
    setattr(ready, ending, True)
    assert not ready.is_ready()
    assert ready.is_live()
    assert ready.now().waits_for == (DRAINING,)


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_that_failed_counts_where_readiness_is_strict(strict: bool) -> None:
    failed = state(Table(troubles=("model 'a' is UNAVAILABLE",)), strict_readiness=strict)
    assert failed.is_ready() is not strict
    assert failed.now().waits_for == (("model 'a' is UNAVAILABLE",) if strict else ())


def test_a_model_that_needs_a_restart_ends_liveness() -> None:
    broken = state(Table(fatal="model 'a' has lost its GPU"), strict_readiness=False)
    assert broken.now() == (False, True, False, ("model 'a' has lost its GPU",), False)


def test_a_required_gpu_that_no_model_uses_is_a_reason_after_the_startup() -> None:
    idle = state(gpu_count=0, require_gpu=True)
    assert not idle.is_ready()
    assert "GPU" in idle.now().waits_for[0]
    idle.started = False
    assert idle.now().waits_for == (LOADING,)
