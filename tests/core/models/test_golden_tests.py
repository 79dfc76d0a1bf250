"""Golden tests decide a load: what passes serves, what differs or is slow is refused with a diff."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import ConfigError, InvalidArgumentError
from remora.models import loader as loading
from remora.models.golden_tests import GoldenCase, GoldenSuite, differences, read_suite, too_slow
from remora.models.lifecycle import Lifecycle
from remora.models.loader import ModelLoader
from remora.options import EngineOptions
from support.engine.fakes import DOUBLER, FakeBackend, FakeClock, write_model

PATIENCE_S = 30.0


def tensor(name: str, data: list[Any], datatype: str = "INT32") -> dict[str, Any]:
    return {"name": name, "shape": [len(data), 1], "datatype": datatype, "data": data}


def suite(*cases: tuple[list[int], list[int]], **rest: object) -> str:
    """Cases of the doubler: what goes in and what must come out."""
    tests = [{"inputs": [tensor("IN", given)], "outputs": [tensor("OUT", wanted)]} for given, wanted in cases]
    return json.dumps({"tests": tests, **rest})


# -- what is right ----------------------------------------------------------------------------------------------------


def case(wanted: list[Any], datatype: str = "FP32", absolute: float = 0.0, relative: float = 0.0) -> GoldenCase:
    text = json.dumps({"tests": [{"inputs": [tensor("IN", [1])], "outputs": [tensor("OUT", wanted, datatype)]}]})
    (read,) = read_suite(text).cases
    return read._replace(absolute=absolute, relative=relative)


@pytest.mark.parametrize(
    ("wanted", "given", "lines"),
    [
        (case([1.0, 2.0]), [[1.0], [2.0]], []),
        (case([1.0, 2.0]), [[1.0], [2.5]], ["OUT[1, 0] is 2.5, expected 2.0 (off by 0.5)"]),
        (case([1.0], absolute=0.5), [[1.5]], []),
        (case([100.0], relative=0.01), [[101.0]], []),
        (case([100.0], relative=0.01), [[102.0]], ["OUT[0, 0] is 102.0, expected 100.0 (off by 2)"]),
        (case([float("nan")]), [[float("nan")]], []),
        (case([1.0]), [[1.0, 1.0]], ["OUT has shape [1, 2], expected [1, 1]"]),
    ],
)
def test_an_answer_is_compared_within_tolerance(wanted: GoldenCase, given: list[Any], lines: list[str]) -> None:
    assert differences(wanted, {"OUT": np.array(given, np.float32)}) == lines


def test_what_is_missing_and_what_is_text_is_compared_too() -> None:
    assert differences(case([1]), {}) == ["OUT is missing"]
    texts = np.array([[b"cat"]], object)
    assert differences(case(["cat"], "BYTES"), {"OUT": texts}) == []
    assert differences(case(["dog"], "BYTES"), {"OUT": texts}) == ["OUT[0, 0] is b'cat', expected b'dog'"]


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=20))
def test_a_diff_shows_a_few_values_and_counts_the_rest(values: list[int]) -> None:
    lines = differences(case(values, "INT32"), {"OUT": np.array(values, np.int32).reshape(-1, 1) + 1})
    (line,) = lines
    assert line.count(", expected ") == min(len(values), 3)
    assert (f"{len(values)} of {len(values)} values of OUT differ" in line) is (len(values) > 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        (b"\xff{}", "not JSON"),
        ("[]", 'expected {"tests"'),
        ('{"tests": [], "slow": 1}', "unknown key 'slow'"),
        ('{"tests": [], "max_slowdown": -1}', "max_slowdown: expected a number from 0, got -1"),
        ('{"tests": [1]}', r"tests\[0\]: expected an object"),
        ('{"tests": [{}]}', r"tests\[0\].inputs: expected a list of tensors"),
        ('{"tests": [{"inputs": [{}]}]}', r"tests\[0\].inputs\[0\]: KeyError: 'name'"),
        (suite(([1], [2])).replace("[1, 1]", "[3, 1]"), "cannot reshape"),
        (suite(([1], [2])).replace("INT32", "BF16"), "datatype 'BF16' cannot be written"),
        (json.dumps({"tests": [{}] * 1001}), "1001 tests, at most 1000"),
    ],
)
def test_a_file_that_cannot_be_used_says_where(text: str | bytes, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_suite(text)


def test_slowness_is_judged_by_the_sum_of_all_cases() -> None:
    limited = GoldenSuite((), 1.5)
    assert too_slow(limited, [10, 20], [10, 10]) == ""
    assert "1.55 times as long, at most 1.5 are allowed" in too_slow(limited, [11, 20], [10, 10])
    assert too_slow(GoldenSuite(()), [100], [1]) == "", "no limit was set"
    assert too_slow(limited, [100], []) == "", "nothing to compare with"


# -- what it decides --------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, FakeBackend, FakeClock]:
    backend = FakeBackend()
    monkeypatch.setattr(loading, "find_backend", backend.find)
    return tmp_path, backend, FakeClock()


def started(repository: Path, clock: FakeClock) -> Lifecycle:
    options = EngineOptions(model_repository=(repository,), model_control_mode="explicit")
    lifecycle = Lifecycle(options, ModelLoader(options, clock), clock)
    lifecycle.start()
    return lifecycle


def test_a_model_that_passes_serves_and_its_statistics_begin_at_nothing(
    bench: tuple[Path, FakeBackend, FakeClock],
) -> None:
    repository, _backend, clock = bench
    (write_model(repository, "m") / "tests.json").write_text(suite(([1, 2], [2, 4]), ([3], [6])))
    lifecycle = started(repository, clock)
    lifecycle.load("m", {})
    assert lifecycle.resolve("m").statistics.snapshot("m", "1").inference_count == 0


def test_a_model_that_answers_otherwise_is_refused_with_a_diff_and_the_old_one_serves_on(
    bench: tuple[Path, FakeBackend, FakeClock],
) -> None:
    repository, backend, clock = bench
    write_model(repository, "m")
    lifecycle = started(repository, clock)
    lifecycle.load("m", {})
    before = lifecycle.resolve("m")
    (write_model(repository, "m", versions=("2",)) / "tests.json").write_text(suite(([1], [2]), ([3], [7])))
    with pytest.raises(InvalidArgumentError, match=r"'1': OUT\[0, 0\] is 6, expected 7"):
        lifecycle.load("m", {})
    assert lifecycle.resolve("m") is before
    assert backend.opened[1].closed == 1


def test_golden_tests_that_are_not_text_refuse_the_model_and_close_it(
    bench: tuple[Path, FakeBackend, FakeClock],
) -> None:
    repository, backend, clock = bench
    (write_model(repository, "m") / "tests.json").write_bytes(b"\xff" + suite(([1], [2])).encode())
    lifecycle = started(repository, clock)
    with pytest.raises(InvalidArgumentError, match="not JSON"):
        lifecycle.load("m", {})
    assert [entry.state for entry in lifecycle.index(ready=False)] == ["UNAVAILABLE"]
    assert lifecycle.stop(PATIENCE_S)
    assert backend.opened[0].closed == 1


def test_a_model_that_fails_a_case_is_refused(bench: tuple[Path, FakeBackend, FakeClock]) -> None:
    repository, _backend, clock = bench
    (write_model(repository, "m") / "tests.json").write_text(suite(([1], [2])).replace('"IN"', '"OTHER"'))
    with pytest.raises(InvalidArgumentError, match=r"'0': it failed: .*unexpected inference input 'OTHER'"):
        started(repository, clock).load("m", {})


@pytest.mark.parametrize(("slower", "loads"), [(1, True), (2, False)])
def test_a_model_may_be_only_so_much_slower_than_the_one_it_replaces(
    bench: tuple[Path, FakeBackend, FakeClock], slower: int, loads: bool
) -> None:
    repository, backend, clock = bench
    write_model(repository, "m")
    lifecycle = started(repository, clock)
    backend.during = lambda: clock.advance(1_000_000)
    lifecycle.load("m", {})
    (write_model(repository, "m", versions=("2",)) / "tests.json").write_text(suite(([1], [2]), max_slowdown=1.5))
    backend.during = lambda: clock.advance(1_000_000 * slower)
    if loads:
        lifecycle.load("m", {})
    else:
        with pytest.raises(InvalidArgumentError, match=r"2\.00 times as long, at most 1\.5 are allowed"):
            lifecycle.load("m", {})
    assert lifecycle.resolve("m").version == (2 if loads else 1)


def test_a_model_with_many_answers_cannot_have_golden_tests(bench: tuple[Path, FakeBackend, FakeClock]) -> None:
    repository, _backend, clock = bench
    config = DOUBLER + "model_transaction_policy { decoupled: true }"
    (write_model(repository, "m", config=config) / "tests.json").write_text(suite(([1], [2])))
    with pytest.raises(InvalidArgumentError, match="for models that give each request one answer"):
        started(repository, clock).load("m", {})
