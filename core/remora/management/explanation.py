"""Result of `remora explain`: the batches of a model, or the answers of a language model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """Explanation of a language model's answers, or of one request's.

    Attributes:
        request: id of the request; empty for the model's last answers.
        answers: number of answers in the report.
        reasons: number of ends by reason.
        whole_ms: mean duration from arrival to end.
        parts_ms: mean of each part of it.
        first_token_ms: median time from arrival to the first token, None without a token.
        between_tokens_ms: median of the answers' mean times between tokens, None without two tokens.
        prompt_tokens, cached_tokens, generated_tokens: sums; the prefix cache saved the second of the first.
        steps: sum of the steps in which the answers took part.
        rows_beside: mean number of other rows in such a step.
        preemptions: sum.
        running, waiting: answers now.
        cache_used: part of the cache that running answers use.
    """

    request: str
    answers: int
    reasons: dict[str, int]
    whole_ms: float
    parts_ms: dict[str, float]
    first_token_ms: float | None
    between_tokens_ms: float | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    steps: int
    rows_beside: float
    preemptions: int
    running: int
    waiting: int
    cache_used: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Recent traffic in microseconds and rates per second.

    ``seconds`` is the length of the measurement.
    """

    requests: int
    batches: int
    seconds: float
    seconds_ago: float
    arrivals_per_s: float
    rows_per_request: float
    mean_wait_us: float
    mean_batch_rows: float
    busy: float
    batch_sizes: dict[str, int]
    reasons: dict[str, int]
    batch_us: dict[str, float]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted effect of a setting.

    ``throughput_per_s`` is the maximum number of requests per second; waits are at the measured rate, None where that
    exceeds a steady throughput. Extrapolated values depend on batches larger than any measured one.
    """

    change: str
    throughput_per_s: float
    mean_wait_us: float | None
    p99_wait_us: float | None
    mean_batch_rows: float
    throughput_extrapolated: bool
    waits_extrapolated: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of `remora explain`.

    ``predicted`` begins with the current settings. If nothing can be predicted, it is empty and ``notes`` has the
    reason. A language model has ``answers`` instead of ``measured`` and ``predicted``.
    """

    model: str
    version: str
    measured: Measured | None
    predicted: tuple[Prediction, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    answers: GenerationReport | None = None

    def document(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)
