"""Ensembles with the response cache, whose answers change with the versions of their models [E09]."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from conftest import needs
from remora.calls import ModelRelease
from remora.engine import Engine
from remora.errors import RemoraError
from remora.models.loads import ModelLoads
from support.servers.live_server import write_version

TENSORS = """
max_batch_size: 8
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
ENSEMBLE = f"""
platform: "ensemble" {TENSORS} response_cache {{ enable: true }}
ensemble_scheduling {{ step {{ model_name: "m" model_version: -1
  input_map {{ key: "IN" value: "IN" }} output_map {{ key: "OUT" value: "OUT" }} }} }}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model ``m`` and an ensemble of it with the response cache."""
    root = tmp_path / "models"
    write_version(root, 1)
    with (root / "m" / "config.pbtxt").open("a") as config:
        config.write("version_policy { all { } }\n")
    (root / "e" / "1").mkdir(parents=True)
    (root / "e" / "config.pbtxt").write_text(ENSEMBLE)
    return root


@contextmanager
def cached_engine(repository: Path) -> Iterator[Engine]:
    """Return an engine that has cached the first version's answer."""
    settings = {"model_control_mode": "explicit", "load_model": ("e",), "cache_config": ("local,size=100000",)}
    settings.setdefault("backend_config", ("python,isolation=thread",))
    with Engine(options=None, model_repository=(repository,), **settings) as engine:
        assert [product(engine), product(engine)] == [1, 1]
        yield engine


def add_version(repository: Path, number: int) -> None:
    """Write one more version, and leave the configuration as it is."""
    write_version(repository, number, name="other")
    (repository / "other" / str(number)).rename(repository / "m" / str(number))


def product(engine: Engine) -> int:
    """Return what becomes of 1."""
    return int(engine.infer("e", {"IN": np.array([[1]], np.int32)})["OUT"][0, 0])


@needs("remora_tools")
def test_an_answer_is_that_of_the_new_version_as_soon_as_it_is_loaded(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cached_engine(repository) as engine:
        monkeypatch.setattr(ModelLoads, "_close", lambda *_: None)  # as long as the thread that closes takes to begin
        (repository / "m" / "1").rename(repository.parent / "gone")
        add_version(repository, 2)
        engine.load("m")
        assert product(engine) == 2


@needs("remora_tools")
def test_an_answer_is_that_of_a_version_that_is_loaded_beside_the_others(repository: Path) -> None:
    with cached_engine(repository) as engine:
        add_version(repository, 2)
        engine.load("m")
        assert product(engine) == 2


@needs("remora_tools")
def test_an_answer_is_that_of_the_version_that_a_release_makes_stable(repository: Path) -> None:
    with cached_engine(repository) as engine:
        add_version(repository, 2)
        engine.perform(ModelRelease("m", "start", {"version": 2, "weight": 0}))
        assert product(engine) == 1
        engine.perform(ModelRelease("m", "promote", {}))
        assert product(engine) == 2


@needs("remora_tools")
def test_an_answer_stays_cached_while_another_model_fails_to_load(repository: Path) -> None:
    with cached_engine(repository) as engine:
        hits = engine.resolve("e").statistics.snapshot("e", "1").cache_hit.count
        write_version(repository, 1, name="broken")
        (repository / "broken" / "1" / "model.py").write_text("raise ValueError('broken file')")
        with pytest.raises(RemoraError, match="broken file"):
            engine.load("broken")
        assert product(engine) == 1
        assert engine.resolve("e").statistics.snapshot("e", "1").cache_hit.count == hits + 1
