"""Ensembles are loaded after what they are composed of, and serve as long as that does [E03, M12, M14].

The laws: an ensemble that lost a model goes, and comes back with it. No lock of a model is held while another is
loaded, so that loads that need each other cannot stand still; a circle is found before anything of it is loaded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from remora.backends.calling import current_origin
from remora.config.step_rules import check_steps
from remora.errors import ConfigError, RemoraError
from remora.models.load_log import log_failure
from remora.models.loader import LoadPlan
from remora.models.loads import LoadFailedError
from remora.models.planner import PollFailedError
from remora.models.served_model import ServedModel, Steps
from remora.proto.model_config_pb2 import ModelConfig

_log = logging.getLogger("remora.models")


class Table(Protocol):
    """The models that are loaded, as ensembles see and change them. Thread-safe."""

    def borrow(self, name: str, version: int = -1) -> ServedModel:
        """For the ensemble's requests; see ``Lifecycle.borrow``."""

    def configs(self, name: str) -> Mapping[int, ModelConfig]:
        """The complete configurations of a model's ready versions."""

    def newest(self, name: str) -> ServedModel | None:
        """What serves of a model."""

    def failure(self, name: str) -> str:
        """What a model's last load failed with; "" when it did not."""

    def load_all(self, names: list[str], ensembles: dict[str, LoadPlan]) -> dict[str, RemoraError]:
        """Load models side by side; what could not be. Ensembles are only planned, and put into ``ensembles``."""

    def open(self, name: str, plan: LoadPlan, steps: Steps | None) -> None:
        """Load the versions of a plan and let them serve. Raises RemoraError; then what served before goes on."""

    def take_out(self, name: str) -> None:
        """End the service of a model, whatever serves of it."""

    def near(self, name: str, ensemble: str) -> str:
        """The key of the model that an ensemble means by a name."""


class _Namespace(NamedTuple):
    """The models as an ensemble's requests find them."""

    table: Table
    ensemble: str

    def borrow(self, name: str, version: int = -1) -> ServedModel:
        """See ``Table.borrow``."""
        return self.table.borrow(self.table.near(name, self.ensemble), version)


class EnsembleLoader:
    """The ensembles that are to serve. Thread-safe.

    Args:
        table: where models are found, loaded and taken out.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._plans: dict[str, LoadPlan] = {}
        self._implied: set[str] = set()

    # -- wishes -----------------------------------------------------------------------------------------------------

    def wish(self, names: Iterable[str]) -> None:
        """Models are wanted for their own sake, so that they stay when an ensemble goes."""
        with self._lock:
            self._implied.difference_update(names)

    def drop(self, name: str, *, with_models: bool = False) -> list[str]:
        """A model is wanted no longer; it, and ``with_models`` those that were loaded for it alone."""
        with self._lock:
            composed = {other: self._models(other, plan) for other, plan in self._plans.items()}
            names = [name, *(freed_by(name, composed, self._implied) if with_models else ())]
            for each in names:
                self._plans.pop(each, None)
                self._implied.discard(each)
        return names

    def needed(self) -> set[str]:
        """The models that ensembles are composed of."""
        with self._lock:
            return {model for name, plan in self._plans.items() for model in self._models(name, plan)}

    def company(self, name: str) -> list[str]:
        """The models that go when this one goes, besides itself: loaded for it alone."""
        with self._lock:
            composed = {other: self._models(other, plan) for other, plan in self._plans.items()}
            return freed_by(name, composed, self._implied)

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self, name: str, plan: LoadPlan, failures: Mapping[str, RemoraError], chain: tuple[str, ...] = ()) -> None:
        """Load what an ensemble is composed of, as far as it does not serve yet, and then itself.

        Args:
            name: the ensemble's.
            plan: its plan.
            failures: loads that have just failed and are not tried again.
            chain: the ensembles that wait for this one.

        Raises:
            LoadFailedError: with Triton's text.
        """
        try:
            self._load_steps(name, plan, (*chain, name), dict(failures))
            steps = self._compose(name, plan)
        except ConfigError as error:
            log_failure(name, error)
            raise LoadFailedError(f"load failed for model '{name}': {error}\n", str(error), unfit=True) from error
        self._table.open(name, plan, steps)
        with self._lock:
            self._plans[name] = plan
        self.settle()

    def _load_steps(self, name: str, plan: LoadPlan, chain: tuple[str, ...], failures: dict[str, RemoraError]) -> None:
        """Raises ConfigError when one of the models cannot serve."""
        models = self._models(name, plan)
        for model in models:
            if model in chain:
                raise ConfigError(circle((*chain[chain.index(model) :], model)))
        missing = [model for model in models if model not in failures and not self._table.configs(model)]
        loading = current_origin().loading
        for model in loading.intersection(missing):
            raise ConfigError(f"model '{model}' is being loaded and waits for the code that asks for this ensemble")
        ensembles: dict[str, LoadPlan] = {}
        # What serves may have changed in its repository, and is brought up to date with the ensemble as in Triton.
        known = [model for model in models if model not in failures and model not in loading]
        failures.update(self._table.load_all(known, ensembles))
        for model, inner in ensembles.items():
            try:
                self.load(model, inner, failures, chain)
            except RemoraError as error:
                failures[model] = error
        with self._lock:
            self._implied.update(missing)
        for model in models:
            failure = failures.get(model)
            if isinstance(failure, PollFailedError):
                raise ConfigError(not_there(name, model))
            if isinstance(failure, LoadFailedError) and failure.unfit:
                raise ConfigError(not_valid(name, model, failure.reason))
            if failure is not None:
                reason = failure.reason if isinstance(failure, LoadFailedError) else failure.message
                raise ConfigError(no_version(name, model, reason))

    def _compose(self, name: str, plan: LoadPlan) -> Steps:
        """What an ensemble is composed of now. Raises ConfigError when it cannot serve with it."""
        table = self._table
        decoupled = compose(
            plan.config,
            lambda model: table.configs(table.near(model, name)),
            lambda model: table.failure(table.near(model, name)),
        )
        return Steps(_Namespace(table, name), decoupled)

    def _models(self, name: str, plan: LoadPlan) -> tuple[str, ...]:
        """The keys of the models that an ensemble is composed of."""
        return tuple(self._table.near(model, name) for model in step_models(plan.config))

    # -- following --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take out ensembles whose models went, bring back those whose models came, and follow what changed."""
        if not self._plans:
            return
        with self._settling:
            moved = True
            while moved:
                moved = False
                for name in tuple(self._plans):
                    moved = self._settle_one(name) or moved

    def _settle_one(self, name: str) -> bool:
        """Whether something had to be done."""
        plan = self._plans.get(name)
        if plan is None:
            return False
        serving = self._table.newest(name)
        try:
            steps = self._compose(name, plan)
        except ConfigError as error:
            if serving is not None:
                _log.warning("ensemble '%s' ends its service: %s", name, error)
                self._table.take_out(name)
            return serving is not None
        if serving is not None and serving.steps == steps:
            return False
        try:
            self._table.open(name, plan, steps)
        except RemoraError as error:
            _log.error("ensemble '%s' does not come back: %s", name, error)
            return False
        return True


