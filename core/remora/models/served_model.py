"""One loaded version of a model with its scheduler, instances and statistics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remora.backends import BackendModel, Instance, capabilities_of
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
    """The models of an ensemble: their look-up, and the names of the decoupled ones."""

    models: StepModels
    decoupled: frozenset[str]


class ServedModel:
    """A loaded model version. `submit` queues a request. The ticket's reply gets the response exactly once.

    Args:
        name: the name that clients use.
        version: its number.
        config: complete and valid.
        backend_model: closed last, by `close`.
        instances: at least one, except for an ensemble.
        labels: the lines of each output's label file.
        steps: the models of an ensemble.
        cache: shared by all models; used if the configuration enables it.
        hold: number of queued requests before which a dynamic batcher dispatches nothing [D16].
        fingerprint: digest of the model's files, for a cache shared with other servers.
        refuse_late: refuse requests on arrival that are predicted to miss their deadline.
        turns: one per instance, under a rate limiter [I08]; released by `close`.
        backlog_hold: with ``hold``, number of requests waiting for a slot before which a direct sequence batcher
            dispatches nothing [S15].
        initial_states: initial values of the sequence states [S13].
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
        """The version that this one replaced, while sequences that began there are open [V03]."""
        self.metric_labels: tuple[tuple[str, str], ...] = ()
        """Additional metric labels, where a host has several engines."""
        self.places: tuple[Placement, ...] = ()
        """The placement of each instance."""
        self.kinds: tuple[str, ...] = ANY_KIND
        """The kinds that KIND_AUTO expands to."""
        self._backend_model = backend_model
        self._instances = instances
        self._labels = labels
        self._now = clock.monotonic_ns
        self._cache = cache
        self._turns = turns
        self.initial_states = initial_states
        self._refuse_late = refuse_late
        self._backlog_hold = backlog_hold
        self._users = 0
        self._closing = False
        self._released = threading.Condition()
        self.caches = cache is not None and config.response_cache.enable and not self.decoupled
        """True if responses may come from the response cache."""
        self.devices = self._devices_of(instances)
        """The devices on which the model accepts and returns tensors: those that all of its instances support.

        Empty if anything other than the instances reads its tensors.
        """
        scheduler = self._make_scheduler(batch_policy(config), instances, clock, steps, hold)
        self._inner = scheduler
        fixed = self.decoupled or turns or refuse_late  # the number of instances cannot change
        self._pool = scheduler if isinstance(scheduler, Scheduler) and not fixed else None
        self.scheduler: ModelScheduler = scheduler
        if cache is not None and self.caches:
            self.scheduler = self._cached(scheduler, cache, clock, fingerprint)

    def _devices_of(self, instances: Sequence[Instance]) -> frozenset[DeviceId]:
        if not instances or self.decoupled or self.caches or self.config.HasField("sequence_batching"):
            return frozenset()
        taken = [capabilities_of(instance).devices for instance in instances]
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
            from remora.scheduling.admission import AdmittingQueue  # imported here because few servers enable it

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
        """Validate a request and queue it.

        Args:
            form: names, shapes and parameters of the request.
            data: its inputs.
            reply: gets each response; never called if this raises.
            mailbox: collects responses of one caller; see ``Ticket``.
            context: the caller's; see ``Ticket``.
            held: instances that stay busy until the request is answered.
            timeout_ns: time after which the request is not started any more; 0 for none.
            stays: see ``Request``.
            trace: follows the request.

        Raises:
            InvalidArgumentError: the request does not match the signature [H18-H22].
            UnavailableError: the queue is full.
            RetiredError: the version is closing and another one serves.
            InternalError: the request would wait for itself.
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
            self._refuse_deadlock(held)
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

    def run_uncached(self, form: InferForm, data: Sequence[Data], reply: Reply) -> Ticket:
        """Run a request without the response cache, also before the model serves. Raises RemoraError as `submit`."""
        ticket = Ticket(self.signature.request(form, data), reply)
        self._inner.submit(ticket)
        return ticket

    def _refuse_deadlock(self, held: frozenset[object]) -> None:
        """Raise InternalError for a call that only instances waiting for it could answer [L04]."""
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
        """Return the lines of an output's label file. An ensemble's outputs use those of their source [C09]."""
        if output in self._labels or self.steps is None:
            return self._labels.get(output, ())
        from remora.scheduling.ensembles import scheduler as ensemble_ends

        return ensemble_ends.labels_of(self.config, self.steps.models, output)

    def unreadable(self, error: UnreadableError) -> RemoraError:
        """Count an undecodable request and return its error, in an ensemble with the text of the step's model."""
        self.statistics.record_unreadable()
        if self.steps is None:
            return error
        from remora.scheduling.ensembles import scheduler as ensemble_ends

        return ensemble_ends.unreadable(self.config, self.steps.models, error)

    @property
    def instances(self) -> Sequence[Instance]:
        """The current instances, empty for an ensemble."""
        return self._instances

    @property
    def instance_count(self) -> int:
        """The number of batches that can run concurrently."""
        return len(self._instances)

    @property
    def takes_turns(self) -> bool:
        """True if the instances share resources under the rate limiter."""
        return any(turn.seat.policy.resources for turn in self._turns)

    @property
    def trouble(self) -> str:
        """Why all instances are unhealthy, empty if at least one can serve."""
        troubles = [capabilities_of(instance).trouble for instance in self._instances]
        return troubles[0] if troubles and all(troubles) else ""

    @property
    def fatal(self) -> str:
        """Why an instance needs a restart of the process, empty if none does."""
        fatal = (each for instance in self._instances if (each := capabilities_of(instance)).fatal)
        return next((reason for each in fatal if (reason := each.trouble)), "")

    @property
    def in_flight(self) -> int:
        """The number of queued and running requests and open sequences [V03]."""
        return self.scheduler.pending + self.scheduler.running + self.open_sequences

    @property
    def open_sequences(self) -> int:
        """The number of sequences that have begun and not ended."""
        count: int = getattr(self._inner, "open_sequences", 0)  # only sequence schedulers have this attribute
        return count

    @property
    def is_needed(self) -> bool:
        """True while sequences are open here or in a predecessor."""
        return self.open_sequences > 0 or self.predecessor is not None

    def keeps(self, form: InferForm) -> bool:
        """Return True if a request continues a sequence that began here."""
        if not form.sequence_id or form.sequence_start:
            return False
        older = self.predecessor
        keeps: Callable[[int | str], bool] | None = getattr(self._inner, "keeps", None)
        return (keeps is not None and keeps(form.sequence_id)) or (older is not None and older.keeps(form))

    @property
    def adjustable(self) -> bool:
        """True if the instances can change while the model serves."""
        return self._pool is not None

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
        assert self._pool is not None  # the policy checks `adjustable` first
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
        """Return the state of the sequence batcher. Raises InvalidArgumentError without sequence batching."""
        report: Callable[[], SequenceReport] | None = getattr(self.scheduler, "report", None)
        if report is None:
            raise InvalidArgumentError(
                f"model '{self.name}' keeps no sequences: its configuration has no sequence_batching"
            )
        return report()

    def stats(self) -> ModelStats:
        """Return a consistent snapshot of the statistics, without single responses for Python models [T03]."""
        return self.statistics.snapshot(self.name, self.version_text, responses=self.config.backend != "python")

    def metadata(self, versions: Sequence[str]) -> ModelInfo:
        """Return the model's metadata [H07]."""
        return ModelInfo(self.name, tuple(versions), self.platform, self.signature.inputs, self.signature.outputs)

    def borrow(self) -> bool:
        """Keep the model open until `give_back`. Return False if it is closing already."""
        with self._released:
            self._users += not self._closing
            return not self._closing

    def give_back(self) -> None:
        """Release one `borrow`."""
        with self._released:
            self._users -= 1
            if not self._users:
                self._released.notify_all()

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait until the model is released, finish requests in flight and close everything.

        Returns False if something was still in use after ``timeout_s``.
        """
        if self._cache is not None:
            self._cache.models_changed()
        begin_ns = self._now()
        with self._released:
            self._closing = True
            released = self._released.wait_for(lambda: not self._users, timeout_s)
        if timeout_s is not None:
            timeout_s = max(timeout_s - (self._now() - begin_ns) / 1e9, 0.0)
        done = self.scheduler.stop(timeout_s) and released
        self.scheduler.abandon(UnavailableError(f"model '{self.name}' was unloaded before this request could run"))
        for turn in self._turns:
            turn.leave()
        if done:
            for instance in self._instances:
                instance.close()
            self._backend_model.close()
        return done
