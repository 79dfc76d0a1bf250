"""Loading of a `ServedModel` and its instances from a model folder."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from remora import plugins
from remora.backends import Backend, BackendModel, Instance, Source
from remora.backends.registry import backend_in, find_backend, kinds_of
from remora.config import (
    BatchingChoice,
    Placement,
    SequenceState,
    check_names,
    find_config,
    infer_backend,
    normalise,
    parse_config,
    placements,
    rate_policies,
    read_config,
    read_data,
    select_versions,
    sequence_policy,
    validate,
    validate_written,
)
from remora.errors import ConfigError, InternalError, RemoraError, UnsupportedError
from remora.messages import DTYPES, Array
from remora.model_files import digest_files
from remora.models.placement import PlacedModel, parse_gpu_limits, parse_host_policies
from remora.models.policy import Revision, revision_of
from remora.models.served_model import ModelParts, ServedModel, close_part
from remora.options import EngineOptions, cache_settings, cache_size, rate_limits
from remora.proto.model_config_pb2 import ModelConfig, ModelSequenceBatching
from remora.repository import Fingerprint, ModelFolder, Repository, is_stray
from remora.scheduling.assembly import SchedulingOptions, Steps
from remora.startup import Ledger
from remora.statistics import (
    FIRST_RESPONSE_BOUNDS_MS,
    FIRST_RESPONSES,
    SUMMARY_SAMPLES,
    MetricsSettings,
    ModelStatistics,
)
from remora.system.clock import Clock
from remora.system.cpus import numa_cpus, usable_cpus
from remora.system.environment import cache_directory, variables
from remora.system.gpus import Gpus, capable

if TYPE_CHECKING:
    from remora.backends.calling import ModelCaller
    from remora.cache import ResponseCache
    from remora.models.trial_load import Trials
    from remora.scheduling.rate_limiter import RateLimiter, Turn


_log = logging.getLogger("remora.models")

_NO_FILES: Fingerprint = {}

_UNKNOWN_REVISION = Revision({})
_STOP_LIMIT_S = 5

_LABELS_LIMIT = 64 << 20
"""Maximum size of a label file in bytes; the largest vocabularies have a few million labels."""


class PollError(Exception):
    """Raised when a model cannot be planned.

    It has no folder, an unreadable configuration or a mismatched name. Triton answers all of these with the same text
    [M09]; the reason is logged.
    """


class LoadPlan(NamedTuple):
    """A load to do.

    It holds the folder, its configuration as written, and the selected versions (ascending). ``revision`` identifies
    the content; ``repository`` provides files that are not local yet; ``sent`` is True if the load request contained a
    configuration or files; ``files`` are the stamps of the files.
    """

    folder: ModelFolder
    config: ModelConfig
    versions: list[int]
    revision: Revision = _UNKNOWN_REVISION
    repository: Repository | None = None
    sent: bool = False
    files: Fingerprint = _NO_FILES

    def fetched(self, versions: Collection[int]) -> LoadPlan:
        """Return the plan with the files of these versions local.

        Raises RemoraError when they are unavailable.
        """
        if self.repository is None:
            return self
        return self._replace(folder=self.repository.fetch(self.folder.name, versions).absolute())


class _Opened(NamedTuple):
    """A version that its backend has opened; ``config`` is completed in place."""

    folder: ModelFolder
    number: int
    config: ModelConfig
    model: BackendModel
    kinds: tuple[str, ...]


class _Placed(NamedTuple):
    """The instances of a version, where they are, and their turns at the rate limiter."""

    places: tuple[Placement, ...]
    instances: list[Instance]
    turns: Sequence[Turn]


class ModelLoader:
    """Opener of models. Thread-safe because it holds only settings.

    ``calls`` returns the engine for models that call other models; set it once, before the first model is opened.
    """

    def __init__(self, options: EngineOptions, clock: Clock, *, gpus: Sequence[int] | None = None) -> None:
        self._options = options
        self.devices = Gpus()
        least = options.least_capability()
        self._least_number = float(".".join(map(str, least)))
        self._settings = options.backend_settings()
        self.calls: Callable[[], ModelCaller] | None = None
        self.ledger = Ledger(clock.monotonic_ns)
        self._clock = clock
        self._gpus = capable(self.devices.visible(), least) if gpus is None else gpus
        self._limits = parse_gpu_limits(options.model_load_gpu_limit)
        self._cpus_of = {
            name: policy.cpus or numa_cpus(policy.numa_node)
            for name, policy in parse_host_policies(options.host_policy).items()
        }
        self._cpus = usable_cpus()
        self.cache = _make_cache(options, clock)
        """The cache shared by all models; None without one."""
        self._limiter = _make_limiter(options)
        self._trials = _make_trials(options)
        metrics = MetricsSettings.of(options.metrics_config)
        self._samples = SUMMARY_SAMPLES if metrics.summary_latencies else 0
        self._first_bounds_ms = FIRST_RESPONSE_BOUNDS_MS if metrics.histogram_latencies else ()

    def plan(
        self,
        folder: ModelFolder,
        parameters: Mapping[str, str | bytes],
        repository: Repository | None = None,
        files: Fingerprint = _NO_FILES,
        select: Callable[[list[int]], list[int]] | None = None,
    ) -> LoadPlan:
        """Plan a load without opening the model.

        Args:
            folder: the model's folder.
            parameters: those of the load request.
            repository: the origin of the folder.
            files: stamps taken before this call.
            select: returns the versions to load from those of the version policy; None to load the latter.

        Raises PollError.
        """
        begin_ns = self.ledger.now_ns()
        try:
            config = self._written_config(folder, parameters)
            config.name = config.name or folder.name
            check_names(config, folder.name)
            versions = select_versions(config.version_policy, _whole_versions(folder, config))
            if select is not None:
                versions = select(versions)
            # A policy that selects no version is refused later, with a specific error text.
            looked_at = versions or sorted(folder.versions)
            infer_backend(config, folder.name, folder.filenames(looked_at[-1]) if looked_at else ())
            self._check_as_written(config, folder.name)
        except (ConfigError, OSError) as error:
            raise PollError(str(error)) from error
        self.ledger.add(folder.name, "config", begin_ns)
        revision = revision_of(folder, config, versions, files)
        return LoadPlan(folder.absolute(), config, versions, revision, repository, bool(parameters), files)

    def _written_config(self, folder: ModelFolder, parameters: Mapping[str, str | bytes]) -> ModelConfig:
        for key in parameters:
            if key != "config" and not key.startswith("file:"):
                raise UnsupportedError(f"load parameter '{key}' is not known: there are 'config' and 'file:PATH'")
        override = parameters.get("config")
        if isinstance(override, str):
            return parse_config(override, path=f"the load request's config of '{folder.name}'", syntax="json")
        path = find_config(folder.path, self._options.model_config_name) if not _is_bare(folder) else None
        return read_config(path) if path is not None else ModelConfig()

    def _check_as_written(self, config: ModelConfig, name: str) -> None:
        """Refuse errors that no model could fix.

        Tensors may be missing unless auto-completion is disabled.
        """
        trial = ModelConfig()
        trial.CopyFrom(config)
        normalise(trial, name, gpus=self._gpus)
        if self._options.disable_auto_complete_config:
            validate(trial, name, gpus=self._gpus, least=self._least_number)
        else:
            validate_written(trial, name)

    def open(self, plan: LoadPlan, number: int, steps: Steps | None = None) -> ServedModel:
        """Load one version. ``steps`` are the checked models of an ensemble.

        Raises RemoraError, also for any other exception of a backend or a model; the parts opened so far are closed.
        """
        begin_ns = self.ledger.now_ns()
        try:
            with ExitStack() as undo:
                opened = self._open_files(plan, number, undo)
                states = self._complete(opened)
                placed = _Placed((), [], ())
                if steps is None:
                    placed = self._place(opened, undo)
                else:
                    opened.config.model_transaction_policy.decoupled = bool(steps.decoupled)
                served = self._assemble(opened, placed, states, steps)
                undo.callback(served.scheduler.stop, _STOP_LIMIT_S)
                self.ledger.add(opened.folder.name, "session", begin_ns)
                self._warm(opened.folder)(served, placed.instances)
                undo.pop_all()
                return served
        except RemoraError:
            raise
        except Exception as error:
            raise InternalError(f"{type(error).__name__}: {error}") from error

    def _open_files(self, plan: LoadPlan, number: int, undo: ExitStack) -> _Opened:
        """Open a version's files with its backend."""
        config, folder = ModelConfig(), plan.folder
        config.CopyFrom(plan.config)
        backend = self._backend(config)
        source = Source(
            folder.name,
            number,
            folder.path,
            folder.versions[number],
            folder.repository,
            {**self._settings.get("", {}), **self._settings.get(backend.name, {})},
            self._cpus,
            self.calls,
            len(self._gpus),
        )
        if self._trials is not None:
            self._trials.check(backend.name, source, config)
        model = backend.open(source, config)
        undo.callback(close_part, model, folder.name)
        return _Opened(folder, number, config, self._placed(model), kinds_of(backend, model))

    def _complete(self, opened: _Opened) -> Mapping[str, Array]:
        """Complete and validate the configuration, and return the initial states of sequences."""
        folder, _, config, model, kinds = opened
        # The model sees the defaults and may add to them.
        normalise(config, folder.name, gpus=self._gpus, kinds=kinds)
        if not self._options.disable_auto_complete_config:
            model.complete(config)
            _adopt_labels(config, folder)
        normalise(config, folder.name, gpus=self._gpus, kinds=kinds)
        validate(config, folder.name, gpus=self._gpus, least=self._least_number)
        if not self._options.batching_delay:
            _clear_delays(config)
        return _initial_states(config, folder)

    def _place(self, opened: _Opened, undo: ExitStack) -> _Placed:
        """Create the instances at the placements of the configuration."""
        config = opened.config
        turns = self._limiter.join(rate_policies(config)) if self._limiter is not None else ()
        for turn in turns:
            undo.callback(turn.leave)
        places = placements(config) or (Placement(opened.folder.name),)
        instances: list[Instance] = []
        for place in places:
            instances.append(opened.model.instance(config, place))
            undo.callback(close_part, instances[-1], opened.folder.name)
        return _Placed(places, instances, turns)

    def _assemble(
        self, opened: _Opened, placed: _Placed, states: Mapping[str, Array], steps: Steps | None
    ) -> ServedModel:
        """Return the model with its scheduler, which owns the instances from now on."""
        folder, number, config, model, kinds = opened
        options = self._options
        parts = ModelParts(
            name=folder.name,
            version=number,
            config=config,
            backend_model=model,
            instances=placed.instances,
            places=placed.places,
            folder=folder.path,
            files=folder.versions[number],
            kinds=kinds,
            batching=_batching_note(opened),
            clock=self._clock,
            labels=read_labels(config, folder.path),
            statistics=ModelStatistics(self._samples, self._first_bounds_ms and _first_bounds_ms(config)),
            steps=steps,
            cache=self.cache,
            fingerprint=self._cache_fingerprint(opened),
            scheduling=SchedulingOptions(
                placed.turns, states, options.delay_scheduler, options.backlog_delay_scheduler, options.refuse_late
            ),
        )
        return ServedModel(parts)

    def _cache_fingerprint(self, opened: _Opened) -> bytes:
        """Return the digest of a model that uses a cache of several servers, else b"".

        Logs a warning if there is no cache.
        """
        if not opened.config.response_cache.enable:
            return b""
        if self.cache is None:
            _log.warning(
                "model '%s' enables the response cache, but none is configured: set --cache-config=local,size=BYTES",
                opened.folder.name,
            )
            return b""
        return _fingerprint(opened.config, opened.folder.versions[opened.number]) if self.cache.remote else b""

    def adjust(self, model: ServedModel, plan: LoadPlan) -> None:
        """Change the instances of a serving model to those of a plan, without interruption [M13].

        Raises RemoraError; the model then serves as before.
        """
        config = ModelConfig()
        config.CopyFrom(model.config)
        config.ClearField("instance_group")
        config.instance_group.MergeFrom(plan.config.instance_group)
        config.version_policy.CopyFrom(plan.config.version_policy)
        try:
            normalise(config, model.name, gpus=self._gpus, kinds=model.kinds)
            validate(config, model.name, gpus=self._gpus, least=self._least_number)
            model.adjust(config, placements(config) or (Placement(model.name),), self._warm(plan.folder))
        except RemoraError:
            raise
        except Exception as error:
            raise InternalError(f"{type(error).__name__}: {error}") from error

    def _warm(self, folder: ModelFolder) -> Callable[[ServedModel, Sequence[Instance]], None]:
        """Return a function that runs the model's warmup samples, if any, on instances."""

        def warm(served: ServedModel, instances: Sequence[Instance]) -> None:
            if served.config.model_warmup or self._options.derived_warmup:
                from remora.models.warmup import warm_up

                begin_ns = self.ledger.now_ns()
                warm_up(served, instances, folder.path, self._clock, derive=self._options.derived_warmup)
                self.ledger.add(folder.name, "warmup", begin_ns)

        return warm

    def _placed(self, model: BackendModel) -> BackendModel:
        """Wrap the model with the operator's limits on devices and CPUs, if any."""
        if not (self._limits or self._cpus_of):
            return model
        return PlacedModel(model, self._limits, self._used_share, self._cpus_of)

    @property
    def gpu_count(self) -> int:
        """Number of GPUs that models may use."""
        return len(self._gpus)

    def _used_share(self, device: int) -> float | None:
        """Return the used fraction of a GPU's memory, or None if unknown."""
        readings = self.devices.readings()
        if device >= len(readings) or not readings[device].memory_total_bytes:
            return None
        return (readings[device].memory_used_bytes or 0) / (readings[device].memory_total_bytes or 1)

    def _backend(self, config: ModelConfig) -> Backend:
        directory = self._options.backend_directory
        found = backend_in(Path(directory).absolute(), config.backend) if directory else None
        return found or find_backend("ensemble" if config.platform == "ensemble" else config.backend)


