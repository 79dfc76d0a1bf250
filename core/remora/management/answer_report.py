"""Report on the answers of a language model, which the plug-in of its engine makes."""

from __future__ import annotations

from dataclasses import dataclass


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
