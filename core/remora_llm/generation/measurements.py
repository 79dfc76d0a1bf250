"""Times and counts of a language model's answers, for metrics, explanations and traces.

One thread records, the engine's; any thread may read. Histograms have the bounds of vLLM's metrics and finer ones, so
that dashboards made for vLLM work and fast models can be told apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from remora.custom_metrics import MetricKind, MetricSample, Series
from remora_llm.generation.tasks import End, Piece, Sink, Task

RECENT_ANSWERS = 512
"""Number of ended answers kept for explanations."""

_LATENCIES = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_BOUNDS: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
        *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ),
    "inter_token_latency_seconds": (
        *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
        *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    ),
    "e2e_request_latency_seconds": _LATENCIES,
    "request_queue_time_seconds": _LATENCIES,
    "request_prefill_time_seconds": _LATENCIES,
    "request_decode_time_seconds": _LATENCIES,
    "request_inference_time_seconds": _LATENCIES,
}
_MAX_EVENTS = 1024
_SEED_MASK = (1 << 63) - 1
"""OpenTelemetry's integers are signed."""
_TOKEN_HISTOGRAMS = ("request_prompt_tokens", "request_generation_tokens")


class Answered(NamedTuple):
    """Ended answer. It has no text of the request or the answer.

    ``whole_ns`` is the time from the request's arrival to the end, ``front_ns`` its part before the engine got the
    task. ``first_ns`` is the time from arrival to the first token, 0 without one.
    """

    id: str
    choice: int
    end: End
    whole_ns: int
    front_ns: int
    first_ns: int


class Measurements:
    """Histograms of a model's answers since its load, and its last answers.

    Args:
        context: maximum number of tokens of an answer, which ends the histograms of tokens.
    """

    def __init__(self, context: int) -> None:
        tokens = _steps_to(context)
        bounds = {**_BOUNDS, **dict.fromkeys(_TOKEN_HISTOGRAMS, tokens)}
        self._series = {name: Series(MetricKind.HISTOGRAM, each) for name, each in bounds.items()}
        self._first = self._series["time_to_first_token_seconds"].observe
        self._between = self._series["inter_token_latency_seconds"].observe_equal
        self._recent: deque[Answered] = deque(maxlen=RECENT_ANSWERS)
        self.prompt_tokens = 0
        """Number of tokens of the prompts that were read, those that the prefix cache saved included."""

    def record_first(self, task: Task, begin_ns: int, now_ns: int) -> None:
        """Record an answer's first token. ``begin_ns`` is when the engine got the task."""
        self.prompt_tokens += len(task.prompt)
        self._first((now_ns - (task.received_ns or begin_ns)) / 1e9)

    def record_next(self, since_ns: int, tokens: int = 1) -> None:
        """Record further tokens of different answers, each ``since_ns`` after the one before in its answer."""
        self._between(since_ns / 1e9, tokens)

    def record_end(self, task: Task, choice: int, end: End, begin_ns: int, now_ns: int) -> None:
        """Record an answer's end. The histograms have successful answers only, as vLLM's."""
        usage = end.usage
        front_ns = begin_ns - task.received_ns if task.received_ns else 0
        whole_ns = now_ns - begin_ns + front_ns
        first_ns = whole_ns - usage.decode_ns if usage.generated_tokens else 0
        self._recent.append(Answered(task.id, choice, end, whole_ns, front_ns, first_ns))
        if end.reason in ("error", "cancelled"):
            return
        for name, value in (
            ("e2e_request_latency_seconds", whole_ns / 1e9),
            ("request_queue_time_seconds", usage.queue_ns / 1e9),
            ("request_prefill_time_seconds", usage.prefill_ns / 1e9),
            ("request_decode_time_seconds", usage.decode_ns / 1e9),
            ("request_inference_time_seconds", (usage.prefill_ns + usage.decode_ns) / 1e9),
            ("request_prompt_tokens", usage.prompt_tokens),
            ("request_generation_tokens", usage.generated_tokens),
        ):
            self._series[name].observe(value)

    def histograms(self) -> Iterable[tuple[str, tuple[MetricSample, ...]]]:
        """Yield each histogram's name, without a prefix, and its samples, without labels."""
        for name, series in self._series.items():
            yield name, tuple(series.samples(()))

    def recent(self) -> list[Answered]:
        """Return the last answers, oldest first."""
        return list(self._recent)


class AnswerTrace(Protocol):
    """Trace that the tokens of an answer belong to."""

    def record_answer(self, attributes: Mapping[str, Any], events: Sequence[tuple[str, int]], /) -> None:
        """Record what the answer consisted of, and the times of its tokens."""


class TracedSink:
    """Sink that notes the times of one task's tokens for its trace, and passes the pieces on.

    The attributes are those of OpenTelemetry's conventions for generative AI, without texts of request and answer.

    Args:
        sink: destination of the pieces.
        task: the traced task.
        model: name that the client used.
        operation: "chat" or "text_completion".
        trace: gets attributes and events with the task's last piece.
        now_ns: clock of the trace.
    """

    def __init__(
        self, sink: Sink, task: Task, model: str, operation: str, trace: AnswerTrace, now_ns: Callable[[], int]
    ) -> None:
        self._sink = sink
        self._task = task
        self._model = model
        self._operation = operation
        self._trace = trace
        self._now = now_ns
        self._events: list[tuple[str, int]] = []
        self._ends: list[End] = []

    def take(self, pieces: Sequence[Piece]) -> None:
        """Note the time and pass the pieces on."""
        own = [each for each in pieces if each.task is self._task]
        if any(each.tokens for each in own) and len(self._events) < _MAX_EVENTS:
            self._events.append(("TOKEN" if self._events else "FIRST_TOKEN", self._now()))
        self._ends += [each.end for each in own if each.end is not None]
        if len(self._ends) == self._task.choices:
            # before the last piece, because the trace may be complete with the response that it leads to
            self._trace.record_answer(self._attributes(), self._events)
            self._ends = []
        self._sink.take(pieces)

    def _attributes(self) -> dict[str, Any]:
        task, usages = self._task, [each.usage for each in self._ends]
        return {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "remora",
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": task.max_tokens,
            "gen_ai.request.temperature": task.sampling.temperature,
            "gen_ai.request.top_p": task.sampling.top_p,
            "gen_ai.request.top_k": task.sampling.top_k,
            "gen_ai.request.seed": task.sampling.seed & _SEED_MASK,
            "gen_ai.request.choice.count": task.choices,
            "gen_ai.response.finish_reasons": tuple(each.reason for each in self._ends),
            "gen_ai.usage.input_tokens": len(task.prompt),
            "gen_ai.usage.output_tokens": sum(each.generated_tokens for each in usages),
            "gen_ai.usage.cache_read.input_tokens": max(each.cached_tokens for each in usages),
            "gen_ai.latency.time_in_queue": usages[0].queue_ns / 1e9,
            "gen_ai.latency.time_in_model_prefill": usages[0].prefill_ns / 1e9,
            "gen_ai.latency.time_in_model_decode": max(each.decode_ns for each in usages) / 1e9,
        }


def _steps_to(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 ... up to ``most``."""
    found: list[float] = []
    scale = 1
    while True:
        for each in (1, 2, 5):
            if each * scale > most:
                return tuple(found) or (1,)
            found.append(each * scale)
        scale *= 10
