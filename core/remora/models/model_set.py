"""Loads of plain models and ensembles together, in any order of dependency.

`planner` makes a plan of what the repository or the request contains; `loads` reconciles the model with it and `table`
holds the result. Several models are loaded in parallel on a bounded pool. An ensemble is loaded after its models and
serves as long as they do: see `ensembles`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from remora.errors import RemoraError
from remora.models.ensembles import EnsembleLoader, step_models
from remora.models.load_log import ROOM, occasion
from remora.models.loader import LoadPlan, ModelLoader
from remora.models.loads import LoadFailedError, ModelLoads
from remora.models.memory import MemoryGate, Resident, Space
from remora.models.planner import Planner, Selection
from remora.models.served_model import ServedModel
from remora.models.table import ModelTable
from remora.options import EngineOptions
from remora.proto.model_config_pb2 import ModelConfig
from remora.repository import Fingerprint
from remora.repository.catalog import Catalog, name_of
from remora.scheduling.assembly import Steps
from remora.system.clock import Clock
from remora.system.cpus import memory_in_use_bytes, memory_limit_bytes

_UNLIMITED = Space(None, 0)
_EVICTION_S = 30.0
_NOTHING: Mapping[str, str | bytes] = {}


class ModelSet:
    """The models of an engine, loaded and unloaded by key. Thread-safe.

    Args:
        options: load settings.
        loader: opens one model folder.
        clock: measures load times and timeouts.
        catalog: the models that the repositories offer.
        table: holds the serving versions.
    """

    def __init__(
        self, options: EngineOptions, loader: ModelLoader, clock: Clock, catalog: Catalog, table: ModelTable
    ) -> None:
        self._options = options
        self._catalog = catalog
        self.table = table
        self._planner = Planner(catalog, loader)
        gate = MemoryGate(
            _machine_memory if options.memory_gate else lambda: _UNLIMITED,
            options.model_memory_budget or None,
            self.residents,
            self.evict if options.model_control_mode == "ondemand" else None,
        )
        self.loads = ModelLoads(table, loader, clock, retries=options.model_load_retry_count, gate=gate)
        self._ensembles = EnsembleLoader(self)
        self.release_failed: Callable[[str, Mapping[int, str]], bool] = lambda _key, _errors: False
        """Ends the releases of versions that cannot be loaded; returns True if the model can serve without them."""

    def release_by(self, selection: Selection, failed: Callable[[str, Mapping[int, str]], bool]) -> None:
        """Let releases select versions (see `Planner.selection` and `release_failed`)."""
        self._planner.selection, self.release_failed = selection, failed

    def load(self, key: str, parameters: Mapping[str, str | bytes] = _NOTHING) -> None:
        """Load or reload a model or an ensemble. Raises RemoraError."""
        plan = self._load_plain(key, parameters)
        if plan is not None:
            self._ensembles.load(key, plan, {})

    def load_many(self, keys: list[str]) -> dict[str, RemoraError]:
        """Load models and ensembles in any order of dependency and return the failures."""
        ensembles: dict[str, LoadPlan] = {}
        failures = self.load_all(keys, ensembles)
        for key in sorted(ensembles):
            try:
                self._ensembles.load(key, ensembles[key], failures)
            except RemoraError as error:
                failures[key] = error
        return failures

    def load_all(self, names: list[str], ensembles: dict[str, LoadPlan]) -> dict[str, RemoraError]:
        """Load models in parallel and return the failures.

        Plans of ensembles are put into ``ensembles``.
        """
        failures: dict[str, RemoraError] = {}

        def load_one(name: str) -> None:
            try:
                plan = self._load_plain(name, _NOTHING, for_others=True)
                if plan is not None:
                    ensembles[name] = plan
            except RemoraError as error:
                failures[name] = error

        if len(names) == 1:
            load_one(names[0])  # no thread for the most common case
        elif names:
            workers = max(1, min(self._options.model_load_thread_count, len(names)))
            context = contextvars.copy_context  # carries the calling model, if a model requested the load
            with ThreadPoolExecutor(workers, thread_name_prefix="remora load") as pool:
                for future in [pool.submit(context().run, load_one, name) for name in names]:
                    future.result()
        return failures

    def _load_plain(
        self, key: str, parameters: Mapping[str, str | bytes], *, for_others: bool = False
    ) -> LoadPlan | None:
        """Load a model, or return its plan if it is an ensemble.

        ``for_others``: no client requested this model itself, so a configuration that a client sent for it stays.
        """
        with self.loads.lock_of(key):
            served = self.loads.plan_of(key)
            if for_others and served is not None and served.sent:
                return None
            plan = self._planner.plan(key, parameters)
            if step_models(plan.config):
                return plan
            self.open(key, plan, None)
            self._ensembles.forget_plan(key)  # it may have been an ensemble before
        self._ensembles.reconcile()
        return None

    def not_offered(self, name: str) -> RemoraError:
        """Return the error for a model that no repository offers, or that several do."""
        return self._planner.unpolled(name)

    def request_loads(self, keys: Iterable[str]) -> None:
        """Note that these models are wanted themselves, not only as steps of ensembles.

        Startup, a client or a poll requested them.
        """
        self._ensembles.request(keys)

    def reconcile_ensembles(self) -> None:
        """Load or unload the ensembles whose models have changed."""
        self._ensembles.reconcile()

    def drop(self, key: str, *, with_models: bool = False) -> None:
        """Unload a model, and with ``with_models`` the models that were loaded only for this ensemble."""
        for each in self._ensembles.drop(key, with_models=with_models):
            self.unload_key(each)

    def served_files(self, key: str) -> Fingerprint | None:
        """Return the stamps of the files that a model serves, or None if it does not serve."""
        plan = self.loads.plan_of(key)
        return plan.files if plan is not None else None

    # -- memory ------------------------------------------------------------------------------------------------------

    def residents(self) -> list[Resident]:
        """Return what can be evicted: a model, or an ensemble with the models loaded only for it."""
        needed, residents = self._ensembles.required(), list[Resident]()
        for key in self.table.known():
            if key in needed or self.table.newest(key) is None:
                continue
            group = (key, *self._ensembles.exclusive_models(key))
            models = [model for each in group for model in self.table.serving(each).values()]
            if not models:  # unloaded meanwhile
                continue
            size = sum(self.loads.cost.estimate(model.load_record.file_bytes) for model in models)
            used_ms = max(max(model.load_record.ended_ms, model.statistics.last_inference_ms) for model in models)
            busy = any(model.in_flight for model in models)
            residents.append(Resident(key, size, used_ms, busy, pinned=key in self._options.load_model))
        return residents

    def evict(self, key: str) -> None:
        """Unload an idle model and wait until its memory is free."""
        with occasion(ROOM):
            self.drop(key, with_models=True)
        self.loads.wait_until_closed(_EVICTION_S)

    # -- interface for ensembles: see ``ensembles.Table`` --------------------------------------------------------------

    def acquire(self, name: str, version: int = -1) -> ServedModel:
        return self.table.acquire(name, version)

    def open(self, name: str, plan: LoadPlan, steps: Steps | None) -> None:
        """Load the versions of a plan.

        Raises RemoraError and leaves the previous versions in service.
        """
        try:
            self.loads.reconcile(name, plan, steps)
        except LoadFailedError as error:
            if not self.release_failed(name, error.versions):
                raise
            self.table.drop_failures(name, error.versions)
            self.loads.reconcile(name, self._planner.plan(name, _NOTHING), steps)

    def available(self, key: str) -> list[int]:
        """Return the versions that have files in the model's repository. Raises RemoraError."""
        self._catalog.scan(name_of(key), forgiving=True)
        return self._planner.available(key)

    def is_sent(self, key: str) -> bool:
        """Return True if a client sent the model's configuration or files."""
        plan = self.loads.plan_of(key)
        return plan is not None and plan.sent

    def unload_key(self, name: str) -> None:
        self.loads.unload(name)

    def configs(self, name: str) -> dict[int, ModelConfig]:
        return {number: model.config for number, model in self.table.serving(name).items()}

    def newest(self, name: str) -> ServedModel | None:
        return self.table.newest(name)

    def failure(self, name: str) -> str:
        return self.table.failure(name)

    def near(self, name: str, ensemble: str) -> str:
        """Return the key of the model that an ensemble refers to by a name (see `Catalog.near`)."""
        return self._catalog.near(name, ensemble)


def _machine_memory() -> Space:
    return Space(memory_limit_bytes(), memory_in_use_bytes())
