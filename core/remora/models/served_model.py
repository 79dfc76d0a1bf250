"""One loaded version of a model with its scheduler, instances and statistics."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from remora.backends import BackendModel, Instance, capabilities_of
from remora.calls import ModelInfo, ModelStats, SequenceReport
from remora.config import ANY_KIND, Placement
from remora.errors import InternalError, InvalidArgumentError, RemoraError, RetiredError, UnavailableError
from remora.messages import Data, InferForm, Mailbox, Reply, RequestTrace, Ticket
from remora.models.version import Effect, Event, State, step
from remora.proto.model_config_pb2 import ModelConfig
from remora.scheduling.assembly import CacheUse, SchedulingOptions, Steps, add_cache, make_scheduler
from remora.scheduling.scheduler import RequestScheduler, Scheduler
from remora.signature import Signature, UnreadableError
from remora.statistics import ModelStatistics
from remora.statistics.recorder import FailureLog, StatisticsRecorder
from remora.system.clock import Clock
from remora.tensors.classification import classify_replies
from remora.tensors.device import DeviceId

if TYPE_CHECKING:
    from remora.cache import ResponseCache


_log = logging.getLogger("remora.models")

_NOWHERE = Path()
_CLOSING, _CLOSED = State.CLOSING, State.CLOSED  # because every request that acquires a model compares with them


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """What a loaded model version consists of.

    Attributes:
        name: the name that clients use.
        version: its number.
        config: complete and valid.
        backend_model: closed last, by `ServedModel.close`.
        instances: at least one, except for an ensemble.
        places: the placement of each instance.
        folder: the model's folder, with its labels and packages.
        files: the version's folder, or the model file itself.
        kinds: the kinds that KIND_AUTO expands to.
        batching: the choice of batching that the configuration left open and its reason, "" if it left none.
        clock: the engine's.
        labels: the lines of each output's label file.
        statistics: counts the model's requests.
        steps: the models of an ensemble.
        cache: shared by all models; used if the configuration enables it.
        fingerprint: digest of the model's files, for a cache shared with other servers.
        scheduling: settings of the scheduler; `ServedModel.close` releases the turns in it.
    """

    name: str
    version: int
    config: ModelConfig
    backend_model: BackendModel
    instances: Sequence[Instance]
    clock: Clock
    places: Sequence[Placement] = ()
    folder: Path = _NOWHERE
    files: Path = _NOWHERE
    kinds: tuple[str, ...] = ANY_KIND
    batching: str = ""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    steps: Steps | None = None
    cache: ResponseCache | None = None
    fingerprint: bytes = b""
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)


class Submitted(NamedTuple):
    """Tickets of requests submitted together, and the index and the error of each that a queue refuses."""

    tickets: list[Ticket]
    refused: list[tuple[int, RemoraError]]


class LoadRecord(NamedTuple):
    """Duration of a load, the time of its end, and the size of the version's files."""

    duration_ns: int = 0
    ended_ms: int = 0
    file_bytes: int = 0


