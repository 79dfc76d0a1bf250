"""Reconciliation of models with their desired state by loads, unloads and swaps.

Invariant: loads of one model are serialized; a load replaces the serving versions atomically, when all new ones are
ready, or changes nothing [M04]. Replaced versions finish their requests and are closed by separate threads. An unload
does not wait for a load: versions that the load keeps and that are unloaded meanwhile are opened again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

from remora.errors import InternalError, InvalidArgumentError, RemoraError, UnavailableError
from remora.model_files import GOLDEN_TESTS
from remora.models.load_log import log_failure, log_load, log_unload
from remora.models.loader import LoadPlan, ModelLoader
from remora.models.memory import LoadCost, MemoryGate
from remora.models.policy import Action, CurrentState, next_action
from remora.models.served_model import LoadRecord, ServedModel
from remora.models.table import UNAVAILABLE, ModelTable
from remora.repository.catalog import namespace_of
from remora.scheduling.assembly import Steps
from remora.system.clock import Clock

_log = logging.getLogger("remora.models")

_LOOK_S = 0.05
_NO_ERRORS: Mapping[int, str] = {}
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
    """Raised when a load fails.

    ``reason`` is the text for an ensemble that depends on the model. ``unfit`` is True if the model is an ensemble
    whose models are missing or do not match. ``versions`` are the errors of the versions that failed.
    """

    def __init__(
        self, message: str, reason: str = "", *, unfit: bool = False, versions: Mapping[int, str] = _NO_ERRORS
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.unfit = unfit
        self.versions = versions


class _Loaded(NamedTuple):
    """The plan that a model serves. ``bound`` is the set of decoupled models of an ensemble."""

    plan: LoadPlan
    bound: object


class ModelLoads:
    """Loads and unloads of models. Thread-safe.

    Args:
        table: holds the serving versions.
        loader: opens versions.
        clock: measures load times.
        retries: how often a version that fails is opened again [M18].
        gate: admits a load when there is enough memory.
    """

    def __init__(self, table: ModelTable, loader: ModelLoader, clock: Clock, *, retries: int, gate: MemoryGate) -> None:
        self._table = table
        self._loader = loader
        self._clock = clock
        self._retries = retries
        self.gate = gate
        self._lock = threading.Lock()
        self._loaded: dict[str, _Loaded] = {}
        self._locks: dict[str, threading.RLock] = {}
        self._closers: list[threading.Thread] = []
        self._ending = threading.Event()

    @property
    def cost(self) -> LoadCost:
        """The estimate of the memory that loads take."""
        return self.gate.cost

    def lock_of(self, key: str) -> AbstractContextManager[bool]:
        """Return the lock to hold while a model is planned and loaded."""
        with self._lock:
            return self._locks.setdefault(key, threading.RLock())

    def plan_of(self, key: str) -> LoadPlan | None:
        """Return the plan that a model serves, or None if it does not serve."""
        loaded = self._loaded.get(key)
        return loaded.plan if loaded is not None and self._table.newest(key) is not None else None

    def reconcile(self, key: str, plan: LoadPlan, steps: Steps | None) -> None:
        """Bring a model to its plan. ``steps`` are the models of an ensemble.

        Raises LoadFailedError with Triton's text, or UnavailableError when the server is stopping; the previous
        versions then continue to serve.
        """
        bound = None if steps is None else steps.decoupled
        with self.lock_of(key):
            is_done = False
            while not is_done:
                action = next_action(plan.revision._replace(bound=bound), self._current_state(key))
                is_done = action is None or self._apply(key, plan, steps, action)
                self._loaded[key] = _Loaded(plan, bound)

    def _apply(self, key: str, plan: LoadPlan, steps: Steps | None, action: Action) -> bool:
        """Return False if versions to keep were unloaded meanwhile. Raises RemoraError."""
        begin_ns = self._clock.monotonic_ns()
        self._table.begin(key, action.open)
        with ExitStack() as load:
            try:
                plan = plan.fetched(action.open)
                sizes = {number: plan.folder.file_bytes(number) for number in action.open}
                spared = key if action.adjust or action.keep else ""  # because some of its versions are to stay
                settling = load.enter_context(self.gate.load(sum(sizes.values()), spared))
            except Exception as error:  # any error, because the versions must not stay in LOADING for ever
                raise self._load_failed(key, dict.fromkeys(action.open, _as_remora_error(error))) from error
            loaded, failed = self._open_versions(plan, action, steps, sizes, begin_ns)
            if not failed:
                failed = self._adjust(key, plan, action)
            if namespace := namespace_of(key):
                for model in loaded.values():
                    model.metric_labels = (("namespace", namespace),)
            with settling():
                return self._publish(key, plan, action, loaded, failed)

    def _current_state(self, key: str) -> CurrentState | None:
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
            except Exception as error:  # any error, for the reason in `_apply`
                failed[number] = _as_remora_error(error)
                continue
            load_ns = self._clock.monotonic_ns() - begin_ns
            model.load_record = LoadRecord(load_ns, self._clock.wall_ms(), sizes[number])
        return loaded, failed

    def _tested(self, model: ServedModel, plan: LoadPlan) -> ServedModel:
        """Return the model after it has passed its golden tests. Raises RemoraError."""
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
        """Open one version, with retries."""
        for retries_left in range(self._retries, 0, -1):
            try:
                return self._loader.open(plan, number, steps)
            except RemoraError as error:
                _log.warning(
                    "loading '%s' version %d failed, %d more tries: %s", plan.folder.name, number, retries_left, error
                )
        return self._loader.open(plan, number, steps)

    def _adjust(self, key: str, plan: LoadPlan, action: Action) -> dict[int, RemoraError]:
        """Change the instances of versions that continue to serve.

        Those that are unloaded meanwhile are left out.
        """
        serving = self._table.serving(key)
        failed: dict[int, RemoraError] = {}
        for number in action.adjust:
            model = serving.get(number)
            if model is None or not model.acquire():
                continue
            try:
                self._loader.adjust(model, plan)
            except RemoraError as error:
                failed[number] = error
            finally:
                model.release()
        return failed

    def _publish(
        self,
        key: str,
        plan: LoadPlan,
        action: Action,
        loaded: dict[int, ServedModel],
        failed: dict[int, RemoraError],
    ) -> bool:
        """Publish all results of a load [M04]. Raises RemoraError and changes nothing if one failed.

        Returns False if versions that the action keeps were unloaded meanwhile.
        """
        continuing = (*action.adjust, *action.keep)
        if failed or not (loaded or continuing):
            self._close(key, loaded.values())
            lacks_folder = plan.config.HasField("ensemble_scheduling") and not plan.folder.versions
            raise self._load_failed(key, failed, hint=_ENSEMBLE_HINT if lacks_folder else "")
        heirs = self._hand_over(self._table.serving(key), loaded, continuing)
        replaced = self._table.replace(key, loaded, continuing)
        if replaced is None:
            self._close(key, loaded.values())
            raise UnavailableError(f"load failed for model '{key}': the server is stopping")
        retired = replaced.retired
        for heir in heirs:
            if heir.predecessor not in retired:  # it was unloaded meanwhile, which ends its sequences
                heir.predecessor = None
        log_load(
            key,
            loaded,
            [model.version for model in retired],
            max([model.load_record.duration_ns for model in loaded.values()], default=0),
        )
        self._close(key, retired)
        return not replaced.unloaded

    def _hand_over(
        self, serving: Mapping[int, ServedModel], loaded: Mapping[int, ServedModel], continuing: Collection[int]
    ) -> list[ServedModel]:
        """Let open sequences end in the version where they began.

        Returns the versions that were linked.

        Each new version is linked to the old one. Without new versions, a version that goes is linked to one that
        stays.
        """
        linked: list[ServedModel] = []
        stays = [serving[number] for number in continuing if number in serving]
        for number, gone in serving.items():
            heirs = [model for model in stays if model.predecessor is None]
            if number not in continuing and not loaded and gone.is_needed and heirs:
                heirs[-1].predecessor = gone
                linked.append(heirs[-1])
        for number, successor in loaded.items():
            older = serving.get(number) or (serving[max(serving)] if serving else None)
            if older is not None and older.is_needed:
                successor.predecessor = older
                linked.append(successor)
        return linked

    def _load_failed(self, key: str, failed: dict[int, RemoraError], hint: str = "") -> LoadFailedError:
        self._table.fail(key, {number: _sentence(error) for number, error in failed.items()})
        text = f"at least one version must be available under the version policy of model '{key}'\n{hint}"
        if failed:
            text = "".join(
                f"version {number} is at {UNAVAILABLE} state: {_sentence(error)};\n" for number, error in failed.items()
            )
        for number, error in failed.items():
            log_failure(key, error, number)
        versions = {number: _sentence(error) for number, error in failed.items()}
        return LoadFailedError(f"load failed for model '{key}': {text}", text, versions=versions)

    def unload(self, key: str) -> None:
        """Unload all versions of a model."""
        self._loaded.pop(key, None)
        retired = self._table.retire(key)
        log_unload(key, [model.version for model in retired])
        self._close(key, retired)

    def _close(self, key: str, models: Iterable[ServedModel]) -> None:
        threads: list[threading.Thread] = []
        for model in models:
            successors = [other for other in self._table.serving(key).values() if other.predecessor is model]
            work, name = (key, model, successors), f"remora close {model.name}"
            threads.append(threading.Thread(target=self._end, args=work, name=name, daemon=True))
        with self._lock:
            self._closers += threads
            self._start_closing()

    def _start_closing(self) -> list[threading.Thread]:
        """Start the threads that close models, and return those that have not ended.

        Threads that could not start before are tried again.
        """
        self._closers = [thread for thread in self._closers if _is_pending(thread)]
        for thread in self._closers:
            if thread.ident is None:
                try:
                    thread.start()
                except RuntimeError as error:  # the process can have no more threads
                    _log.warning("unloaded versions keep their memory until the next load or unload: %s", error)
                    break
        return list(self._closers)

    def _end(self, key: str, model: ServedModel, successors: Sequence[ServedModel]) -> None:
        while successors and model.is_needed and not self._ending.wait(_LOOK_S):
            pass
        for successor in successors:
            successor.predecessor = None
        model.close()
        self._table.closed(key, model)

    def end(self) -> None:
        """Stop waiting for open sequences of replaced versions, because the server stops."""
        self._ending.set()

    def wait_until_closed(self, timeout_s: float) -> bool:
        """Wait until unloaded models are closed. Return False on timeout."""
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        with self._lock:
            closing = self._start_closing()
        for thread in closing:
            if thread.ident is not None:
                thread.join(max((end_ns - self._clock.monotonic_ns()) / 1e9, 0.0))
        return not any(map(_is_pending, closing))


def _is_pending(thread: threading.Thread) -> bool:
    """Return True for a thread that has not started or not ended."""
    return thread.ident is None or thread.is_alive()


def _as_remora_error(error: Exception) -> RemoraError:
    return error if isinstance(error, RemoraError) else InternalError(f"{type(error).__name__}: {error}")


def _sentence(error: RemoraError) -> str:
    return f"{_CODE_WORDS[error.code]}: {error}"