def _batching_note(opened: _Opened) -> str:
    """Log and return the choice of batching that the configuration left open, "" if none."""
    choice: BatchingChoice | None = getattr(opened.model, "batching", None)
    if choice is None:
        return ""
    note = choice.sentence(opened.config.max_batch_size)
    _log.info("model '%s': %s", opened.folder.name, note)
    return note


def _make_cache(options: EngineOptions, clock: Clock) -> ResponseCache | None:
    """Create the response cache of the options. Raises ValueError for invalid settings."""
    settings = cache_settings(options)
    if settings is None:
        return None
    kind, cache_options = settings
    if kind in plugins.CACHES:
        open_cache = plugins.load_for(f"--cache-config={kind}", plugins.CACHES[kind])
        cache: ResponseCache = open_cache(cache_options, clock.monotonic_ns)
        return cache
    from remora.cache import LocalCache  # imported here because it loads hashing, which most servers do not need

    return LocalCache(cache_size(cache_options), clock.monotonic_ns)


def _whole_versions(folder: ModelFolder, config: ModelConfig) -> list[int]:
    """Return the versions among which the policy chooses: those with files, if any has files.

    An upload may be under way in an empty folder, and the versions of ensembles have no files. A version that the
    policy names is not left out.
    """
    versions = sorted(folder.versions)
    if config.version_policy.HasField("specific") or config.HasField("ensemble_scheduling"):
        return versions
    whole = [number for number in versions if not all(map(is_stray, folder.filenames(number)))]
    if whole and len(whole) < len(versions):
        empty = ", ".join(str(folder.versions[number]) for number in versions if number not in whole)
        _log.warning("model '%s': %s has no files and is left out", folder.name, empty)
    return whole or versions