class ServedModel:
    """A loaded model version.

    `submit` queues a request. The ticket's reply gets the response exactly once.
    """

    is_routed = False
    """True for the model of a release, which chooses the version (`remora.models.rollout`)."""

    def __init__(self, parts: ModelParts) -> None:
        config = parts.config
        self._parts = parts
        self.name = parts.name
        self.version = parts.version
        self.version_text = str(parts.version)
        self.config = config
        self.decoupled = config.model_transaction_policy.decoupled
        self.is_plain = not self.decoupled
        """True if requests need no care before they are submitted: the model is neither decoupled nor routed."""
        self.signature = Signature(config, parts.name)
        self.statistics = parts.statistics
        self.load_record = LoadRecord()
        self.predecessor: ServedModel | None = None
        """The version that this one replaced, while sequences that began there are open [V03]."""
        self.metric_labels: tuple[tuple[str, str], ...] = ()
        """Additional metric labels, where a host has several engines."""
        self._now = parts.clock.monotonic_ns
        self._state = State.OPENED
        self._users = 0
        self._released = threading.Condition()
        recorder = StatisticsRecorder(self.statistics, parts.clock, FailureLog(self.name, parts.clock))
        inner = make_scheduler(
            config, parts.instances, self.signature, recorder, parts.clock, parts.scheduling, parts.steps
        )
        self._inner = inner
        self.scheduler: RequestScheduler = inner
        if parts.cache is not None and config.response_cache.enable and not self.decoupled:
            scope = parts.cache.scope(self.name, self.version, parts.fingerprint)
            use = CacheUse(parts.cache, scope, composed=parts.steps is not None)
            self.scheduler = add_cache(inner, use, StatisticsRecorder(self.statistics, parts.clock), parts.clock)
        self._plain = inner if self.scheduler is inner and isinstance(inner, Scheduler) else None
        self.devices = self._devices_of(parts.instances)
        """The devices on which the model accepts and returns tensors: those that all of its instances support.

        Empty if anything other than the instances reads its tensors.
        """

    def _devices_of(self, instances: Sequence[Instance]) -> frozenset[DeviceId]:
        if not instances or self.decoupled or self.caches or self.config.HasField("sequence_batching"):
            return frozenset()
        taken = [capabilities_of(instance).devices for instance in instances]
        return taken[0].intersection(*taken[1:])

    def submit(
        self,
        form: InferForm,
        data: Sequence[Data],
        reply: Reply,
        *,
        mailbox: Mailbox | None = None,
        context: object = None,
        blocking_instances: frozenset[object] = frozenset(),
        timeout_ns: int = 0,
        keep_on_device: bool = False,
        trace: RequestTrace | None = None,
        caller: str = "",
    ) -> Ticket:
        """Validate a request and queue it.

        Args:
            form: names, shapes and parameters of the request.
            data: its inputs.
            reply: gets each response; never called if this raises.
            mailbox: collects responses of one caller; see ``Ticket``.
            context: the caller's; see ``Ticket``.
            blocking_instances: instances that stay busy until the request is answered.
            timeout_ns: time after which the request is not started any more; 0 for none.
            keep_on_device: see ``Request``.
            trace: follows the request.
            caller: see ``Request``.

        Raises:
            InvalidArgumentError: the request does not match the signature [H18-H22].
            UnavailableError: the queue is full.
            RetiredError: the version is closing and another one serves.
            InternalError: the request would wait for itself.
        """
        older = self.predecessor
        if older is not None and older.keeps(form):
            return older.submit(
                form,
                data,
                reply,
                mailbox=mailbox,
                context=context,
                blocking_instances=blocking_instances,
                timeout_ns=timeout_ns,
                trace=trace,
                caller=caller,
            )
        try:
            request = self.signature.request(form, data)
        except UnreadableError as error:
            raise self.unreadable(error) from None
        request.keep_on_device = keep_on_device
        request.caller = caller
        if trace is not None:
            request.trace = trace
            trace.record_inputs(request)
        if blocking_instances:
            self._refuse_deadlock(blocking_instances)
            request.blocking_instances = blocking_instances
        if form.outputs and any(output.classes for output in form.outputs):
            reply = classify_replies(reply, self.labels_of, batches=self.signature.max_batch_size > 0)
        ticket = Ticket(request, reply, mailbox, context)
        if timeout_ns:
            ticket.arrival_ns = self._now()
            ticket.deadline_ns = ticket.arrival_ns + timeout_ns
        try:
            self.scheduler.submit(ticket)
        except UnavailableError as error:
            if self._state in (_CLOSING, _CLOSED):
                raise RetiredError(error.message) from error
            self.statistics.record_rejection()
            raise
        return ticket

    def split(self, form: InferForm, data: Sequence[Data]) -> list[Data]:
        """Return the data with the elements of BYTES split. Any thread may call it.

        Raises what `submit` raises for the data.
        """
        try:
            return self.signature.split(form, data)
        except UnreadableError as error:
            raise self.unreadable(error) from None

    def submit_all(
        self,
        form: InferForm,
        columns: Sequence[memoryview],
        reply: Reply,
        mailbox: Mailbox | None,
        contexts: Sequence[object],
    ) -> Submitted:
        """Validate and queue requests of one form in one step. Only if `queues_together`.

        Args:
            form: without a sequence; see `submit`.
            columns: of each input the bytes of all requests, one after the other; none of BYTES.
            reply, mailbox: as for `submit`.
            contexts: one for each request.

        Raises what `submit` raises for all of them.
        """
        assert self._plain is not None
        try:
            requests = self.signature.requests(form, columns, len(contexts))
        except UnreadableError as error:
            raise self.unreadable(error) from None
        if form.outputs and any(output.classes for output in form.outputs):
            reply = classify_replies(reply, self.labels_of, batches=self.signature.max_batch_size > 0)
        tickets = [Ticket(request, reply, mailbox, own) for request, own in zip(requests, contexts, strict=True)]
        try:
            refused = self._plain.submit_all(tickets)
        except UnavailableError as error:
            if self._state in (_CLOSING, _CLOSED):
                raise RetiredError(error.message) from error
            raise
        for _ in refused:
            self.statistics.record_rejection()
        return Submitted(tickets, refused)

    def run_uncached(self, form: InferForm, data: Sequence[Data], reply: Reply) -> Ticket:
        """Run a request without the response cache, also before the model serves.

        Raises RemoraError as `submit`.
        """
        ticket = Ticket(self.signature.request(form, data), reply)
        self._inner.submit(ticket)
        return ticket

    def _refuse_deadlock(self, blocking_instances: frozenset[object]) -> None:
        """Raise InternalError for a call that only instances waiting for it could answer [L04]."""
        instances = self._parts.instances
        if instances and blocking_instances.issuperset(instances):
            count = len(instances)
            raise InternalError(
                f"model '{self.name}' would wait for itself: its {count} instance{'s are' if count > 1 else ' is'} "
                "busy with the very request that this call was made for. Let models call each other without a circle, "
                "or give the model more instances (instance_group count) than calls can lie inside each other"
            )

    def labels_of(self, output: str) -> Sequence[str]:
        """Return the lines of an output's label file.

        An ensemble's outputs use those of their source [C09].
        """
        labels = self._parts.labels
        if output in labels or self.steps is None:
            return labels.get(output, ())
        from remora.scheduling.ensembles import scheduler as ensemble_ends

        return ensemble_ends.labels_of(self.config, self.steps.models, output)

    def unreadable(self, error: UnreadableError) -> RemoraError:
        """Count an undecodable request and return its error.

        In an ensemble the error has the text of the step's model.
        """
        self.statistics.record_unreadable()
        if self.steps is None:
            return error
        from remora.scheduling.ensembles import scheduler as ensemble_ends

        return ensemble_ends.unreadable(self.config, self.steps.models, error)

    @property
    def queues_together(self) -> bool:
        """True if `submit_all` may be called: the model has no sequences, steps or response cache."""
        return self._plain is not None

    @property
    def platform(self) -> str:
        """The platform of the configuration, or the backend without one."""
        return self.config.platform or self.config.backend

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self._parts.folder

    @property
    def files(self) -> Path:
        """The version's folder, or the model file itself."""
        return self._parts.files

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that KIND_AUTO expands to."""
        return self._parts.kinds

    @property
    def batching(self) -> str:
        """The choice of batching that the configuration left open, with its reason, or ""."""
        return self._parts.batching

    @property
    def initial_states(self) -> Mapping[str, Any]:
        """The first states of sequences."""
        return self._parts.scheduling.initial_states

    @property
    def steps(self) -> Steps | None:
        """The models of an ensemble, None for any other model."""
        return self._parts.steps

    @property
    def caches(self) -> bool:
        """True if responses may come from the response cache."""
        return self.scheduler is not self._inner

    @property
    def places(self) -> Sequence[Placement]:
        """The placement of each instance."""
        return self._parts.places

    @property
    def instances(self) -> Sequence[Instance]:
        """The current instances, empty for an ensemble."""
        return self._parts.instances

    @property
    def generation(self) -> Any:
        """Generative side of a language model, None for other models.

        Its backend and the routes for language models know its type.

        Use it between `acquire` and `release`, so that the model stays open.
        """
        return getattr(self._parts.backend_model, "generation", None)

    @property
    def instance_count(self) -> int:
        """The number of batches that can run concurrently."""
        return len(self.instances)

    @property
    def takes_turns(self) -> bool:
        """True if the instances share resources under the rate limiter."""
        return any(turn.seat.policy.resources for turn in self._parts.scheduling.turns)

    @property
    def trouble(self) -> str:
        """Why all instances are unhealthy, empty if at least one can serve."""
        troubles = [capabilities_of(instance).trouble for instance in self.instances]
        return troubles[0] if troubles and all(troubles) else ""

    @property
    def decides_readiness(self) -> bool:
        """True if the model itself decides whether it is ready, and `says_ready` may therefore wait."""
        return any(capabilities_of(instance).ask_ready is not None for instance in self.instances)

    def says_ready(self) -> bool:
        """Return False if the model decides whether it is ready, and an instance is not."""
        asks = [ask for instance in self.instances if (ask := capabilities_of(instance).ask_ready) is not None]
        if not asks:
            return True
        from remora.backends.model_readiness import are_ready  # imported here, because few models decide

        return are_ready(self.name, asks)

    @property
    def fatal(self) -> str:
        """Why an instance needs a restart of the process, empty if none does."""
        fatal = (each for instance in self.instances if (each := capabilities_of(instance)).fatal)
        return next((reason for each in fatal if (reason := each.trouble)), "")

    @property
    def in_flight(self) -> int:
        """The number of queued and running requests and open sequences [V03]."""
        return self.scheduler.pending + self.scheduler.running + self.open_sequences

    @property
    def open_sequences(self) -> int:
        """The number of sequences that have begun and not ended."""
        return self._inner.open_sequences

    @property
    def is_needed(self) -> bool:
        """True while sequences are open here or in a predecessor."""
        return self.open_sequences > 0 or self.predecessor is not None

    def keeps(self, form: InferForm) -> bool:
        """Return True if a request continues a sequence that began here."""
        if not form.sequence_id or form.sequence_start:
            return False
        older = self.predecessor
        return self._inner.keeps_sequence(form.sequence_id) or (older is not None and older.keeps(form))

    @property
    def adjustable(self) -> bool:
        """True if the instances can change while the model serves."""
        scheduling = self._parts.scheduling
        fixed = self.decoupled or scheduling.turns or scheduling.refuse_late
        return isinstance(self._inner, Scheduler) and not fixed

    def adjust(
        self,
        config: ModelConfig,
        places: Sequence[Placement],
        warm: Callable[[ServedModel, Sequence[Instance]], None],
    ) -> None:
        """Serve with instances at these places from now on, keeping existing ones [M13].

        Args:
            config: as before except for its instance groups.
            places: at least one.
            warm: warms up new instances before they serve.

        Raises whatever creating or warming up an instance raises; then nothing has changed.
        """
        assert isinstance(self._inner, Scheduler)  # because the policy checks `adjustable` first
        backend_model = self._parts.backend_model
        spare = list(zip(self.places, self.instances, strict=True))
        instances: list[Instance] = []
        fresh: list[Instance] = []
        try:
            for place in places:
                match = next((pair for pair in spare if pair[0][1:] == place[1:]), None)
                if match is not None:
                    spare.remove(match)
                    instances.append(match[1])
                else:
                    fresh.append(backend_model.instance(config, place))
                    instances.append(fresh[-1])
            warm(self, fresh)
        except BaseException:
            for instance in fresh:
                close_part(instance, self.name)
            raise
        self._parts = replace(self._parts, instances=instances, places=tuple(places), config=config)
        self.config, self.devices = config, self._devices_of(instances)
        self._inner.set_instances(instances)
        for _, instance in spare:
            close_part(instance, self.name)

    def sequences(self) -> SequenceReport:
        """Return the state of the sequence batcher.

        Raises InvalidArgumentError without sequence batching.
        """
        report = self._inner.report()
        if report is None:
            raise InvalidArgumentError(
                f"model '{self.name}' keeps no sequences: its configuration has no sequence_batching"
            )
        return report

    def stats(self) -> ModelStats:
        """Return a consistent snapshot of the statistics.

        It leaves out single responses for Python models [T03].
        """
        return self.statistics.snapshot(self.name, self.version_text, responses=self.config.backend != "python")

    def metadata(self, versions: Sequence[str]) -> ModelInfo:
        """Return the model's metadata [H07]."""
        return ModelInfo(self.name, tuple(versions), self.platform, self.signature.inputs, self.signature.outputs)

    @property
    def state(self) -> State:
        """State of this version (see `remora.models.version`)."""
        return self._state

    def send(self, event: Event) -> Effect | None:
        """Record an event in the life of this version and return what the caller must do.

        Any thread may call it.
        """
        with self._released:
            self._state, effect = step(self._state, event)
        return effect

    def acquire(self) -> bool:
        """Keep the model open until `release`. Return False if it is closing already."""
        with self._released:
            state = self._state
            if state is _CLOSING or state is _CLOSED:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """Release one `acquire`."""
        with self._released:
            self._users -= 1
            if not self._users:
                self._released.notify_all()

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait until the model is released, finish requests in flight and close everything.

        Returns False if something was still in use after ``timeout_s``.
        """
        begin_ns = self._now()
        self.send(Event.RETIRE)
        if self.send(Event.DRAINED) is not Effect.CLOSE:
            return True  # it is closed already
        with self._released:
            released = self._released.wait_for(lambda: not self._users, timeout_s)
        if timeout_s is not None:
            timeout_s = max(timeout_s - (self._now() - begin_ns) / 1e9, 0.0)
        done = self.scheduler.stop(timeout_s) and released
        self.scheduler.fail_pending(UnavailableError(f"model '{self.name}' was unloaded before this request could run"))
        for turn in self._parts.scheduling.turns:
            turn.leave()
        if done:
            for instance in self.instances:
                close_part(instance, self.name)
            close_part(self._parts.backend_model, self.name)
            self.send(Event.CLOSED)
        return done


def close_part(part: BackendModel | Instance, name: str) -> None:
    """Close an instance or the backend's model of the model ``name``.

    Logs an error and does not raise it, so that the other parts are closed too and an earlier error is not hidden.
    """
    try:
        part.close()
    except Exception:
        _log.exception("model '%s': an error occurred while it was being closed", name)
