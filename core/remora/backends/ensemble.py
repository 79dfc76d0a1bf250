"""Ensembles have no framework of their own: there is nothing to open, and their steps are other models.

`remora.scheduling.ensembles.scheduler` runs them.
"""

from __future__ import annotations

from remora.backends import BackendModel, Instance, Placement, Source
from remora.errors import InternalError
from remora.proto.model_config_pb2 import ModelConfig


class EnsembleBackend:
    """The platform ``ensemble``."""

    name = "ensemble"

    def open(self, source: Source, config: ModelConfig) -> BackendModel:
        return _Ensemble()


class _Ensemble:
    """What the engine holds in the place of an opened model."""

    def complete(self, config: ModelConfig) -> None:
        """Nothing: an ensemble's configuration is written whole."""

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        raise InternalError(f"'{config.name}' is an ensemble: it runs on the models of its steps, not on instances")

    def close(self) -> None:
        """Nothing to give back: the models of the steps are their own."""
