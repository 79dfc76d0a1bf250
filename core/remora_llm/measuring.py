"""Metrics and explanations of language models, from what their engines measured.

The metrics have vLLM's names and labels, because dashboards, autoscalers and inference gateways read those. Labels are
``model_name`` and ``engine``, which is the model's version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median

from remora.custom_metrics import Family, MetricKind, MetricSample
from remora.errors import NotFoundError
from remora.management.explanation import Explanation, GenerationReport
from remora.models.served_model import ServedModel
from remora_llm.generation import TokenEngine
from remora_llm.generation.measurements import RECENT_ANSWERS, Answered
from remora_llm.generation.tasks import EngineStats

_REASONS = {"stop": ("stop",), "length": ("length", "deadline"), "abort": ("cancelled",), "error": ("error",)}
"""vLLM's values of ``finished_reason`` and the reasons that count as each."""

_GAUGES: tuple[tuple[str, MetricKind, str, Callable[[EngineStats, TokenEngine], float]], ...] = (
    ("num_requests_running", MetricKind.GAUGE, "Answers that have a row of the batch", lambda stats, _: stats.running),
    ("num_requests_waiting", MetricKind.GAUGE, "Answers that wait for a row", lambda stats, _: stats.waiting),
    (
        "kv_cache_usage_perc",
        MetricKind.GAUGE,
        "Part of the key-value cache that running answers use [0.0 - 1.0]",
        lambda stats, _: (stats.cache_tokens - stats.reusable_tokens) / max(stats.cache_capacity, 1),
    ),
    (
        "prefix_cache_queries_total",
        MetricKind.COUNTER,
        "Tokens of prompts that were looked up in the prefix cache",
        lambda stats, _: stats.prefix_queries,
    ),
    (
        "prefix_cache_hits_total",
        MetricKind.COUNTER,
        "Tokens of prompts that the prefix cache saved",
        lambda stats, _: stats.prefix_hits,
    ),
    (
        "num_preemptions_total",
        MetricKind.COUNTER,
        "Answers put back to the queue because memory or rows were short",
        lambda stats, _: stats.preemptions,
    ),
    (
        "prompt_tokens_total",
        MetricKind.COUNTER,
        "Tokens of prompts that were read, those of the prefix cache included",
        lambda _, engine: engine.measurements.prompt_tokens,
    ),
    (
        "generation_tokens_total",
        MetricKind.COUNTER,
        "Tokens of answers that were written",
        lambda stats, _: stats.generated_tokens,
    ),
)
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token",
    "inter_token_latency_seconds": "Between two tokens of an answer",
    "e2e_request_latency_seconds": "From arrival to the end of an answer",
    "request_queue_time_seconds": "Wait for a row",
    "request_prefill_time_seconds": "From the row to the first token",
    "request_decode_time_seconds": "From the first token to the last",
    "request_inference_time_seconds": "From the row to the last token",
    "request_prompt_tokens": "Tokens of the prompt",
    "request_generation_tokens": "Tokens of the answer",
}


_BLOCK_TOKENS = 16
"""Tokens of a block in the metrics, as in vLLM, because endpoint pickers compare prompts block by block."""


def generation_families(models: Sequence[ServedModel]) -> list[Family]:
    """Return the metrics of those models that are language models; no families without any."""
    engines = [
        ({"engine": model.version_text, "model_name": model.name}, side.engine, side.engine.stats())
        for model in models
        if (side := model.generation) is not None
    ]
    if not engines:
        return []
    families = [
        Family(
            f"vllm:{name}",
            text,
            kind,
            tuple(MetricSample("", labels, read(stats, engine)) for labels, engine, stats in engines),
        )
        for name, kind, text, read in _GAUGES
    ]
    ends = tuple(
        MetricSample("", {**labels, "finished_reason": reason}, sum(stats.ended.get(each, 0) for each in counted))
        for labels, _, stats in engines
        for reason, counted in _REASONS.items()
    )
    families.append(Family("vllm:request_success_total", "Ended answers by reason", MetricKind.COUNTER, ends))
    families.append(
        Family(
            "vllm:cache_config_info",
            f"Size of the key-value cache in blocks of {_BLOCK_TOKENS} tokens",
            MetricKind.GAUGE,
            tuple(MetricSample("", {**labels, **_blocks_of(stats.cache_capacity)}, 1) for labels, _, stats in engines),
        )
    )
    adapters = tuple(
        MetricSample("", {**labels, **_adapters_of(stats, engine)}, 1)
        for labels, engine, stats in engines
        if engine.facts.adapters
    )
    if adapters:
        families.append(
            Family(
                "vllm:lora_requests_info", "LoRA adapters of running and waiting answers", MetricKind.GAUGE, adapters
            )
        )
    found: dict[str, list[MetricSample]] = {name: [] for name in _HISTOGRAMS}
    for labels, engine, _ in engines:
        for name, samples in engine.measurements.histograms():
            found[name] += [each._replace(labels={**labels, **each.labels}) for each in samples]
    return families + [
        Family(f"vllm:{name}", text, MetricKind.HISTOGRAM, tuple(found[name])) for name, text in _HISTOGRAMS.items()
    ]


