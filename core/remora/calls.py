"""Control-plane requests and their results: everything that a client can ask besides inference, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from remora.system.logs import LogSetting
from remora.tracing.settings import TraceSetting

_NOTHING: Mapping[str, str | bytes] = {}


class ServerLive(NamedTuple):
    """Is the process answering at all? -> bool"""


class ServerReady(NamedTuple):
    """May traffic be sent here [V01]? -> bool"""


class ModelReady(NamedTuple):
    """Is this version ready [H05]? ``version`` -1 means the highest ready one. -> bool"""

    model: str
    version: int = -1


class ServerMetadata(NamedTuple):
    """-> ServerInfo"""


class ModelMetadata(NamedTuple):
    """-> ModelInfo"""

    model: str
    version: int = -1


class ModelConfig(NamedTuple):
    """-> the model's full configuration, a ``remora.proto`` ModelConfig message"""

    model: str
    version: int = -1


class ModelStatistics(NamedTuple):
    """-> list[ModelStats]; an empty model name asks for all models, version -1 for all of its versions"""

    model: str = ""
    version: int = -1


class ModelSequences(NamedTuple):
    """Which sequences does this version keep together, what did it refuse? -> SequenceReport (``sequence_report``)"""

    model: str
    version: int = -1


class ModelExplain(NamedTuple):
    """Why were batches as they were, and what would change it? -> explaining.Explanation"""

    model: str
    version: int = -1


class Startup(NamedTuple):
    """Where did the time of this start go? -> StartupReport (``startup``)"""


class RepositoryIndex(NamedTuple):
    """-> list[IndexEntry]"""

    ready: bool = False
    repository: str = ""


class ModelLoad(NamedTuple):
    """Load or reload a model; may take long. ``parameters``: "config" -> JSON text, "file:<path>" -> bytes. -> None"""

    model: str
    parameters: Mapping[str, str | bytes] = _NOTHING


class ModelUnload(NamedTuple):
    """-> None, as soon as the wish is noted [M12]"""

    model: str
    unload_dependents: bool = False


class Metrics(NamedTuple):
    """-> str, Prometheus text"""


Call = (
    ServerLive
    | ServerReady
    | ModelReady
    | ServerMetadata
    | ModelMetadata
    | ModelConfig
    | ModelStatistics
    | ModelSequences
    | ModelExplain
    | Startup
    | RepositoryIndex
    | ModelLoad
    | ModelUnload
    | LogSetting
    | TraceSetting
    | Metrics
)


class ServerInfo(NamedTuple):
    """Name, version and extensions of this server [H06]."""

    name: str
    version: str
    extensions: tuple[str, ...]


class TensorInfo(NamedTuple):
    """A model's input or output as clients must send it; -1 for what varies, the batch dimension first."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelInfo(NamedTuple):
    """Metadata of a model [H07]; ``versions`` are the ready ones, ascending."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


class IndexEntry(NamedTuple):
    """A line of the repository index [M08]; version, state and reason are empty where there are none."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(slots=True, unsafe_hash=True)
class Duration:
    """How often, and how long in all."""

    count: int = 0
    ns: int = 0


class BatchStats(NamedTuple):
    """What executions of one batch size cost [T01]."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ResponseStats(NamedTuple):
    """What the answers of one index, over all requests to a decoupled model, came to [T03]."""

    compute_infer: Duration
    compute_output: Duration
    success: Duration
    fail: Duration
    empty_response: Duration
    cancel: Duration


_NO_RESPONSES: Mapping[str, ResponseStats] = {}


class ModelStats(NamedTuple):
    """A snapshot of one model version's statistics [T01-T03].

    ``last_inference_ms`` is wall time, 0 for never. ``responses`` has the answers of a decoupled model by their index
    as text; none of a Python model, as Triton reports none for those.
    """

    name: str
    version: str
    last_inference_ms: int
    inference_count: int
    execution_count: int
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration
    batches: tuple[BatchStats, ...]
    responses: Mapping[str, ResponseStats] = _NO_RESPONSES


class LiveSequence(NamedTuple):
    """A sequence that lives: ``state`` is "active", or "backlog" while it waits for a slot.

    ``instance`` and ``slot`` are empty and -1 in the backlog. ``waiting`` are its requests that have not run yet,
    without the one that is ``running``. ``idle_ns`` is for how long it has had nothing to do.
    """

    id: int | str
    state: str
    instance: str
    slot: int
    running: bool
    waiting: int
    idle_ns: int


class PastSequence(NamedTuple):
    """A sequence that ended ``ago_ns`` ago: "done", "idle", "cancelled", "timeout" or "stopped"."""

    id: int | str
    instance: str
    slot: int
    why: str
    ago_ns: int


class RefusedRequest(NamedTuple):
    """A request that broke a rule of sequences: what it was told, and what explains that."""

    id: int | str
    request_id: str
    error: str
    explanation: str
    ago_ns: int


class SequenceReport(NamedTuple):
    """The sequences of one model version [S01-S06].

    ``slots`` are those of all instances; ``active`` and ``backlog`` count sequences. ``live`` are the first of them, in
    the order in which they began; ``ended`` and ``refused`` the last of their kind, the last one first.
    """

    strategy: str
    slots: int
    active: int
    backlog: int
    idle_limit_ns: int
    live: tuple[LiveSequence, ...]
    ended: tuple[PastSequence, ...]
    refused: tuple[RefusedRequest, ...]
