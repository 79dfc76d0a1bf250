"""Tests of ``remora_llm.measuring``, with a language model that answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from remora import Engine
from remora.calls import Metrics, ModelExplain
from remora.errors import NotFoundError, UnsupportedError
from remora.management.explanation import Explanation
from remora.messages import InferForm, InputSpec
from remora.models import loader as loading
from remora.server.http.pages import schema_of
from remora.tracing import tracer
from remora_llm.generation.measurements import Measurements
from remora_llm.generation.step_loop import StepLoop
from remora_llm.generation.tasks import EngineStats, ModelFacts
from remora_llm.measuring import generation_families
from remora_tools.client.explain import text_of
from support.engine.fakes import FakeBackend, write_model
from support.models.generation_models import tiny
from support.process.eventually import eventually
from support.servers.trace_receiver import attributes, collector


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    # so little memory that some of several answers are put back
    tiny(tmp_path, config='parameters { key: "kv_cache_tokens" value { string_value: "300" } }')
    with Engine(tmp_path) as started:
        yield started


def ask(engine: Engine, text: str, tokens: int = 24, **more: Any) -> None:
    parameters = json.dumps({"max_tokens": tokens, "temperature": 0, "ignore_eos": True})
    inputs = {
        "text_input": np.array([text.encode()], object),
        "sampling_parameters": np.array([parameters.encode()], object),
    }
    list(engine.infer_stream("tiny", inputs, **more))


def ask_all(engine: Engine, count: int, prefix: str = "r") -> None:
    """Ask so much at once: no step begins before all have come."""
    together, turn = threading.Event(), StepLoop.turn

    def turn_together(loop: StepLoop) -> None:
        if not together.is_set():
            eventually(lambda: loop.stats().waiting == count)
            together.set()
        turn(loop)

    threads = [
        threading.Thread(
            target=ask, args=(engine, f"Request number {place} is about " * 3, 40), kwargs={"id": f"{prefix}{place}"}
        )
        for place in range(count)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLoop, "turn", turn_together)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def page_of(engine: Engine) -> dict[str, float]:
    lines = [line for line in engine.perform(Metrics()).splitlines() if line.startswith("vllm:")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


LABELS = '{engine="1",model_name="tiny"}'


def test_metrics_have_vllms_names_and_count_what_ran(engine: Engine) -> None:
    ask(engine, "Once upon a time there was a server", 10)
    ask(engine, "Once upon a time there was a server", 10)
    page = page_of(engine)
    assert page[f"vllm:num_requests_running{LABELS}"] == page[f"vllm:num_requests_waiting{LABELS}"] == 0
    assert page[f"vllm:kv_cache_usage_perc{LABELS}"] == 0
    assert page[f"vllm:generation_tokens_total{LABELS}"] == 20
    prompt = page[f"vllm:prompt_tokens_total{LABELS}"]
    assert prompt == page[f"vllm:request_prompt_tokens_sum{LABELS}"] == page[f"vllm:prefix_cache_queries_total{LABELS}"]
    assert 0 < page[f"vllm:prefix_cache_hits_total{LABELS}"] < prompt / 2
    assert page['vllm:request_success_total{engine="1",model_name="tiny",finished_reason="length"}'] == 2
    for name, count in (
        ("time_to_first_token_seconds", 2),
        ("inter_token_latency_seconds", 18),
        ("e2e_request_latency_seconds", 2),
        ("request_queue_time_seconds", 2),
        ("request_prefill_time_seconds", 2),
        ("request_decode_time_seconds", 2),
        ("request_inference_time_seconds", 2),
        ("request_generation_tokens", 2),
    ):
        assert page[f"vllm:{name}_count{LABELS}"] == count, name
        assert page[f'vllm:{name}_bucket{LABELS[:-1]},le="+Inf"}}'] == count, name
    assert page['vllm:cache_config_info{engine="1",model_name="tiny",block_size="16",num_gpu_blocks="18"}'] == 1


def test_the_adapters_of_a_model_have_a_metric_which_other_models_lack() -> None:
    facts = ModelFacts(context=8, vocabulary=8, adapters=("law", "tax"), max_adapters=2)
    stats = EngineStats(running_adapters=("law",), waiting_adapters=("law", "tax"))

    def families(facts: ModelFacts) -> dict[str, Any]:
        engine = SimpleNamespace(facts=facts, stats=lambda: stats, measurements=Measurements(8))
        model = SimpleNamespace(name="m", version_text="1", generation=SimpleNamespace(engine=engine))
        return {each.name: each for each in generation_families([cast(Any, model)])}

    (sample,) = families(facts)["vllm:lora_requests_info"].samples
    assert sample.labels == {
        "engine": "1",
        "model_name": "m",
        "max_lora": "2",
        "running_lora_adapters": "law",
        "waiting_lora_adapters": "law,tax",
    }
    assert "vllm:lora_requests_info" not in families(replace(facts, adapters=()))


def test_a_server_without_a_language_model_has_none_of_these_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_model(tmp_path, "m")
    with Engine(tmp_path) as engine:
        assert page_of(engine) == {}
        with pytest.raises(UnsupportedError, match="not a language model"):
            engine.perform(ModelExplain("m", request="r1"))


def test_the_parts_of_each_request_sum_to_its_duration_in_company_and_after_a_preemption(engine: Engine) -> None:
    preempted, rounds = 0, 0
    while not preempted and rounds < 20:  # rows are put back only if the requests meet
        rounds += 1
        prefix = f"round{rounds}-"  # the parts of an id that repeats are means
        ask_all(engine, 8, prefix)
        preempted += _preemptions_of_checked_parts(engine, prefix)
    assert preempted > 0


def _preemptions_of_checked_parts(engine: Engine, prefix: str) -> int:
    preempted = 0
    for place in range(8):
        found = engine.perform(ModelExplain("tiny", request=f"{prefix}{place}")).answers
        assert found is not None
        assert found.answers == 1
        assert sum(found.parts_ms.values()) == pytest.approx(found.whole_ms, rel=0.02)
        preempted += found.preemptions
        if found.preemptions:
            assert found.parts_ms["put back, without a row"] > 0
    return preempted


def test_the_last_answers_of_a_model_are_explained(engine: Engine) -> None:
    before = engine.perform(ModelExplain("tiny"))
    assert (before.answers, before.notes) == (None, ("no answer has ended since the model was loaded",))
    ask_all(engine, 6)
    found = engine.perform(ModelExplain("tiny"))
    assert found.answers is not None
    assert found.answers.reasons == {"length": 6}
    assert found.answers.generated_tokens == 240
    assert found.answers.rows_beside > 0
    text = text_of(json.loads(json.dumps(found.document())))
    for part in ("last answers:", "6 length", "steps that wrote the answer", "waited for a row", "sum of the parts"):
        assert part in text
    assert json.loads(json.dumps(found.document()))["answers"].keys() == _schema_of_answers().keys()


def _schema_of_answers() -> dict[str, Any]:
    answers: Any = schema_of(Explanation)["properties"]["answers"]
    properties: dict[str, Any] = answers["anyOf"][0]["properties"] if "anyOf" in answers else answers["properties"]
    return properties


def test_a_request_that_is_not_known_is_named(engine: Engine) -> None:
    ask(engine, "Once", id="known")
    with pytest.raises(NotFoundError, match="no answer to a request 'unknown' has ended recently"):
        engine.perform(ModelExplain("tiny", request="unknown"))


def test_a_traced_request_has_the_time_of_each_token_and_the_attributes_of_generative_ai(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "_END_S", 60.0)
    tiny(tmp_path)
    with collector() as received:
        settings = ("mode=opentelemetry", "rate=1", "level=TIMESTAMPS", f"opentelemetry,url={received.url}")
        with Engine(tmp_path, trace_config=settings) as engine:
            served = engine.traces.wrap_model(engine.resolve("tiny"))
            ended = threading.Event()
            form = InferForm((InputSpec("text_input", "BYTES", (1,)),), id="r7")
            served.submit(
                form, [np.array([b"Once"], object)], lambda _, outcome: ended.set() if outcome.final else None
            )
            assert ended.wait(60)
        spans = received.spans(3)
    (span,) = [each for each in spans if each.name == "tiny"]
    found = attributes(span)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.request.model"] == "tiny"
    names = [event.name for event in span.events]
    assert names.count("FIRST_TOKEN") == 1
    times = [event.time_unix_nano for event in span.events]
    tokens = int(found["gen_ai.usage.output_tokens"])
    assert names.count("TOKEN") == tokens - 1
    assert times == sorted(times)
