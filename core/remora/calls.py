"""Control-plane requests and their results as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remora.system.logs import LogSetting
from remora.tracing.settings import TraceSetting

_NOTHING: Mapping[str, str | bytes] = {}
_NO_PARAMETERS: Mapping[str, object] = {}


class ServerLive(NamedTuple):
    """Query whether the process responds.

    Result: bool.
    """


class ServerReady(NamedTuple):
    """Query whether the server accepts traffic [V01].

    Result: bool.
    """


class ModelReady(NamedTuple):
    """Query whether a version is ready [H05].

    Result: bool. ``version`` -1 stands for the highest ready version.
    """

    model: str
    version: int = -1


class ServerMetadata(NamedTuple):
    """Query for the server metadata.

    Result: ServerInfo.
    """


class ModelMetadata(NamedTuple):
    """Query for the metadata of a model version.

    Result: ModelInfo.
    """

    model: str
    version: int = -1


class ModelConfig(NamedTuple):
    """Query for the full configuration of a model version.

    Result: a ``remora.proto`` ModelConfig message.
    """

    model: str
    version: int = -1


class ModelStatistics(NamedTuple):
    """Query for model statistics.

    Result: list[ModelStats]. An empty model name stands for all models, version -1 for all versions of a model.
    """

    model: str = ""
    version: int = -1


class ModelSequences(NamedTuple):
    """Query for the live sequences and refused requests of a model version.

    Result: SequenceReport.
    """

    model: str
    version: int = -1


class ModelExplain(NamedTuple):
    """Query for the reasons of batch sizes, and for settings that would change them.

    ``request`` is the id of an answered request of a language model. Result: Explanation.
    """

    model: str
    version: int = -1
    request: str = ""


class Startup(NamedTuple):
    """Query for the durations of this startup's phases and steps.

    Result: StartupReport (``startup``).
    """


class RecentTraces(NamedTuple):
    """Query for the last finished traces.

    Result: list of JSON objects (`remora.tracing.recent`), empty if tracing was never on.
    """


class RepositoryIndex(NamedTuple):
    """Query for the models of the repository.

    Result: list[IndexEntry].
    """

    ready: bool = False
    repository: str = ""


class ModelLoad(NamedTuple):
    """Command to load or reload a model, which may take long.

    Result: None. ``parameters``: "config" -> JSON text, "file:<path>" -> bytes.
    """

    model: str
    parameters: Mapping[str, str | bytes] = _NOTHING

    @property
    def has_content(self) -> bool:
        """True if the command brings a configuration or files, which may choose or be code."""
        return bool(self.parameters)


class ModelUnload(NamedTuple):
    """Command to unload a model.

    Result: None, as soon as the desired state is recorded [M12].
    """

    model: str
    unload_dependents: bool = False


class ModelRelease(NamedTuple):
    """Query for a model's release, or a command that changes it (docs/releases.md).

    An empty ``action`` changes nothing. Result: dict of JSON values.
    """

    model: str
    action: str = ""
    parameters: Mapping[str, object] = _NO_PARAMETERS


class Metrics(NamedTuple):
    """Query for all metrics.

    Result: str, Prometheus text.
    """


class MetricFamilies(NamedTuple):
    """Query for all metrics as data.

    Result: list of MetricFamily, in the order of the page.
    """


class MetricRow(NamedTuple):
    """One number of a metric family.

    ``suffix`` is "", or ``_bucket``, ``_sum`` or ``_count`` in histograms and summaries. A bucket's label ``le`` is its
    upper bound, and its value counts all observations up to there.
    """

    suffix: str
    labels: tuple[tuple[str, str], ...]
    value: float


class MetricFamily(NamedTuple):
    """A metric family with its rows.

    ``kind`` is Prometheus' type: counter, gauge, histogram or summary.
    """

    name: str
    kind: str
    description: str
    rows: Sequence[MetricRow]


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
    | RecentTraces
    | RepositoryIndex
    | ModelLoad
    | ModelUnload
    | ModelRelease
    | LogSetting
    | TraceSetting
    | Metrics
    | MetricFamilies
)


class ServerInfo(NamedTuple):
    """Name, version and extensions of this server [H06]."""

    name: str
    version: str
    extensions: tuple[str, ...]


class TensorInfo(NamedTuple):
    """A model's input or output as clients must send it.

    Variable sizes are -1; the batch dimension is first.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelInfo(NamedTuple):
    """Metadata of a model [H07]. ``versions`` are the ready ones, ascending."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


class IndexEntry(NamedTuple):
    """An entry of the repository index [M08]. Missing values are empty."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(slots=True, unsafe_hash=True)
class Duration:
    """An event count and the total duration."""

    count: int = 0
    ns: int = 0


class BatchStats(NamedTuple):
    """Total durations of the executions of one batch size [T01]."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ResponseStats(NamedTuple):
    """Totals over the responses of one index, for all requests to a decoupled model [T03]."""

    compute_infer: Duration
    compute_output: Duration
    success: Duration
    fail: Duration
    empty_response: Duration
    cancel: Duration


_NO_RESPONSES: Mapping[str, ResponseStats] = {}


class ModelStats(NamedTuple):
    """A snapshot of the statistics of one model version [T01-T03].

    ``last_inference_ms`` is wall time, 0 if there was no inference. ``responses`` maps the index (as text) of a
    decoupled model's responses to their statistics; it is empty for Python models, because Triton reports none for
    those.
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


class ReleaseShare(NamedTuple):
    """Part of a model's requests that a release gives to one version.

    ``weight`` is from 0 to 1. ``answers`` and ``errors`` count since the current step of the release began.
    """

    model: str
    version: int
    alias: str
    weight: float
    answers: int
    errors: int


class LiveSequence(NamedTuple):
    """A live sequence.

    ``state`` is "active", or "backlog" while the sequence waits for a slot; ``instance`` is then "" and ``slot`` -1.
    ``waiting`` counts its queued requests without the one that is ``running``. ``idle_ns`` is the time since it last
    had a request.
    """

    id: int | str
    state: str
    instance: str
    slot: int
    running: bool
    waiting: int
    idle_ns: int


class PastSequence(NamedTuple):
    """A sequence that ended ``ago_ns`` ago.

    ``why`` is "done", "idle", "cancelled", "timeout" or "stopped".
    """

    id: int | str
    instance: str
    slot: int
    why: str
    ago_ns: int


class RefusedRequest(NamedTuple):
    """A request that violated a rule of sequences: the error it got, and an explanation."""

    id: int | str
    request_id: str
    error: str
    explanation: str
    ago_ns: int


class SequenceReport(NamedTuple):
    """The sequences of one model version [S01-S06].

    ``slots`` counts the slots of all instances; ``active`` and ``backlog`` count sequences. ``live`` holds the first
    live sequences in the order in which they began; ``ended`` and ``refused`` hold the latest entries, newest first.
    """

    strategy: str
    slots: int
    active: int
    backlog: int
    idle_limit_ns: int
    live: tuple[LiveSequence, ...]
    ended: tuple[PastSequence, ...]
    refused: tuple[RefusedRequest, ...]
