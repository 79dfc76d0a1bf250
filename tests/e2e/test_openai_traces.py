"""Traces of OpenAI's routes: spans with the attributes of generative AI, and the time of each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remora import Engine
from remora_adapters import cloud_run
from support.models.generation_models import tiny
from support.servers.hosting import ask, running
from support.servers.trace_receiver import attributes, collector

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "ignore_eos": True}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("path", "fields", "operation"),
    [
        ("chat/completions", {**CHAT, "max_tokens": 6}, "chat"),
        ("chat/completions", {**CHAT, "max_tokens": 6, "stream": True}, "chat"),
        ("completions", {"prompt": "Once", "max_tokens": 6, "ignore_eos": True}, "text_completion"),
        ("responses", {"input": "Hello", "max_output_tokens": 6, "ignore_eos": True}, "chat"),
    ],
)
def test_a_request_is_a_span_of_generative_ai(
    path: str, fields: dict[str, Any], operation: str, tmp_path: Path
) -> None:
    tiny(tmp_path)
    host = cloud_run.host({"REMORA_MODEL_REPOSITORY": str(tmp_path)})
    with collector() as received:
        settings = ("mode=opentelemetry", "rate=1", "level=TIMESTAMPS", f"opentelemetry,url={received.url}")
        with running(host, Engine(tmp_path, trace_config=settings)) as ports:
            found = ask(ports.http, "POST", f"/v1/{path}", {**fields, "model": "tiny"}, {"traceparent": PARENT})
            assert found.status == 200, found.body
        spans = {span.name: span for span in received.spans(2)}
    request, span = spans["InferRequest"], spans["tiny"]
    assert request.trace_id.hex() == PARENT[3:35]
    assert span.parent_span_id == request.span_id
    seen = attributes(span)
    assert (seen["gen_ai.operation.name"], seen["gen_ai.request.model"]) == (operation, "tiny")
    assert seen["gen_ai.usage.output_tokens"] == 6
    names = [event.name for event in span.events]
    assert (names.count("FIRST_TOKEN"), names.count("TOKEN")) == (1, 5)


def test_a_refused_request_is_a_span_with_its_error(tmp_path: Path) -> None:
    tiny(tmp_path)
    host = cloud_run.host({"REMORA_MODEL_REPOSITORY": str(tmp_path)})
    with collector() as received:
        settings = ("mode=opentelemetry", "rate=1", "level=TIMESTAMPS", f"opentelemetry,url={received.url}")
        with running(host, Engine(tmp_path, trace_config=settings)) as ports:
            wrong = {**CHAT, "model": "tiny", "max_tokens": 10_000}
            assert ask(ports.http, "POST", "/v1/chat/completions", wrong).status == 400
        (span,) = [each for each in received.spans(2) if each.name == "tiny"]
    assert "the context of the model has" in span.status.message
