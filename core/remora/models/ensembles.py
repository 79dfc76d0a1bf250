"""Loading and reconciliation of ensembles with their composing models [E03, M12, M14].

An ensemble that loses a model stops serving, and is loaded again when the model returns. No model's lock is held while
another model is loaded, so that loads that need each other cannot deadlock; cycles are detected before anything loads.
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
from remora.models.served_model import ServedModel
from remora.proto.model_config_pb2 import ModelConfig
from remora.scheduling.assembly import Steps

_log = logging.getLogger("remora.models")


class Table(Protocol):
    """The loaded models, as ensembles use them. Thread-safe."""

    def acquire(self, name: str, version: int = -1) -> ServedModel:
        """Acquire a version for the ensemble's requests (see ``Lifecycle.acquire``)."""

    def configs(self, name: str) -> Mapping[int, ModelConfig]:
        """Return the complete configurations of a model's ready versions."""

    def newest(self, name: str) -> ServedModel | None:
        """Return the newest ready version of a model."""

    def failure(self, name: str) -> str:
        """Return the error of a model's last load, or "" if it succeeded."""

    def load_all(self, names: list[str], ensembles: dict[str, LoadPlan]) -> dict[str, RemoraError]:
        """Load models in parallel and return the failures.

        Plans of ensembles are put into ``ensembles``.
        """

    def open(self, name: str, plan: LoadPlan, steps: Steps | None) -> None:
        """Load the versions of a plan.

        Raises RemoraError and leaves the previous versions in service.
        """

    def unload_key(self, name: str) -> None:
        """Unload all versions of a model."""

    def near(self, name: str, ensemble: str) -> str:
        """Return the key of the model that an ensemble refers to by a name."""


class _Namespace(NamedTuple):
    """Model look-up for the requests of one ensemble, by its namespace."""

    table: Table
    ensemble: str

    def acquire(self, name: str, version: int = -1) -> ServedModel:
        """Acquire a version (see ``Table.acquire``)."""
        return self.table.acquire(self.table.near(name, self.ensemble), version)


class EnsembleLoader:
    """The ensembles of the desired state. Thread-safe.

    Args:
        table: looks up, loads and unloads models.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._reconciling = threading.Lock()
        self._plans: dict[str, LoadPlan] = {}
        self._implied: set[str] = set()

    # -- desired state ------------------------------------------------------------------------------------------------

    def request(self, names: Iterable[str]) -> None:
        """Mark models as requested themselves, so that they stay when an ensemble is unloaded."""
        with self._lock:
            self._implied.difference_update(names)

    def drop(self, name: str, *, with_models: bool = False) -> list[str]:
        """Remove a model from the desired state and return what was removed.

        With ``with_models``, also removes the models that were loaded only for it.
        """
        with self._lock:
            composed = {other: self._models(other, plan) for other, plan in self._plans.items()}
            names = [name, *(freed_by(name, composed, self._implied) if with_models else ())]
            for each in names:
                self._plans.pop(each, None)
                self._implied.discard(each)
        return names

    def forget_plan(self, name: str) -> None:
        """Note that a model is not an ensemble any more; it stays in the desired state."""
        with self._lock:
            self._plans.pop(name, None)

    def required(self) -> set[str]:
        """Return the models that ensembles are composed of."""
        with self._lock:
            return {model for name, plan in self._plans.items() for model in self._models(name, plan)}

    def exclusive_models(self, name: str) -> list[str]:
        """Return the models that were loaded only for this ensemble."""
        with self._lock:
            composed = {other: self._models(other, plan) for other, plan in self._plans.items()}
            return freed_by(name, composed, self._implied)

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self, name: str, plan: LoadPlan, failures: Mapping[str, RemoraError], chain: tuple[str, ...] = ()) -> None:
        """Load the models of an ensemble that do not serve yet, and then the ensemble.

        Args:
            name: the ensemble's name.
            plan: its plan.
            failures: loads that have just failed and are not retried.
            chain: the ensembles that wait for this one.

        Raises:
            LoadFailedError: with Triton's text.
        """
        try:
            self._load_steps(name, plan, (*chain, name), dict(failures))
            if not all(self._table.configs(model) for model in self._models(name, plan)):
                self._load_steps(name, plan, (*chain, name), dict(failures))  # one was evicted for another one
            steps = self._compose(name, plan)
        except ConfigError as error:
            log_failure(name, error)
            raise LoadFailedError(f"load failed for model '{name}': {error}\n", str(error), unfit=True) from error
        self._table.open(name, plan, steps)
        with self._lock:
            self._plans[name] = plan
        with self._reconciling:
            self._reconcile_one(name, anew=True)  # because a reconciliation may have opened the earlier plan
        self.reconcile()

    def _load_steps(self, name: str, plan: LoadPlan, chain: tuple[str, ...], failures: dict[str, RemoraError]) -> None:
        """Load the models of an ensemble. Raises ConfigError when one of them cannot serve."""
        models = self._models(name, plan)
        for model in models:
            if model in chain:
                raise ConfigError(circle((*chain[chain.index(model) :], model)))
        missing = [model for model in models if model not in failures and not self._table.configs(model)]
        loading = current_origin().loading
        for model in loading.intersection(missing):
            raise ConfigError(f"model '{model}' is being loaded and waits for the code that requests this ensemble")
        ensembles: dict[str, LoadPlan] = {}
        # Loaded models are reloaded with the ensemble if their repository has changed, as in Triton.
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
        """Return the current steps of an ensemble.

        Raises ConfigError when it cannot serve with them.
        """
        table = self._table
        decoupled = compose(
            plan.config,
            lambda model: table.configs(table.near(model, name)),
            lambda model: table.failure(table.near(model, name)),
        )
        return Steps(_Namespace(table, name), decoupled)

    def _models(self, name: str, plan: LoadPlan) -> tuple[str, ...]:
        """Return the keys of the models that an ensemble is composed of."""
        return tuple(self._table.near(model, name) for model in step_models(plan.config))

    # -- reconciliation -----------------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Reconcile ensembles with the models that serve.

        Unloads ensembles that lost a model, and reloads those whose models are back or have changed.
        """
        if not self._plans:
            return
        with self._reconciling:
            changed = True
            while changed:
                changed = False
                for name in tuple(self._plans):
                    changed = self._reconcile_one(name) or changed

    def _reconcile_one(self, name: str, *, anew: bool = False) -> bool:
        """Reconcile one ensemble and return True if it was loaded or unloaded.

        With ``anew``, it is opened although its models have not changed.
        """
        plan = self._plans.get(name)
        if plan is None:
            return False
        serving = self._table.newest(name)
        try:
            steps = self._compose(name, plan)
        except ConfigError as error:
            if serving is not None:
                _log.warning("ensemble '%s' is unloaded: %s", name, error)
                self._table.unload_key(name)
            return serving is not None
        if not anew and serving is not None and serving.steps == steps:
            return False
        try:
            self._table.open(name, plan, steps)
        except RemoraError as error:
            _log.error("ensemble '%s' cannot be reloaded: %s", name, error)
            return False
        wanted = self._plans.get(name)  # a client may have unloaded it meanwhile, or loaded it by another plan
        if wanted is None:
            self._table.unload_key(name)
        elif wanted is not plan:
            self._reconcile_one(name, anew=True)
        return True


