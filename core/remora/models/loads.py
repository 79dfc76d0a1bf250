"""Makes models serve as they are wished: asks the policy what is next for a model, and does it.

Laws: the loads of one model take turns; a load replaces what serves in one step, when all of it is ready, or changes
nothing [M04]. What is replaced finishes its requests and is closed by a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

from remora.errors import InternalError, InvalidArgumentError, RemoraError, UnavailableError
from remora.models.golden_tests import FILENAME as GOLDEN_TESTS
from remora.models.load_log import log_failure, log_load, log_unload
from remora.models.loader import LoadPlan, ModelLoader
from remora.models.memory import LoadCost, MemoryGate
from remora.models.policy import Action, CurrentState, next_action
from remora.models.served_model import ServedModel, Steps
from remora.models.table import UNAVAILABLE, ModelTable
from remora.repository.catalog import namespace_of
from remora.system.clock import Clock

_log = logging.getLogger("remora.models")

_LOOK_S = 0.05
_ENSEMBLE_HINT = (
    "an ensemble needs a version too, though it has no files: make an empty folder 1/ beside its configuration\n"
)
_CODE_WORDS = {
    "UNKNOWN": "Unknown",
    "INTERNAL": "Internal",
    "NOT_FOUND": "Not found",
    "INVALID_ARG": "Invalid argument",
    "UNAVAILABLE": "Unavailable",
    "UNSUPPORTED": "Unsupported",
    "ALREADY_EXISTS": "Already exists",
    "CANCELLED": "Cancelled",
}


class LoadFailedError(InvalidArgumentError):
    """A load that failed. ``reason`` is what an ensemble that needs the model tells of it; ``unfit``: the model is an
    ensemble itself, and what it is composed of is not there or does not fit."""

    def __init__(self, message: str, reason: str = "", *, unfit: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.unfit = unfit


class _Loaded(NamedTuple):
    """What a model serves with; ``bound`` is what an ensemble is tied to."""

    plan: LoadPlan
    bound: object


class ModelLoads:
    """The loads and unloads of models. Thread-safe.

    Args:
        table: holds what serves.
        loader: opens versions.
        clock: for load times.
        retries: how often a version that fails is opened again [M18].
        gate: lets a load begin when there is memory for it.
    """

    def __init__(self, table: ModelTable, loader: ModelLoader, clock: Clock, *, retries: int, gate: MemoryGate) -> None:
        self._table = table
        self._loader = loader
        self._clock = clock
        self._retries = retries
        self._gate = gate
        self._lock = threading.Lock()
        self._loaded: dict[str, _Loaded] = {}
        self._locks: dict[str, threading.RLock] = {}
        self.closing: list[threading.Thread] = []
        self._ending = threading.Event()

    @property
    def cost(self) -> LoadCost:
        """How much memory loads take."""
        return self._gate.cost

    def lock_of(self, key: str) -> AbstractContextManager[bool]:
        """Whoever plans and loads a model holds this."""
        with self._lock:
            return self._locks.setdefault(key, threading.RLock())

    def plan_of(self, key: str) -> LoadPlan | None:
        """What a model serves with; None when it does not serve."""
        loaded = self._loaded.get(key)
        return loaded.plan if loaded is not None and self._table.newest(key) is not None else None

    def obey(self, key: str, plan: LoadPlan, steps: Steps | None) -> None:
        """Do what the policy says, until the model serves as planned; ``steps`` is what an ensemble is composed of.

        Raises LoadFailedError with Triton's text, or UnavailableError when the server is stopping; what served before
        goes on.
        """
        bound = None if steps is None else steps.decoupled
        with self.lock_of(key):
            action = next_action(plan.revision._replace(bound=bound), self._standing(key))
            if action is not None:
                self._do(key, plan, steps, action)
            self._loaded[key] = _Loaded(plan, bound)

    def _do(self, key: str, plan: LoadPlan, steps: Steps | None, action: Action) -> None:
        begin_ns = self._clock.monotonic_ns()
        self._table.begin(key, action.open)
        with ExitStack() as load:
            try:
                plan = plan.fetched(action.open)
                sizes = {number: plan.folder.file_bytes(number) for number in action.open}
                settling = load.enter_context(self._gate.load(sum(sizes.values())))
            except (RemoraError, OSError) as error:
                raise self._load_failed(key, dict.fromkeys(action.open, _told(error))) from error
            loaded, failed = self._open_versions(plan, action, steps, sizes, begin_ns)
            if not failed:
                failed = self._adjust(key, plan, action)
            if namespace := namespace_of(key):
                for model in loaded.values():
                    model.metric_labels = (("namespace", namespace),)
            with settling():
                self._publish(key, plan, action, loaded, failed)

    def _standing(self, key: str) -> CurrentState | None:
        loaded, serving = self._loaded.get(key), self._table.serving(key)
        if loaded is None:
            return None
        adjustable = all(model.adjustable for model in serving.values())
        return CurrentState(loaded.plan.revision._replace(bound=loaded.bound), frozenset(serving), adjustable)

    def _open_versions(
        self, plan: LoadPlan, action: Action, steps: Steps | None, sizes: Mapping[int, int], begin_ns: int
    ) -> tuple[dict[int, ServedModel], dict[int, RemoraError]]:
        loaded: dict[int, ServedModel] = {}
        failed: dict[int, RemoraError] = {}
        for number in action.open:
            try:
                model = self._open_version(plan, number, steps)
                loaded[number] = self._tested(model, plan)
            except Exception as error:  # whatever it is: a version must not stand there as being loaded for ever
                failed[number] = _told(error)
                continue
            model.load_ns = self._clock.monotonic_ns() - begin_ns
            model.file_bytes, model.loaded_ms = sizes[number], self._clock.wall_ms()
        return loaded, failed

    def _tested(self, model: ServedModel, plan: LoadPlan) -> ServedModel:
        """The model, once it has passed its golden tests. Raises RemoraError."""
        if not (plan.folder.path / GOLDEN_TESTS).is_file():
            return model
        from remora.models.golden_tests import check

        try:
            check(model, plan.folder, self._table.newest(plan.folder.name), self._clock)
        except BaseException:
            model.close()
            raise
        return model

    def _open_version(self, plan: LoadPlan, number: int, steps: Steps | None) -> ServedModel:
        """Open one version, again if it fails and may be tried again."""
        for retries_left in range(self._retries, 0, -1):
            try:
                return self._loader.open(plan, number, steps)
            except RemoraError as error:
                _log.warning(
                    "loading '%s' version %d failed, %d more tries: %s", plan.folder.name, number, retries_left, error
                )
        return self._loader.open(plan, number, steps)

    def _adjust(self, key: str, plan: LoadPlan, action: Action) -> dict[int, RemoraError]:
        """Change the instances of versions that go on serving."""
        serving = self._table.serving(key)
        failed: dict[int, RemoraError] = {}
        for number in action.adjust:
            try:
                self._loader.adjust(serving[number], plan)
            except RemoraError as error:
                failed[number] = error
        return failed

    def _publish(
        self,
        key: str,
        plan: LoadPlan,
        action: Action,
        loaded: dict[int, ServedModel],
        failed: dict[int, RemoraError],
    ) -> None:
        """Put a load's result into the table: all of it, or none [M04]. Raises RemoraError for none."""
        stays = (*action.adjust, *action.keep)
        if failed or not (loaded or stays):
            self._close(key, loaded.values())
            lacks_folder = plan.config.HasField("ensemble_scheduling") and not plan.folder.versions
            raise self._load_failed(key, failed, hint=_ENSEMBLE_HINT if lacks_folder else "")
        self._hand_over(self._table.serving(key), loaded)
        retired = self._table.replace(key, loaded, stays)
        if retired is None:
            self._close(key, loaded.values())
            raise UnavailableError(f"load failed for model '{key}': the server is stopping")
        log_load(
            key,
            loaded,
            [model.version for model in retired],
            max([model.load_ns for model in loaded.values()], default=0),
        )
        self._close(key, retired)

    def _hand_over(self, serving: Mapping[int, ServedModel], loaded: Mapping[int, ServedModel]) -> None:
        """Sequences that are under way end where they began: requests find their way back through what takes over."""
        for number, successor in loaded.items():
            older = serving.get(number) or (serving[max(serving)] if serving else None)
            if older is not None and older.is_needed:
                successor.predecessor = older

    def _load_failed(self, key: str, failed: dict[int, RemoraError], hint: str = "") -> LoadFailedError:
        self._table.fail(key, {number: _sentence(error) for number, error in failed.items()})
        text = f"at least one version must be available under the version policy of model '{key}'\n{hint}"
        if failed:
            text = "".join(
                f"version {number} is at {UNAVAILABLE} state: {_sentence(error)};\n" for number, error in failed.items()
            )
        for number, error in failed.items():
            log_failure(key, error, number)
        return LoadFailedError(f"load failed for model '{key}': {text}", text)

    def take_out(self, key: str) -> None:
        """End the service of a model, whatever serves of it."""
        self._loaded.pop(key, None)
        retired = self._table.retire(key)
        log_unload(key, [model.version for model in retired])
        self._close(key, retired)

    def _close(self, key: str, models: Iterable[ServedModel]) -> None:
        """Let go of models without making anyone wait."""
        for model in models:
            successors = [other for other in self._table.serving(key).values() if other.predecessor is model]
            thread = threading.Thread(
                target=self._end, args=(key, model, successors), name=f"remora close {model.name}", daemon=True
            )
            thread.start()
            with self._lock:
                self.closing = [other for other in self.closing if other.is_alive()] + [thread]

    def _end(self, key: str, model: ServedModel, successors: Sequence[ServedModel]) -> None:
        while successors and model.is_needed and not self._ending.wait(_LOOK_S):
            pass
        for successor in successors:
            successor.predecessor = None
        model.close()
        self._table.closed(key, model.version)

    def end(self) -> None:
        """Sequences that outlive a swap are waited for no longer: the server stops."""
        self._ending.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until what was let go of is closed; False when that took too long."""
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        with self._lock:
            closing = list(self.closing)
        for thread in closing:
            thread.join(max((end_ns - self._clock.monotonic_ns()) / 1e9, 0.0))
        return not any(thread.is_alive() for thread in closing)


def _told(error: Exception) -> RemoraError:
    return error if isinstance(error, RemoraError) else InternalError(f"{type(error).__name__}: {error}")


def _sentence(error: RemoraError) -> str:
    return f"{_CODE_WORDS[error.code]}: {error}"
