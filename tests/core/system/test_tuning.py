"""Tuning reports its settings, changes only what the options name, and skips what the system lacks."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator

import pytest

from remora.system.tuning import Tuning, apply, freeze, give_back

NOTHING = Tuning(
    malloc_threshold_bytes=0,
    malloc_keep_bytes=0,
    malloc_top_pad_bytes=0,
    switch_interval_us=0,
    blas_threads=0,
    freeze=False,
)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    interval = sys.getswitchinterval()
    gc.unfreeze()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()
    gc.enable()


class Allocator:
    """A C library's mallopt that remembers its calls."""

    def __init__(self, answer: int = 1) -> None:
        self.told: dict[int, int] = {}
        self._answer = answer

    def __call__(self, parameter: int, value: int) -> int:
        self.told[parameter] = value
        return self._answer


def test_the_allocator_gets_its_thresholds_by_glibcs_numbers() -> None:
    allocator = Allocator()
    done = apply(Tuning(malloc_threshold_bytes=1, malloc_keep_bytes=2, malloc_top_pad_bytes=3), {}, allocator)
    assert allocator.told == {-3: 1, -1: 2, -2: 3}
    assert "malloc mmap threshold 1 bytes" in done


def test_a_threshold_that_the_allocator_refuses_is_not_reported() -> None:
    assert not [line for line in apply(Tuning(), {}, Allocator(0)) if line.startswith("malloc")]


def test_the_switch_interval_is_in_microseconds() -> None:
    apply(Tuning(switch_interval_us=250), {}, Allocator())
    assert sys.getswitchinterval() == pytest.approx(250e-6)


def test_variables_that_are_set_stay_as_they_are() -> None:
    environ = {"OMP_NUM_THREADS": "7"}
    apply(Tuning(blas_threads=2), environ, Allocator())
    assert environ["OMP_NUM_THREADS"] == "7"
    assert environ["OPENBLAS_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "2"


def test_nothing_is_done_when_all_is_turned_off() -> None:
    environ: dict[str, str] = {}
    interval = sys.getswitchinterval()
    assert apply(NOTHING, environ, Allocator()) == ()
    assert environ == {}
    assert sys.getswitchinterval() == interval
    freeze(NOTHING)
    assert gc.get_freeze_count() == 0


def test_a_system_without_glibc_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert apply(Tuning(switch_interval_us=0, blas_threads=0), {}) == ()


def test_freezing_takes_living_objects_out_of_the_collectors_sight() -> None:
    freeze(Tuning())
    assert gc.get_freeze_count() > 0


def test_memory_is_released_only_if_the_allocator_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert give_back() is False


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library has no malloc_trim")
def test_memory_left_free_goes_back_to_the_system() -> None:
    blocks = [bytearray(64 << 10) for _ in range(2000)]
    keeper = bytearray(64 << 10)  # above them in the heap, so that it cannot shrink by itself
    del blocks
    assert give_back() is True
    assert len(keeper) == 64 << 10
