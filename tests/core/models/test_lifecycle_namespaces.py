"""Models of one name in several repositories."""

from __future__ import annotations

import pytest

from remora.errors import (
    InvalidArgumentError,
    NotFoundError,
    RemoraError,
)
from support.engine.fakes import DOUBLER, write_model
from support.engine.lifecycle_bench import Bench, settle


def test_with_namespaces_models_of_one_name_stand_beside_each_other(bench: Bench) -> None:
    one, two = bench.repository / "one", bench.repository / "two"
    for place in (one, two):
        write_model(place, "m")
    write_model(two, "single")
    lifecycle = bench.started("none", model_repository=(one, two), model_namespacing=True)
    assert [model.name for model in lifecycle.ready_models()] == ["m", "m", "single"]
    assert lifecycle.resolve("single").name == "single"
    with pytest.raises(InvalidArgumentError, match="There are 2 identifiers of model 'm' in global map"):
        lifecycle.resolve("m")
    with pytest.raises(InvalidArgumentError, match="Request for unknown model: 'nope' is not found"):
        lifecycle.resolve("nope")
    assert [entry.name for entry in lifecycle.index(ready=True)] == ["m", "m", "single"]
    assert [model.metric_labels for model in lifecycle.ready_models()] == [
        (("namespace", str(place)),) for place in (one, two, two)
    ]
    assert lifecycle.table.called("single") is not None
    assert lifecycle.table.called("m") is lifecycle.table.called("nope") is None


def test_with_namespaces_errors_name_the_model_by_its_namespace_as_long_as_it_is_to_serve(bench: Bench) -> None:
    for name in ("m", "bad"):
        write_model(bench.repository, name)
    bench.break_version("bad", "1")
    lifecycle = bench.lifecycle("explicit", model_namespacing=True, load_model=("m", "bad"))
    lifecycle.start()
    model = f"Request for unknown model: '{bench.repository}"
    for name, version, told in (
        ("m", 7, f"{model}::m' version 7 is not found"),
        ("bad", 7, f"{model}::bad' version 7 is not found"),
        ("bad", 1, f"{model}::bad' version 1 is not at ready state"),
        ("bad", -1, f"{model}::bad' has no available versions"),
    ):
        with pytest.raises(RemoraError, match=f"^{told}$"):
            lifecycle.resolve(name, version)
    lifecycle.unload("m")
    for version in (-1, 1, 7):
        with pytest.raises(NotFoundError, match=r"^Identifier of model 'm' is not found in global map$"):
            lifecycle.resolve("m", version)
    assert lifecycle.table.called("m") is not None
    with pytest.raises(NotFoundError, match=f"^{model}::m' has no available versions$"):
        lifecycle.resolve(f"{bench.repository}::m")


def test_with_namespaces_a_name_means_the_one_that_is_to_serve_and_not_one_that_goes(bench: Bench) -> None:
    one, two = bench.repository / "one", bench.repository / "two"
    for place in (one, two):
        write_model(place, "m")
    lifecycle = bench.started("none", model_repository=(one, two), model_namespacing=True)
    first = lifecycle.resolve(f"{one}::m")
    assert first.acquire(), "so that it goes slowly"
    lifecycle.models.unload_key(f"{one}::m")
    assert lifecycle.resolve("m") is lifecycle.resolve(f"{two}::m")
    lifecycle.models.unload_key(f"{two}::m")
    with pytest.raises(NotFoundError, match=r"^Identifier of model 'm' is not found in global map$"):
        lifecycle.resolve("m")
    first.release()
    settle(lifecycle)


def test_with_namespaces_a_model_without_versions_is_known_by_its_own(bench: Bench) -> None:
    (bench.repository / "empty").mkdir(parents=True)
    (bench.repository / "empty" / "config.pbtxt").write_text(DOUBLER)
    lifecycle = bench.lifecycle("none", model_namespacing=True)
    lifecycle.start()
    with pytest.raises(NotFoundError, match=f"'{bench.repository}::empty' has no available versions"):
        lifecycle.resolve("empty")


def test_with_namespaces_a_name_is_loaded_and_unloaded_everywhere(bench: Bench) -> None:
    one, two = bench.repository / "one", bench.repository / "two"
    for place in (one, two):
        write_model(place, "m")
    lifecycle = bench.started(model_repository=(one, two), model_namespacing=True)
    lifecycle.load("m", {})
    assert len(lifecycle.ready_models()) == 2
    lifecycle.unload("m")
    assert lifecycle.ready_models() == []