def step_models(config: ModelConfig) -> tuple[str, ...]:
    """Return the distinct names of an ensemble's models, empty for any other model."""
    return tuple(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def compose(
    config: ModelConfig, ready: Callable[[str], Mapping[int, ModelConfig]], why: Callable[[str], str]
) -> frozenset[str]:
    """Check that an ensemble can serve with the ready models.

    Args:
        config: the ensemble's, as written.
        ready: returns the complete configurations of a model's ready versions.
        why: returns the error of a model's load, if it failed.

    Returns:
        The names of the composing models that are decoupled.

    Raises:
        ConfigError: with Triton's text for the first missing or mismatched model.
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
    """Return the models that were loaded for an ensemble and are not used otherwise.

    Args:
        name: the ensemble's name.
        composed: the models of each ensemble in the desired state.
        implied: the models that were loaded because an ensemble needed them.
    """
    freed = [name]
    for each in freed:
        for model in composed.get(each, ()):
            users = {ensemble for ensemble, models in composed.items() if model in models}
            if model in implied and model not in freed and users <= set(freed):
                freed.append(model)
    return freed[1:]


def no_version(ensemble: str, model: str, failure: str) -> str:
    """Return the error text for a model that did not load."""
    failure = failure.removesuffix("\n")
    because = f" Model '{model}' loading failed with error: {failure}" if failure else ""
    return f"ensemble '{ensemble}' depends on '{model}' which has no loaded version.{because}"


def not_valid(ensemble: str, model: str, failure: str) -> str:
    """Return the error text for a composing ensemble that cannot serve."""
    because = f"Model '{model}' failed with error: {failure}"
    return f"ensemble '{ensemble}' depends on '{model}' which is not valid. {because}"


def not_there(ensemble: str, model: str) -> str:
    """Return the error text for a missing or ambiguous model."""
    return f"ensemble {ensemble} contains models that are not available or ambiguous: {model}"


def circle(names: Iterable[str]) -> str:
    """Return the error text for an ensemble that contains itself, with the cycle in ``names``."""
    return f"an ensemble cannot be composed of itself: {' -> '.join(names)}. Take one of these steps out"
