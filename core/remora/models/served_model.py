"""One version of one model, ready to serve: its configuration, its checks, its scheduler and its numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remora.backends import BackendModel, Instance
from remora.calls import ModelInfo, ModelStats, SequenceReport
from remora.config import ANY_KIND, BatchPolicy, Placement, batch_policy, sequence_policy
from remora.errors import InternalError, InvalidArgumentError, RemoraError, RetiredError, UnavailableError
from remora.messages import Array, Data, InferForm, Mailbox, Outcome, RequestTrace, Response, Streamed, Ticket
from remora.proto.model_config_pb2 import ModelConfig
from remora.scheduling.batching import BatchQueue, Queue
from remora.scheduling.costs import CostModel
from remora.scheduling.scheduler import Scheduler
from remora.signature import Signature, UnreadableError
from remora.statistics import FailureLog, ModelStatistics, StatisticsRecorder
from remora.system.clock import Clock
from remora.tensors.classification import classify
from remora.tensors.device import DeviceId

if TYPE_CHECKING:
    from remora.cache import ResponseCache
    from remora.scheduling.ensembles.request import StepModels
    from remora.scheduling.ensembles.scheduler import EnsembleScheduler
    from remora.scheduling.rate_limiter import Turn
    from remora.scheduling.response_cache import InnerScheduler as ModelScheduler
    from remora.scheduling.sequences.scheduler import SequenceScheduler

Reply = Callable[[Ticket, Outcome], None]
_NO_STATES: Mapping[str, Array] = {}


class Steps(NamedTuple):
    """What an ensemble is composed of: where its models are borrowed from, and which of them are decoupled."""

    models: StepModels
    decoupled: frozenset[str]


class ServedModel:
    """Requests go in by `submit`; the answer comes through the ticket's reply, exactly once.

    Args:
        name: what clients call it.
        version: its number.
        config: complete and valid.
        backend_model: closed last, by `close`.
        instances: at least one, but for an ensemble.
        labels: the lines of each output's label file.
        steps: what an ensemble is composed of.
        cache: shared by all models; used when the configuration turns it on.
        hold: a dynamic batcher sends nothing before that many requests wait [D16].
        fingerprint: of the model's files, for a cache that other servers share.
        refuse_late: refuse requests on arrival that would be answered after their deadline.
        turns: one for each instance, where there is a rate limiter [I08]; given up by `close`.
        backlog_hold: with ``hold``, a direct sequence batcher also sends nothing before that many requests wait for a
            slot [S15].
        initial_states: what the states of a sequence are when it begins [S13].
    """

    def __init__(
        self,
        name: str,
        version: int,
        config: ModelConfig,
        backend_model: BackendModel,
        instances: Sequence[Instance],
        labels: Mapping[str, Sequence[str]],
        clock: Clock,
        statistics: ModelStatistics | None = None,
        steps: Steps | None = None,
        cache: ResponseCache | None = None,
        hold: int = 0,
        turns: Sequence[Turn] = (),
        initial_states: Mapping[str, Array] = _NO_STATES,
        *,
        refuse_late: bool = False,
        fingerprint: bytes = b"",
        backlog_hold: int = 0,
    ) -> None:
        self.name = name
        self.version = version
        self.version_text = str(version)
        self.config = config
        self.decoupled = config.model_transaction_policy.decoupled
        self.platform = config.platform or config.backend
        self.signature = Signature(config, name)
        self.statistics = statistics or ModelStatistics()
        self.steps = steps
        self.load_ns = 0
        self.loaded_ms = 0
        self.file_bytes = 0
        self.predecessor: ServedModel | None = None
        """What this one replaced, as long as sequences that began there go on [V03]."""
        self.metric_labels: tuple[tuple[str, str], ...] = ()
        """Labels of its metrics besides name and version, where a host has several engines."""
        self.places: tuple[Placement, ...] = ()
        """Where each of the instances lives."""
        self.kinds: tuple[str, ...] = ANY_KIND
        """What KIND_AUTO stands for."""
        self._backend_model = backend_model
        self._instances = instances
        self._labels = labels
        self._now = clock.monotonic_ns
        self._cache = cache
        self._turns = turns
        self.initial_states = initial_states
        self._refuse_late = refuse_late
        self._backlog_hold = backlog_hold
        self._loans = 0
        self._closing = False
        self._returned = threading.Condition()
        self.caches = cache is not None and config.response_cache.enable and not self.decoupled
        """Whether answers come out of the response cache."""
        self.devices = self._devices_of(instances)
        """Where tensors of other models may lie when they come, and its own when they go: on the devices that all of
        its instances take. None where anything besides the instances reads its tensors."""
        scheduler = self._make_scheduler(batch_policy(config), instances, clock, steps, hold)
        self._inner = scheduler
        fixed = self.decoupled or turns or refuse_late  # in the number of its instances
        self._pool = scheduler if isinstance(scheduler, Scheduler) and not fixed else None
        self.scheduler: ModelScheduler = scheduler
        if cache is not None and self.caches:
            self.scheduler = self._cached(scheduler, cache, clock, fingerprint)

    def _devices_of(self, instances: Sequence[Instance]) -> frozenset[DeviceId]:
        if not instances or self.decoupled or self.caches or self.config.HasField("sequence_batching"):
            return frozenset()
        taken: list[frozenset[DeviceId]] = [getattr(instance, "devices", frozenset()) for instance in instances]
        return taken[0].intersection(*taken[1:])

    def _cached(self, inner: ModelScheduler, cache: ResponseCache, clock: Clock, fingerprint: bytes) -> ModelScheduler:
        from remora.scheduling.response_cache import CachedScheduler

        recorder = StatisticsRecorder(self.statistics, clock)
        scope = cache.scope(self.name, self.version, fingerprint)
        caching = CachedScheduler(inner, cache, scope, recorder, clock, composed=self.steps is not None)
        if not cache.remote:
            return caching
        from remora.scheduling.response_cache import OffLoopScheduler

        return OffLoopScheduler(caching, cache.run, recorder, clock)

    def _make_scheduler(
        self, policy: BatchPolicy, instances: Sequence[Instance], clock: Clock, steps: Steps | None, hold: int
    ) -> Scheduler | EnsembleScheduler | SequenceScheduler:
        recorder = StatisticsRecorder(self.statistics, clock, FailureLog(self.name, clock))
        if steps is not None:
            from remora.scheduling.ensembles.scheduler import EnsembleScheduler

            return EnsembleScheduler(self.config, steps.decoupled, steps.models, self.signature, recorder, clock)
        sequences = sequence_policy(self.config)
        if sequences is not None:
            from remora.scheduling.sequences.scheduler import SequenceScheduler

            return SequenceScheduler(
                sequences,
                instances,
                self.signature,
                recorder,
                clock,
                initial_states=self.initial_states,
                decoupled=self.decoupled,
                hold=hold,
                backlog_hold=self._backlog_hold,
                turns=self._turns,
            )
        may_wait = policy.dynamic and (policy.max_delay_ns > 0 or hold > 0)
        queue: Queue = BatchQueue(policy, hold=hold)
        costs = CostModel()
        if self._refuse_late:
            from remora.scheduling.admission import AdmittingQueue  # only where it is asked for

            queue = AdmittingQueue(queue, policy, costs, len(instances))
        return Scheduler(
            queue,
            instances,
            self.signature,
            recorder,
            clock,
            may_wait=may_wait,
            decoupled=self.decoupled,
            ordered=policy.preserve_ordering and not self.decoupled,
            turns=self._turns,
            costs=costs,
        )

    def submit(
        self,
        form: InferForm,
        data: Sequence[Data],
        reply: Reply,
        *,
        mailbox: Mailbox | None = None,
        context: object = None,
        held: frozenset[object] = frozenset(),
        timeout_ns: int = 0,
        stays: bool = False,
        trace: RequestTrace | None = None,
    ) -> Ticket:
        """Check a request and queue it. ``held`` are instances that stay busy until it is answered; after
        ``timeout_ns``, 0 for none, it is not begun any more. ``stays``: see ``Request``. ``trace`` follows it.

        Raises InvalidArgumentError when it does not fit [H18-H22], UnavailableError when the queue is full,
        RetiredError when something else serves by now, and InternalError when it could only wait for itself; then
        ``reply`` is never called.
        """
        older = self.predecessor
        if older is not None and older.keeps(form):
            return older.submit(
                form, data, reply, mailbox=mailbox, context=context, held=held, timeout_ns=timeout_ns, trace=trace
            )
        try:
            request = self.signature.request(form, data)
        except UnreadableError as error:
            raise self.unreadable(error) from None
        request.stays = stays
        if trace is not None:
            request.trace = trace
            trace.taken(request)
        if held:
            self._refuse_circle(held)
            request.held = held
        if form.outputs and any(output.classes for output in form.outputs):
            reply = self._classifying(reply)
        ticket = Ticket(request, reply, mailbox, context)
        if timeout_ns:
            ticket.arrival_ns = self._now()
            ticket.deadline_ns = ticket.arrival_ns + timeout_ns
        try:
            self.scheduler.submit(ticket)
        except UnavailableError as error:
            if self._closing:
                raise RetiredError(error.message) from error
            self.statistics.record_rejection()
            raise
        return ticket

    def try_out(self, form: InferForm, data: Sequence[Data], reply: Reply) -> Ticket:
        """Run a request past the response cache, whether the model serves or not. Raises RemoraError as `submit`."""
        ticket = Ticket(self.signature.request(form, data), reply)
        self._inner.submit(ticket)
        return ticket

    def _refuse_circle(self, held: frozenset[object]) -> None:
        """A call that only those could answer who wait for it would never end [L04]."""
        if self._instances and held.issuperset(self._instances):
            count = len(self._instances)
            raise InternalError(
                f"model '{self.name}' would wait for itself: its {count} instance{'s are' if count > 1 else ' is'} "
                "busy with the very request that this call was made for. Let models call each other without a circle, "
                "or give the model more instances (instance_group count) than calls can lie inside each other"
            )

    def _classifying(self, reply: Reply) -> Reply:
        def reply_classified(ticket: Ticket, outcome: Outcome) -> None:
            if isinstance(outcome, Streamed):
                if isinstance(outcome.outcome, Response):
                    outcome = Streamed(self._classified(ticket, outcome.outcome), outcome.final)
            elif isinstance(outcome, Response):
                outcome = self._classified(ticket, outcome)
            reply(ticket, outcome)

        return reply_classified

    def _classified(self, ticket: Ticket, response: Response) -> Response | RemoraError:
        wanted = ticket.request.form.outputs
        labels = {output.name: self.labels_of(output.name) for output in wanted if output.classes}
        return classify(response, wanted, labels, batches=self.signature.max_batch_size > 0)

    def labels_of(self, output: str) -> Sequence[str]:
        """The lines of an output's label file; an ensemble's outputs have those of where they come from [C09]."""
        if output in self._labels or self.steps is None:
            return self._labels.get(output, ())
        from remora.scheduling.ensembles import scheduler as ensemble_ends

        return ensemble_ends.labels_of(self.config, self.steps.models, output)

    def unreadable(self, error: UnreadableError) -> RemoraError:
        """Count a request that nobody can read, and say so in the words of the model that is to: an ensemble's step."""
        self.statistics.record_unreadable()
        if self.steps is None:
            return error
        from remora.scheduling.ensembles import scheduler as ensemble_ends

        return ensemble_ends.unreadable(self.config, self.steps.models, error)

    @property
    def instances(self) -> Sequence[Instance]:
        """Where it runs now; none for an ensemble."""
        return self._instances

    @property
    def instance_count(self) -> int:
        """How many batches it can run at the same time."""
        return len(self._instances)

    @property
    def takes_turns(self) -> bool:
        """Whether its instances share resources under the rate limiter."""
        return any(turn.seat.policy.resources for turn in self._turns)

    @property
    def trouble(self) -> str:
        """Why none of the instances can serve now, though the model is loaded; empty when one can."""
        troubles = [str(getattr(instance, "trouble", "")) for instance in self._instances]
        return troubles[0] if troubles and all(troubles) else ""

    @property
    def fatal(self) -> str:
        """Why an instance cannot serve before the process is restarted; empty when all can."""
        doomed = (instance for instance in self._instances if getattr(instance, "fatal", False))
        return next((trouble for instance in doomed if (trouble := str(getattr(instance, "trouble", "")))), "")

    @property
    def in_flight(self) -> int:
        """Requests that wait or run, and sequences whose next request is yet to come [V03]."""
        return self.scheduler.pending + self.scheduler.running + self.open_sequences

    @property
    def open_sequences(self) -> int:
        """Sequences that have begun and not ended."""
        count: int = getattr(self._inner, "open_sequences", 0)  # the sequence scheduler is imported where there is one
        return count

    @property
    def is_needed(self) -> bool:
        """Whether sequences go on that began here, or find their way back through here."""
        return self.open_sequences > 0 or self.predecessor is not None

    def keeps(self, form: InferForm) -> bool:
        """Whether a request goes on with a sequence that began here."""
        if not form.sequence_id or form.sequence_start:
            return False
        older = self.predecessor
        keeps: Callable[[int | str], bool] | None = getattr(self._inner, "keeps", None)
        return (keeps is not None and keeps(form.sequence_id)) or (older is not None and older.keeps(form))

    @property
    def adjustable(self) -> bool:
        """Whether the instances can be changed while they serve."""
        return self._pool is not None

    def adjust(
        self,
        config: ModelConfig,
        places: Sequence[Placement],
        warm: Callable[[ServedModel, Sequence[Instance]], None],
    ) -> None:
        """Serve with instances at these places from now on; those that are there already stay [M13].

        Args:
            config: as before but for its instance groups.
            places: at least one.
            warm: prepares new instances before they serve.

        Raises whatever making or warming up an instance does; then nothing has changed.
        """
        assert self._pool is not None  # the policy asks `adjustable` first
        spare = list(zip(self.places, self._instances, strict=True))
        instances: list[Instance] = []
        fresh: list[Instance] = []
        try:
            for place in places:
                match = next((pair for pair in spare if pair[0][1:] == place[1:]), None)
                if match is not None:
                    spare.remove(match)
                    instances.append(match[1])
                else:
                    fresh.append(self._backend_model.instance(config, place))
                    instances.append(fresh[-1])
            warm(self, fresh)
        except BaseException:
            for instance in fresh:
                instance.close()
            raise
        self._instances, self.places, self.config = instances, tuple(places), config
        self.devices = self._devices_of(instances)
        self._pool.set_instances(instances)
        for _, instance in spare:
            instance.close()

    def sequences(self) -> SequenceReport:
        """The sequences that its scheduler keeps together. Raises InvalidArgumentError where requests do not belong
        together."""
        report: Callable[[], SequenceReport] | None = getattr(self.scheduler, "report", None)
        if report is None:
            raise InvalidArgumentError(
                f"model '{self.name}' keeps no sequences: its configuration has no sequence_batching"
            )
        return report()

    def stats(self) -> ModelStats:
        """All numbers of one moment. Triton's Python backend reports no single responses [T03]."""
        return self.statistics.snapshot(self.name, self.version_text, responses=self.config.backend != "python")

    def metadata(self, versions: Sequence[str]) -> ModelInfo:
        """What clients may know [H07]."""
        return ModelInfo(self.name, tuple(versions), self.platform, self.signature.inputs, self.signature.outputs)

    def borrow(self) -> bool:
        """Keep the model from being closed until it is given back; False when that has begun already."""
        with self._returned:
            self._loans += not self._closing
            return not self._closing

    def give_back(self) -> None:
        """End one `borrow`."""
        with self._returned:
            self._loans -= 1
            if not self._loans:
                self._returned.notify_all()

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait for its borrowers, finish what is under way, give everything back.

        False when something still ran after ``timeout_s``.
        """
        if self._cache is not None:
            self._cache.models_changed()
        begin_ns = self._now()
        with self._returned:
            self._closing = True
            returned = self._returned.wait_for(lambda: not self._loans, timeout_s)
        if timeout_s is not None:
            timeout_s = max(timeout_s - (self._now() - begin_ns) / 1e9, 0.0)
        done = self.scheduler.stop(timeout_s) and returned
        self.scheduler.abandon(UnavailableError(f"model '{self.name}' was unloaded before this request could run"))
        for turn in self._turns:
            turn.leave()
        if done:
            for instance in self._instances:
                instance.close()
            self._backend_model.close()
        return done