def _fingerprint(config: ModelConfig, path: Path) -> bytes:
    """Return a digest of a model's configuration and files, as its key in a shared cache."""
    from hashlib import blake2b

    digest = blake2b(config.SerializeToString(deterministic=True), digest_size=32)
    digest_files(digest.update, path)
    return digest.digest()


def _make_trials(options: EngineOptions) -> Trials | None:
    """Create the trial loads of the options, or return None.

    Raises UnavailableError without a writable folder.
    """
    if not options.trial_load:
        return None
    from remora.models.trial_load import Trials  # imported here because few servers use it

    return Trials(cache_directory("trials", variables()), options.backend_directory)


def _make_limiter(options: EngineOptions) -> RateLimiter | None:
    """Create the rate limiter of the options. Raises ValueError for invalid settings."""
    limits = rate_limits(options)
    if limits is None:
        return None
    from remora.scheduling.rate_limiter import RateLimiter  # imported here because few servers use it

    return RateLimiter(limits)


def read_labels(config: ModelConfig, directory: Path) -> dict[str, tuple[str, ...]]:
    """Return the lines of each output's label file [C09].

    Raises InternalError when a file cannot be read.
    """
    labels: dict[str, tuple[str, ...]] = {}
    for output in config.output:
        if not output.label_filename:
            continue
        setting = f"label_filename of output '{output.name}'"
        content = read_data(directory, output.label_filename, setting, _LABELS_LIMIT)
        try:
            labels[output.name] = tuple(content.decode("utf-8").splitlines())
        except UnicodeDecodeError as error:
            reason = f"{error.reason} at byte {error.start}"
            raise ConfigError(f"{setting} '{output.label_filename}' is not UTF-8: {reason}") from error
    return labels


