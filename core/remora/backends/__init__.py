"""Protocols ``Backend``, ``BackendModel`` and ``Instance`` that every framework implements.

A ``Backend`` opens one version of one model and returns a ``BackendModel``, which completes the model's configuration
and creates ``Instance`` objects. An instance runs a batch. The engine owns threads, queues, batching and statistics; a
backend owns only the objects of its framework.

Invariant: this module imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from remora.config import Placement
from remora.errors import InternalError
from remora.messages import Outcome, Request, Streamed, Watcher
from remora.proto.model_config_pb2 import ModelConfig

if TYPE_CHECKING:
    from concurrent.futures import Future

    from remora.backends.calling import ModelCaller


API_VERSION = "1.7"
"""Version of these protocols. The first number changes if existing backends must be changed, the second if an optional
feature is added. A backend whose ``api_version`` has another first number is refused."""

_NONE: Mapping[str, str] = {}
_NO_INDICES: frozenset[int] = frozenset()


class Source(NamedTuple):
    """One version of one model on disk, with the operator's settings for it.

    ``path`` is the version's directory, or the file itself for a bare ``model.onnx``. ``model_dir`` is the model's
    directory (labels, warmup files). ``settings`` are this backend's ``--backend-config`` pairs. ``cpus`` is the number
    of processors that all instances of the model may use together (cgroup quota and affinity, not the machine's count).
    ``calls`` returns the engine for models that call other models; None if such calls are not available. ``gpus`` is
    the number of GPUs that models may use, None if it is unknown (since 1.7).
    """

    name: str
    version: int
    model_dir: Path
    path: Path
    repository: Path
    settings: Mapping[str, str] = _NONE
    cpus: int = 1
    calls: Callable[[], ModelCaller] | None = None
    gpus: int | None = None


class Execution:
    """One run of one instance with its requests and the end times of its phases.

    An instance that measures its phases sets ``input_end_ns`` when the inputs are assembled and ``output_start_ns``
    when the model is done; phases left at 0 count as compute time [T01].

    ``send(index, streamed)`` answers the request at ``index``. Instances of decoupled models call it from any thread,
    during ``execute`` or after it, until they have sent a final answer; later answers are dropped. For an answer that
    is not final, ``send`` may block until the client has read some of the earlier answers.

    An instance of a model with iterative sequences puts the indices of the requests that need another turn into
    ``rescheduled`` [S14], named ``again`` before 1.5. It returns None for those requests, and a later execution answers
    them.

    An instance with the capability ``answers_late`` may answer after ``execute`` has returned although its model is not
    decoupled: it puts the indices of such requests into ``late``, returns None for them, and sends one final answer for
    each. Its executions always have a ``send`` (since 1.3).

    ``send_soon(index, streamed)`` sends from another thread and takes no lock, so that destructors may call it.

    ``copied`` is True if the result of ``execute`` is copied before the instance is used again: the result may then be
    memory that the model overwrites (since 1.2).
    """

    __slots__ = ("copied", "input_end_ns", "late", "output_start_ns", "requests", "rescheduled", "send", "send_soon")

    def __init__(
        self,
        requests: Sequence[Request],
        send: Callable[[int, Streamed], None] | None = None,
        send_soon: Callable[[int, Streamed], None] | None = None,
        *,
        copied: bool = False,
    ) -> None:
        self.requests = requests
        self.copied = copied
        self.rescheduled: frozenset[int] = _NO_INDICES
        self.late: frozenset[int] = _NO_INDICES
        self.input_end_ns = 0
        self.output_start_ns = 0
        self.send = send or _nowhere
        self.send_soon = send_soon or self.send

    def part(self, start: int, end: int) -> Execution:
        """Return an execution of some of the requests, whose answers go to the same receivers."""
        return Execution(
            self.requests[start:end],
            lambda index, streamed: self.send(start + index, streamed),
            lambda index, streamed: self.send_soon(start + index, streamed),
            copied=self.copied,
        )

    def add_part(self, start: int, part: Execution) -> None:
        """Add the results of a ``part`` that has run."""
        self.rescheduled |= {start + index for index in part.rescheduled}
        self.late |= {start + index for index in part.late}
        self.input_end_ns = self.input_end_ns or part.input_end_ns
        self.output_start_ns = max(self.output_start_ns, part.output_start_ns)

    @property
    def again(self) -> frozenset[int]:
        """Name of ``rescheduled`` before 1.5, for backends written for it."""
        return self.rescheduled

    @again.setter
    def again(self, indices: frozenset[int]) -> None:
        self.rescheduled = indices


def _nowhere(index: int, streamed: Streamed) -> None:
    raise InternalError("this execution accepts no answers other than those that execute returns")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Optional abilities of an instance (since 1.4).

    Attributes:
        devices: DLPack's (device type, id) of the devices on which the instance accepts inputs as `DeviceArray`s. If
            all requests of a batch have ``keep_on_device`` (``stays`` before 1.5), its outputs may be such arrays. The
            instance returns an array only after its device has finished writing it, and has read its inputs when it
            returns.
        remote: the instance is a `RemoteInstance`.
        ahead: one batch may be begun while another still runs: it is queued behind the running batch, and its end is
            reported later. Only for remote instances.
        answers_late: the instance may answer after ``execute`` has returned; see `Execution`.
        unhealthy_reason: returns why the instance cannot run now, "" if it can; None if it can always run.
        ask_ready: asks the model itself whether it is ready; the future gets its answer or its error. Calls while one
            is in flight share its future. None if the model does not decide (since 1.6).
        fatal: only a restart of the process makes an unhealthy instance healthy; the server then fails its readiness
            and liveness probes.
        runs_user_code: ``execute`` may have effects besides its answers, so that ``--derived-warmup`` leaves it out. A
            ``quick`` instance runs no user code, whatever this is (since 1.7).
    """

    devices: frozenset[tuple[int, int]] = frozenset()
    remote: bool = False
    ahead: bool = False
    answers_late: bool = False
    unhealthy_reason: Callable[[], str] | None = None
    ask_ready: Callable[[], Future[bool]] | None = None
    fatal: bool = False
    runs_user_code: bool = True

    @property
    def trouble(self) -> str:
        """Reason why the instance cannot run now, empty if it can."""
        return "" if self.unhealthy_reason is None else self.unhealthy_reason()


class Instance(Protocol):
    """One place where a model can run.

    Only one thread uses an instance at a time, not always the same one. ``quick`` is True if ``execute`` runs no user
    code and never waits, so that the event loop may run short batches itself.

    An instance may have an attribute ``capabilities``, a `Capabilities` (since 1.4). Without it, the attributes
    ``devices``, ``remote``, ``ahead``, ``answers_late``, ``trouble`` (a text) and ``fatal`` of API 1.3 are read.
    """

    name: str
    quick: bool

    def execute(self, execution: Execution) -> Sequence[Outcome | None]:
        """Run the batch and return one outcome per request, in order.

        Outputs are in the model's own shape. An instance returns None for the requests that it answers through
        ``execution.send``.

        An exception raised here fails every request of the batch; a RemoraError keeps its code and text. An error
        *returned* for a request fails that request alone; mark it ``answered`` if the model itself returned it [T02].
        """

    def close(self) -> None:
        """Release all resources. Called once, while nothing runs."""


def capabilities_of(instance: Instance) -> Capabilities:
    """Return the capabilities of an instance, from its attributes if it was written for API 1.3."""
    declared: Capabilities | None = getattr(instance, "capabilities", None)
    if declared is not None:
        return declared
    return Capabilities(
        devices=getattr(instance, "devices", frozenset()),
        remote=getattr(instance, "remote", False),
        ahead=getattr(instance, "ahead", False),
        answers_late=getattr(instance, "answers_late", False),
        unhealthy_reason=(lambda: str(getattr(instance, "trouble", ""))) if hasattr(instance, "trouble") else None,
        fatal=getattr(instance, "fatal", False),
    )


def runs_user_code(instance: Instance) -> bool:
    """Return True if ``execute`` of an instance may run code of the model's author."""
    return not instance.quick and capabilities_of(instance).runs_user_code


Done = Callable[[Sequence[Outcome | None] | Exception], None]
"""Receives what ``execute`` would have returned or raised, or a NotBegunError."""


class NotBegunError(Exception):
    """Error for a batch whose instance ended before the batch started."""


class RemoteInstance(Instance, Protocol):
    """Instance in another process whose batches an event loop runs without a waiting thread.

    Its capabilities have ``remote``; see also ``ahead`` there (since 1.2).
    """

    def begin(self, execution: Execution, watcher: Watcher, done: Done) -> bool:
        """Start the batch and return True, or return False if ``execute`` must be used instead.

        After True, ``done`` is called once when the batch has ended, in any thread, and must not raise. Called in the
        loop of ``watcher``, and only while no batch runs (but see ``ahead``). After False, nothing has begun.
        """


class BackendModel(Protocol):
    """One opened version of one model.

    It may have ``preferred_kinds``; see `Backend`. It may have ``batching``, the `BatchingChoice` of ``complete``
    for a model whose configuration leaves it open (since 1.6). The model of a language model may have ``generation``, a
    `remora_llm.generation.Generation`, by which front ends run tasks without tensors (since 1.5).
    """

    def complete(self, config: ModelConfig) -> None:
        """Fill in what ``config`` omits [C13, C14].

        This includes max_batch_size, inputs, outputs and policies. Raises ConfigError if the configuration contradicts
        the model.
        """

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Create an instance for a configuration that is complete and valid."""

    def close(self) -> None:
        """Release the model. Called once, after all instances are closed."""


class Backend(Protocol):
    """A framework.

    The backend or its models (the model takes precedence) may have ``preferred_kinds``: the kinds of devices that
    KIND_AUTO stands for, the preferred kind first, as a tuple of ``"GPU"``, ``"CPU"`` and ``"MODEL"``. The first kind
    that the machine has is used; without the attribute, GPUs come before the CPU (since 1.3).
    """

    name: str

    def open(self, source: Source, config: ModelConfig) -> BackendModel:
        """Open the model.

        ``config`` may be incomplete. Raises RemoraError (or any other exception) if the model cannot be opened.
        """


__all__ = [
    "API_VERSION",
    "Backend",
    "BackendModel",
    "Capabilities",
    "Done",
    "Execution",
    "Instance",
    "NotBegunError",
    "Placement",
    "RemoteInstance",
    "Source",
    "capabilities_of",
]
