"""Expected time of a first token, and refusal of requests that would get it too late.

Pure: the figures of an engine come in as `EngineStats`.
"""

from __future__ import annotations

from remora.errors import QueueFullError
from remora_llm.generation.tasks import EngineStats


def expected_first_token_ns(stats: EngineStats) -> float:
    """Return the time until a task that begins now gets its first token; 0 if unknown.

    Answers have the mean number of tokens of those that ended, and a step its mean duration. The rows that run now
    become free one after another, evenly over the duration of an answer.
    """
    ended = sum(stats.ended.values())
    if not stats.steps or not ended:
        return 0.0
    step_ns = stats.step_ns / stats.steps
    if not stats.waiting:
        return step_ns
    turns = (stats.waiting + 1) / max(stats.running, 1)
    return step_ns * (1 + turns * stats.generated_tokens / ended)


def refuse_if_late(stats: EngineStats, timeout_ns: int) -> None:
    """Raise QueueFullError if the first token is expected after ``timeout_ns``.

    An answer that begins in time is not refused, because at its deadline it ends with what there is.
    """
    expected_ns = expected_first_token_ns(stats)
    if expected_ns > timeout_ns:
        times = f"in {expected_ns / 1e6:.0f} ms, after the deadline of {timeout_ns / 1e6:.0f} ms"
        late_s = round((expected_ns - timeout_ns) / 1e9)
        raise QueueFullError(f"the first token is expected {times}", retry_after_s=max(late_s, 1))