def _blocks_of(tokens: int) -> dict[str, str]:
    """Return the labels of a cache."""
    return {"block_size": str(_BLOCK_TOKENS), "num_gpu_blocks": str(tokens // _BLOCK_TOKENS)}


def _adapters_of(stats: EngineStats, engine: TokenEngine) -> dict[str, str]:
    """Return the labels of a model with LoRA adapters."""
    return {
        "max_lora": str(engine.facts.max_adapters),
        "running_lora_adapters": ",".join(stats.running_adapters),
        "waiting_lora_adapters": ",".join(stats.waiting_adapters),
    }


# -- Explanations -----------------------------------------------------------------------------------------------------

_PARTS: tuple[tuple[str, Callable[[Answered], int]], ...] = (
    ("front end: decoding, template, tokens", lambda each: each.front_ns),
    ("grammar compiled", lambda each: each.end.usage.grammar_ns),
    ("waited for a row", lambda each: each.end.usage.queue_ns - each.end.usage.grammar_ns),
    ("steps that read the prompt", lambda each: each.end.usage.prompt_steps_ns),
    ("steps that wrote the answer", lambda each: each.end.usage.answer_steps_ns),
    ("steps for other requests alone", lambda each: each.end.usage.other_steps_ns),
    ("put back, without a row", lambda each: each.end.usage.put_back_ns),
    ("between steps: sampling, text, delivery", lambda each: each.end.usage.loop_ns),
)
"""Parts of an answer's duration. They are measured apart from each other, so that their sum is a check."""
_LIBRARY_PARTS: tuple[tuple[str, Callable[[Answered], int]], ...] = (
    _PARTS[0],
    ("until the engine began", lambda each: each.end.usage.queue_ns),
    ("until the first token", lambda each: each.end.usage.prefill_ns),
    ("until the last token", lambda each: each.end.usage.decode_ns),
)
"""Parts for an engine with its own scheduler, which does not show its steps."""

_NOTABLE_SHARE = 0.25


def explain_answers(model: ServedModel, request: str) -> Explanation:
    """Explain the last answers of a language model, or those to one request.

    Raises:
        NotFoundError: there is no such request among the last answers.
    """
    engine: TokenEngine = model.generation.engine
    found = report(engine, request)
    if found is None:
        notes = ("no answer has ended since the model was loaded",)
        return Explanation(model.name, model.version_text, None, (), (), notes)
    return Explanation(model.name, model.version_text, None, (), tuple(advice_for(found)), (), found)


def report(engine: TokenEngine, request: str) -> GenerationReport | None:
    """Return a report on a request, or on the last answers if ``request`` is empty.

    Returns None if no answer has ended.

    Raises:
        NotFoundError: the request is not among the last answers.
    """
    answers = [each for each in engine.measurements.recent() if not request or each.id == request]
    if request and not answers:
        raise NotFoundError(
            f"no answer to a request '{request}' has ended recently: the last {RECENT_ANSWERS} answers are kept, by "
            "the id that the request had"
        )
    if not answers:
        return None
    usages = [each.end.usage for each in answers]
    stats = engine.stats()
    parts = _PARTS if any(usage.loop_ns or usage.answer_steps_ns for usage in usages) else _LIBRARY_PARTS
    firsts = [each.first_ns for each in answers if each.first_ns]
    between = [each.decode_ns / (each.generated_tokens - 1) for each in usages if each.generated_tokens > 1]
    steps = sum(each.steps for each in usages)
    reasons: dict[str, int] = {}
    for each in answers:
        reasons[each.end.reason] = reasons.get(each.end.reason, 0) + 1
    return GenerationReport(
        request=request,
        answers=len(answers),
        reasons=reasons,
        whole_ms=_ms(fmean(each.whole_ns for each in answers)),
        parts_ms={name: _ms(fmean(read(each) for each in answers)) for name, read in parts},
        first_token_ms=_ms(median(firsts)) if firsts else None,
        between_tokens_ms=_ms(median(between)) if between else None,
        prompt_tokens=sum(each.prompt_tokens for each in usages),
        cached_tokens=sum(each.cached_tokens for each in usages),
        generated_tokens=sum(each.generated_tokens for each in usages),
        steps=steps,
        rows_beside=round(sum(each.rows_beside for each in usages) / max(steps, 1), 2),
        preemptions=sum(each.preemptions for each in usages),
        running=stats.running,
        waiting=stats.waiting,
        cache_used=round((stats.cache_tokens - stats.reusable_tokens) / max(stats.cache_capacity, 1), 3),
    )


def advice_for(found: GenerationReport) -> Iterable[str]:
    """Yield the settings that would have made these answers faster, by the parts that took long."""
    parts = found.parts_ms
    limit = _NOTABLE_SHARE * found.whole_ms
    if parts.get("waited for a row", 0) > limit:
        yield "max_sequences: more rows, because answers waited for one"
    if parts.get("put back, without a row", 0) > limit:
        yield "kv_cache_tokens: more memory, because answers were put back"
    if parts.get("steps for other requests alone", 0) > limit:
        yield "step_tokens: more prompt tokens in a step, because prompts waited for those of others"
    if parts.get("between steps: sampling, text, delivery", 0) > limit:
        yield "intra_op_thread_count: one thread fewer for the model, because work between the steps took long"


def _ms(ns: float) -> float:
    return round(ns / 1e6, 4)