def _initial_states(config: ModelConfig, folder: ModelFolder) -> Mapping[str, Array]:
    if not config.sequence_batching.state:
        return {}

    return initial_states(config, folder.path)


def _adopt_labels(config: ModelConfig, folder: ModelFolder) -> None:
    """Use ``labels.txt`` for the only output of a model if that output names no label file."""
    if len(config.output) == 1 and not config.output[0].label_filename and (folder.path / "labels.txt").is_file():
        config.output[0].label_filename = "labels.txt"


def _clear_delays(config: ModelConfig) -> None:
    """Set the batching delays to 0, so that the configuration shows what the batchers do."""
    if config.HasField("dynamic_batching"):
        config.dynamic_batching.max_queue_delay_microseconds = 0
    strategy = config.sequence_batching.WhichOneof("strategy_choice") if config.HasField("sequence_batching") else None
    if strategy is not None:
        getattr(config.sequence_batching, strategy).max_queue_delay_microseconds = 0


def _is_bare(folder: ModelFolder) -> bool:
    return any(path.is_file() for path in folder.versions.values())


def _first_bounds_ms(config: ModelConfig) -> tuple[float, ...]:
    """Return a model's histogram bounds for first responses, or the default [C19, P05]."""
    for control in config.model_metrics.metric_control:
        if control.metric_identifier.family == FIRST_RESPONSES:
            return tuple(sorted(set(control.histogram_options.buckets)))
    return FIRST_RESPONSE_BOUNDS_MS


