"""Metrics of a language model beside what guidellm measures from outside, within five percent.

`make test-openai-load` creates the environment and the models; without them the test is skipped. The model must be
real, because a step of `tiny` is shorter than what a client adds.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from conftest import RunningServer, Serving
from support.models.generation_models import ROOT

TOOL = Path(os.environ.get("GUIDELLM", ROOT / ".venv-guidellm" / "bin" / "guidellm"))
MODELS = Path(os.environ.get("LLM_MODELS", ROOT / "docs" / "examples" / "chat" / "models"))
NAME = os.environ.get("LLM_NAME", "smollm2")
PATIENCE_S = 900.0
STREAMS, REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 2, 24, 64, 48
SERVERS = {
    "time_to_first_token_ms": "time_to_first_token_seconds",
    "inter_token_latency_ms": "inter_token_latency_seconds",
    "request_latency": "e2e_request_latency_seconds",
}
"""guidellm's names and those of the server's histograms."""


def sums(server: RunningServer) -> dict[str, tuple[float, float]]:
    """Sum and count of each histogram."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.metrics, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    found = {}
    for name in SERVERS.values():
        rows = dict(
            re.findall(rf'^vllm:{name}_(sum|count){{[^}}]*model_name="{NAME}"[^}}]*}} (\S+)$', text, re.MULTILINE)
        )
        found[name] = (float(rows.get("sum", 0)), float(rows.get("count", 0)))
    return found


def scenario(server: RunningServer, report: Path) -> dict[str, object]:
    tokenizer = MODELS / NAME / "1"
    return {
        "backend": {
            "kind": "openai_http", "target": f"http://127.0.0.1:{server.http}", "model": NAME,
            "request_format": "/v1/completions", "validate_backend": False, "http2": False,
        },
        "profile": {"kind": "concurrent", "streams": [STREAMS]},
        "constraints": [{"kind": "max_requests", "count": REQUESTS}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(tokenizer)},
        "data": [{"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": ANSWER_TOKENS}],
        "outputs": [{"kind": "json", "path": str(report)}],
    }  # fmt: skip


def test_metrics_agree_with_a_measurement_from_outside(serving: Serving, tmp_path: Path) -> None:
    if not TOOL.exists() or not (MODELS / NAME).is_dir():
        pytest.skip(f"{TOOL} or {MODELS / NAME} is missing: run make test-openai-load")
    report, config = tmp_path / "report.json", tmp_path / "scenario.json"
    with serving(MODELS, "--allow-grpc=false", "--model-control-mode=explicit", f"--load-model={NAME}") as server:
        config.write_text(json.dumps({"spec": scenario(server, report)}))
        before = sums(server)
        run = subprocess.run(
            [TOOL, "run", "-c", config, "--disable-console-interactive"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
        after = sums(server)
    measured = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    for name, histogram in SERVERS.items():
        total, count = (after[histogram][place] - before[histogram][place] for place in (0, 1))
        assert count >= REQUESTS
        scale = 1e3 if name.endswith("_ms") else 1.0
        ours, theirs = total / count * scale, measured[name]["successful"]["mean"]
        print(f"{name}: {ours:.2f} by the server, {theirs:.2f} by guidellm")
        assert ours == pytest.approx(theirs, rel=0.05)
