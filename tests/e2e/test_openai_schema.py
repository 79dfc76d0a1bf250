"""Published schema of OpenAI's routes: what answers have, and bad input that schemathesis makes of it.

`make test-openai` creates an environment with schemathesis; without it that test is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import RunningServer, Serving
from support.models.generation_models import ROOT, tiny
from support.servers.hosting import ask
from support.wire.openapi_checks import mismatches

TOOL = Path(os.environ.get("SCHEMATHESIS", ROOT / ".venv-schemathesis" / "bin" / "st"))
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
"""Not positive_data_acceptance, because the schema allows combinations that the routes refuse by name."""
PATIENCE_S = 300.0
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
PROMPT = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0}
INPUT = {"model": "tiny", "input": "Hello", "max_output_tokens": 8, "temperature": 0}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": PARAMETERS, "strict": True}
CALL = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "max_tokens": 80}
RESPONSE_CALL = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required", "max_output_tokens": 80}
STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", CHAT),
    ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2, "seed": 1}),
    ("chat/completions", {**CHAT, **CALL}),
    ("completions", {**PROMPT, "echo": True, "logprobs": 2}),
    ("completions", {**PROMPT, "stop": ["e", "a", "o", "t"], "ignore_eos": True, "max_tokens": 60}),
    ("responses", {**INPUT, "include": ["message.output_text.logprobs"], "top_logprobs": 1, "metadata": {"a": "b"}}),
    ("responses", {**INPUT, **RESPONSE_CALL}),
]
WHOLE: list[tuple[str, dict[str, Any]]] = [
    *STREAMED,
    ("tokenize", {"model": "tiny", "prompt": "Once", "return_token_strs": True}),
    ("detokenize", {"model": "tiny", "tokens": [20, 21]}),
]


@pytest.fixture(scope="module")
def server(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    tiny(models)
    with serving(models, "--openai", "--allow-grpc=false") as made:
        yield made


def test_no_request_made_of_the_schema_is_a_fault_of_the_server(server: RunningServer, tmp_path: Path) -> None:
    if not TOOL.exists():
        pytest.skip(f"{TOOL} is missing: run make test-openai")
    base = f"http://127.0.0.1:{server.http}"
    command = [TOOL, "run", f"{base}/v1/openapi.json", "--url", base, "--checks", ",".join(CHECKS), "--seed", "1"]
    more = ["--phases", "examples,coverage,fuzzing", "--max-examples", "40", "--no-color"]
    run = subprocess.run(
        [*command, *more],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            "PYTHONPATH": str(ROOT / "tests" / "support" / "programs"),
        },
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert "passed" in run.stdout


@pytest.fixture(scope="module")
def document(server: RunningServer) -> Any:
    return ask(server.http, "GET", "/v1/openapi.json").json


@pytest.mark.parametrize(("route", "body"), WHOLE)
def test_answers_have_the_members_that_are_published(
    server: RunningServer, document: Any, route: str, body: dict[str, Any]
) -> None:
    answer = ask(server.http, "POST", f"/v1/{route}", body)
    assert answer.status == 200, answer.body
    content = document["paths"][f"/v1/{route}"]["post"]["responses"]["200"]["content"]
    assert list(mismatches(answer.json, content["application/json"]["schema"], document)) == []


@pytest.mark.parametrize(("route", "body"), STREAMED)
def test_events_have_the_members_that_are_published(
    server: RunningServer, document: Any, route: str, body: dict[str, Any]
) -> None:
    answer = ask(server.http, "POST", f"/v1/{route}", {**body, "stream": True})
    assert answer.status == 200, answer.body
    kind = {"chat/completions": "ChatChunk", "completions": "CompletionChunk", "responses": "ResponseEvent"}[route]
    content = document["paths"][f"/v1/{route}"]["post"]["responses"]["200"]["content"]
    assert kind in content["text/event-stream"]["schema"]["description"]
    rows = [line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    assert len(rows) > 3
    for row in rows:
        schema = document["components"]["schemas"][kind]
        assert list(mismatches(json.loads(row), schema, document)) == []


def test_models_have_the_members_that_are_published(server: RunningServer, document: Any) -> None:
    for path, kind in (("/v1/models", "Models"), ("/v1/models/tiny", "Model")):
        schema = document["components"]["schemas"][kind]
        assert list(mismatches(ask(server.http, "GET", path).json, schema, document)) == []
