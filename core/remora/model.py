"""One version of one model, ready to serve: its configuration, its checks, its scheduler and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from remora.backends import BackendModel, Instance
from remora.classification import classify
from remora.config import BatchPolicy, batch_policy
from remora.errors import UnavailableError, UnsupportedError
from remora.messages import Data, InferForm, Mailbox, ModelInfo, Outcome, Response, Ticket
from remora.proto.model_config_pb2 import ModelConfig
from remora.scheduling.batching import BatchQueue
from remora.scheduling.scheduler import Scheduler
from remora.signature import Signature
from remora.statistics import ModelStatistics, StatisticsRecorder
from remora.system.clock import Clock

Reply = Callable[[Ticket, Outcome], None]


class ServedModel:
    """Requests go in by `submit`; the answer comes through the ticket's reply, exactly once.

    Args:
        name: what clients call it.
        version: its number.
        config: complete and valid.
        backend_model: closed last, by `close`.
        instances: at least one.
        labels: the lines of each output's label file.
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
    ) -> None:
        self.name = name
        self.version = version
        self.version_text = str(version)
        self.config = config
        self.decoupled = config.model_transaction_policy.decoupled
        self.platform = config.platform or config.backend
        self.signature = Signature(config, name)
        self.statistics = statistics or ModelStatistics()
        self.load_ns = 0
        self._unsupported = (
            f"model '{name}' uses sequence_batching, which is not offered yet"
            if config.HasField("sequence_batching")
            else ""
        )
        self._backend_model = backend_model
        self._instances = instances
        self._labels = labels
        policy = batch_policy(config)
        self.scheduler = self._make_scheduler(policy, instances, clock)

    def _make_scheduler(self, policy: BatchPolicy, instances: Sequence[Instance], clock: Clock) -> Scheduler:
        recorder = StatisticsRecorder(self.statistics, clock)
        may_wait = policy.dynamic and policy.max_delay_ns > 0
        return Scheduler(
            BatchQueue(policy),
            instances,
            self.signature,
            recorder,
            clock,
            may_wait=may_wait,
            decoupled=self.decoupled,
        )

    def submit(
        self,
        form: InferForm,
        data: Sequence[Data],
        reply: Reply,
        *,
        mailbox: Mailbox | None = None,
        context: object = None,
    ) -> Ticket:
        """Check a request and queue it.

        Raises InvalidArgumentError when it does not fit (spec H18-H22) and UnavailableError when the queue is full or
        the model stops; then ``reply`` is never called.
        """
        if self._unsupported:
            raise UnsupportedError(self._unsupported)
        request = self.signature.request(form, data)
        if form.outputs and any(output.classes for output in form.outputs):
            reply = self._classifying(reply)
        ticket = Ticket(request, reply, mailbox, context)
        try:
            self.scheduler.submit(ticket)
        except UnavailableError:
            self.statistics.record_rejection()
            raise
        return ticket

    def _classifying(self, reply: Reply) -> Reply:
        def reply_classified(ticket: Ticket, outcome: Outcome) -> None:
            if isinstance(outcome, Response):
                batches = self.signature.max_batch_size > 0
                outcome = classify(outcome, ticket.request.form.outputs, self._labels, batches=batches)
            reply(ticket, outcome)

        return reply_classified

    def metadata(self, versions: Sequence[str]) -> ModelInfo:
        """What clients may know (spec H07)."""
        return ModelInfo(self.name, tuple(versions), self.platform, self.signature.inputs, self.signature.outputs)

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what is under way, then give everything back. False when something still ran after ``timeout_s``."""
        done = self.scheduler.stop(timeout_s)
        self.scheduler.abandon(UnavailableError(f"model '{self.name}' was unloaded before this request could run"))
        if done:
            for instance in self._instances:
                instance.close()
            self._backend_model.close()
        return done
