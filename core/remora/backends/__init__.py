"""What a backend is: three small protocols between the engine and a framework; the law: no framework is imported here.

A ``Backend`` opens one version of one model and gives a ``BackendModel``. That can complete a configuration that says
too little, and makes ``Instance``s. An instance runs a batch. The engine owns threads, queues, batching and statistics;
a backend owns nothing but its framework's objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from remora.config import Placement
from remora.errors import InternalError
from remora.messages import Outcome, Request, Streamed, Watcher
from remora.proto.model_config_pb2 import ModelConfig

if TYPE_CHECKING:
    from remora.backends.calling import ModelCaller


API_VERSION = "1.3"
"""The version of these protocols. The first number changes when a backend must be changed, the second when something is
added that a backend may use. A backend that sets ``api_version`` is refused where the first number differs."""

_NONE: Mapping[str, str] = {}
_NO_INDICES: frozenset[int] = frozenset()


class Source(NamedTuple):
    """One version of one model on disk, and what the operator said about it.

    ``path`` is the version's directory, or the file itself for a bare ``model.onnx``. ``model_dir`` is the model's
    directory (labels, warmup files). ``settings`` are this backend's ``--backend-config`` pairs. ``cpus`` is how many
    processors all instances of the model may use together (cgroup quota and affinity, not the machine's). ``calls``
    gives the engine to those whose models call other models; None where there is none.
    """

    name: str
    version: int
    model_dir: Path
    path: Path
    repository: Path
    settings: Mapping[str, str] = _NONE
    cpus: int = 1
    calls: Callable[[], ModelCaller] | None = None


class Execution:
    """One run of one instance: the requests that run together, and when its phases ended.

    An instance that can tell sets ``input_end_ns`` when the inputs are assembled and ``output_start_ns`` when the
    model is done; what is left at 0 counts as compute time [T01].

    ``send(index, streamed)`` answers the request at ``index``: how instances of decoupled models answer, from any
    thread, during ``execute`` or after it, until they have sent a final one. What comes after that is dropped. It may
    hold up the caller of an answer that is not final, until the client has read some of those before.

    An instance of a model with iterative sequences puts into ``again`` the indices of the requests that want one more
    turn [S14]; it gives None for those, and their answers come from a later execution.

    An instance with a true ``answers_late`` may answer after ``execute`` has returned though its model is not
    decoupled: it puts the indices of such requests into ``late``, gives None for them, and sends each one final answer.
    Its executions always have a ``send`` (since 1.3).

    ``send_soon(index, streamed)`` does the same from another thread and takes no lock: the one that destructors call.

    ``copied`` says that what ``execute`` returns is copied before the instance is used again: it may be memory that the
    model writes into then (since 1.2).
    """

    __slots__ = ("again", "copied", "input_end_ns", "late", "output_start_ns", "requests", "send", "send_soon")

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
        self.again: frozenset[int] = _NO_INDICES
        self.late: frozenset[int] = _NO_INDICES
        self.input_end_ns = 0
        self.output_start_ns = 0
        self.send = send or _nowhere
        self.send_soon = send_soon or self.send


def _nowhere(index: int, streamed: Streamed) -> None:
    raise InternalError("this execution takes no answers besides those that it returns")


class Instance(Protocol):
    """One place a model can run. Only one thread uses an instance at a time, not always the same one.

    ``quick`` says that ``execute`` runs no user code and waits for nothing, so that the event loop may run it itself
    when the batch is short.

    An instance may have ``devices``, a set of DLPack's (device type, id): inputs then may come as `DeviceArray`s on one
    of these, and where all requests of a batch have ``stays`` its outputs may be such arrays (since 1.1). It hands out
    none that its device still works on, and has read its inputs when it returns.

    An instance may have ``trouble``: why it cannot run anything now, empty when it can. With ``fatal`` as well, which
    is True, only a restart of the process ends that trouble, and the server is then neither ready nor live (since 1.3).
    """

    name: str
    quick: bool

    def execute(self, execution: Execution) -> Sequence[Outcome | None]:
        """Run the batch; one outcome for each request, in order. Outputs are in the model's own shape.

        An instance gives None for the requests that it answers through ``execution.send``.

        An exception raised here fails every request of the batch; a RemoraError keeps its code and text. An error
        *returned* for a request fails that one alone; mark it ``answered`` when the model itself gave it [T02].
        """

    def close(self) -> None:
        """Give everything back. Called once, when nothing runs."""


Done = Callable[[Sequence[Outcome | None] | Exception], None]
"""Takes what ``execute`` would have returned or raised, or a NotBegunError."""


class NotBegunError(Exception):
    """The instance ended before a batch had its turn: nothing of it has run."""


class RemoteInstance(Instance, Protocol):
    """An instance that runs elsewhere, so that an event loop can have a batch run without a thread that waits.

    ``remote`` is True: what tells it from others. If it has an ``ahead`` that is True as well, one batch may be begun
    while another that was begun still runs: it runs behind that one, and its end is told later (since 1.2).
    """

    @property
    def remote(self) -> bool: ...
    def begin(self, execution: Execution, watcher: Watcher, done: Done) -> bool:
        """Start the batch and return; ``done`` is called once when it has ended, in any thread, and must not raise.

        Called in the loop of ``watcher``, and only while no batch runs, but see ``ahead``. False when ``execute`` must
        be used for this batch; nothing has begun then.
        """

    @property
    def trouble(self) -> str:
        """Why it cannot run anything now; empty when it can."""


class BackendModel(Protocol):
    """One version of one model, opened. It may have ``preferred_kinds``; see `Backend`."""

    def complete(self, config: ModelConfig) -> None:
        """Fill in what ``config`` leaves out: max_batch_size, inputs, outputs, policies [C13, C14].

        Raises ConfigError when the configuration contradicts the model.
        """

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """A new instance, for a configuration that is complete and valid."""

    def close(self) -> None:
        """Called once, after all instances are closed."""


class Backend(Protocol):
    """A framework.

    It or its models, which come first, may have ``preferred_kinds``: the kinds of devices that KIND_AUTO stands for,
    the preferred one first, as a tuple of ``"GPU"``, ``"CPU"`` and ``"MODEL"``. The first kind that the machine has
    counts; without the attribute GPUs come before the CPU (since 1.3).
    """

    name: str

    def open(self, source: Source, config: ModelConfig) -> BackendModel:
        """Open the model. ``config`` may be incomplete. Raises RemoraError (or anything) when it cannot be opened."""


__all__ = [
    "API_VERSION",
    "Backend",
    "BackendModel",
    "Done",
    "Execution",
    "Instance",
    "NotBegunError",
    "Placement",
    "RemoteInstance",
    "Source",
]
