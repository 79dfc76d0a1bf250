"""Ensembles: loaded, described and checked like any model; running their steps is not there yet."""

from __future__ import annotations

from remora.backends import BackendModel, Execution, Instance, Placement, Source
from remora.errors import UnsupportedError
from remora.messages import Outcome
from remora.proto.model_config_pb2 import ModelConfig


class EnsembleBackend:
    """The platform ``ensemble``."""

    name = "ensemble"

    def open(self, source: Source, config: ModelConfig) -> BackendModel:
        return _Ensemble()


class _Ensemble:
    def complete(self, config: ModelConfig) -> None:
        return None

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        return _NotYet(placement.name)

    def close(self) -> None:
        return None


class _NotYet:
    quick = False

    def __init__(self, name: str) -> None:
        self.name = name

    def execute(self, execution: Execution) -> list[Outcome]:
        raise UnsupportedError(f"'{self.name}' is an ensemble: this version of remora cannot run ensembles yet")

    def close(self) -> None:
        return None