def step_models(config: ModelConfig) -> tuple[str, ...]:
    """The names of the models that an ensemble is composed of, each once; none for any other model."""
    return tuple(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def compose(
    config: ModelConfig, ready: Callable[[str], Mapping[int, ModelConfig]], why: Callable[[str], str]
) -> frozenset[str]:
    """Check that an ensemble can serve with what is ready.

    Args:
        config: the ensemble's, as written.
        ready: a model's name -> the complete configurations of its ready versions.
        why: a model's name -> what its load failed with, if it did.

    Returns:
        The names of the composing models that are decoupled.

    Raises:
        ConfigError: with Triton's text for the first thing that is missing or does not fit.
    """
    models: dict[str, ModelConfig] = {}
    for step in config.ensemble_scheduling.step:
        model = step.model_name
        versions = ready(model)
        if not versions:
            raise ConfigError(no_version(config.name, model, why(model)))
        wanted = step.model_version if step.model_version > 0 else max(versions)
        if wanted not in versions:
            raise ConfigError(
                f"ensemble '{config.name}' depends on '{model}' whose required version {wanted} is not loaded."
            )
        models[model] = versions[wanted]
    check_steps(config, models)
    return frozenset(name for name, model in models.items() if model.model_transaction_policy.decoupled)


def freed_by(name: str, composed: Mapping[str, Collection[str]], implied: Collection[str]) -> list[str]:
    """The models that go with an ensemble: loaded for it, also through other ensembles, and needed by nothing else.

    Args:
        name: the ensemble's.
        composed: the models of each ensemble that is to serve.
        implied: the models that were loaded because an ensemble needed them.
    """
    going = [name]
    for gone in going:
        for model in composed.get(gone, ()):
            users = {ensemble for ensemble, models in composed.items() if model in models}
            if model in implied and model not in going and users <= set(going):
                going.append(model)
    return going[1:]


def no_version(ensemble: str, model: str, failure: str) -> str:
    """What an ensemble fails with when one of its models did not load."""
    failure = failure.removesuffix("\n")
    because = f" Model '{model}' loading failed with error: {failure}" if failure else ""
    return f"ensemble '{ensemble}' depends on '{model}' which has no loaded version.{because}"


def not_valid(ensemble: str, model: str, failure: str) -> str:
    """What an ensemble fails with when one of its models is an ensemble that cannot serve."""
    because = f"Model '{model}' failed with error: {failure}"
    return f"ensemble '{ensemble}' depends on '{model}' which is not valid. {because}"


def not_there(ensemble: str, model: str) -> str:
    """What an ensemble fails with when no repository has one of its models, or more than one do."""
    return f"ensemble {ensemble} contains models that are not available or ambiguous: {model}"


def circle(names: Iterable[str]) -> str:
    """What an ensemble fails with that is composed of itself; ``names`` begin and end with the same one."""
    return f"an ensemble cannot be composed of itself: {' -> '.join(names)}. Take one of these steps out"