LIMIT_BYTES = 1 << 30
"""Maximum size of one initial state in memory."""

_REFERENCE_BYTES = 8  # minimum size of a BYTES element


def initial_states(config: ModelConfig, directory: Path) -> Mapping[str, Array]:
    """Return the initial state of a sequence, by the name of the model's input.

    The default is zeros, or empty text, with 1 for variable dims. Files are in ``directory``/initial_state and contain
    raw values, or length-prefixed elements of BYTES. The arrays have a batch dimension of 1 if the model batches, and
    are read-only.

    Raises:
        ConfigError: a file that is too short, with Triton's text; an array beyond LIMIT_BYTES.
        InternalError: a file that cannot be read.
    """
    policy = sequence_policy(config)
    if policy is None:
        return {}
    if len(policy.states) < len(config.sequence_batching.state):
        _log.warning(
            "model '%s' names an input or output in two of its states: the first state of each name counts", config.name
        )
    written = {(row.input_name, row.output_name): row for row in reversed(config.sequence_batching.state)}
    batch = (1,) if config.max_batch_size > 0 else ()
    found: dict[str, Array] = {}
    for state in policy.states:
        initial = written[state.input_name, state.output_name].initial_state
        array = _array(state, initial[0] if initial else None, directory / "initial_state")
        array = array.reshape(batch + array.shape)
        array.flags.writeable = False
        found[state.input_name] = array
    return found


def _array(state: SequenceState, initial: ModelSequenceBatching.InitialState | None, folder: Path) -> Array:
    shape = tuple(abs(dim) for dim in state.dims) if initial is None else tuple(initial.dims)
    dtype, count = DTYPES[state.datatype], math.prod(shape)
    if count * max(dtype.itemsize, _REFERENCE_BYTES if dtype.hasobject else 1) > LIMIT_BYTES:
        raise ConfigError(
            f"the initial state '{state.input_name}' has {count} elements of {state.datatype}: it may take at most "
            f"{LIMIT_BYTES} bytes"
        )
    if initial is None or initial.WhichOneof("state_data") == "zero_data":
        return np.full(shape, b"", object) if dtype.hasobject else np.zeros(shape, dtype)
    content = read_data(folder, initial.data_file, "initial_state data_file", LIMIT_BYTES)
    if dtype.hasobject:
        return _elements(content, count, initial.data_file).reshape(shape)
    wanted = count * dtype.itemsize
    if len(content) < wanted:
        # The missing blank is Triton's.
        raise ConfigError(
            f"initial_state setting expects {wanted} bytes, but the data provided from {initial.data_file}only has "
            f"{len(content)} bytes."
        )
    return np.frombuffer(content, dtype, count).reshape(shape)


def _elements(content: bytes, count: int, name: str) -> Array:
    """Parse the elements of a BYTES state in wire format [B02]."""
    elements: list[bytes] = []
    at = 0
    while at < len(content) and len(elements) <= count:
        begin = at + 4
        at = begin + int.from_bytes(content[at:begin], "little")
        elements.append(content[begin:at])
    if len(elements) != count or at != len(content):
        raise ConfigError(
            f"initial_state data_file '{name}' must hold {count} BYTES elements, each with its length in four bytes "
            "before it"
        )
    array = np.empty(count, object)
    array[:] = elements
    return array
