"""The function under AWS's own runtime interface emulator and client: `make test-lambda` installs both.

The events of HTTP fronts are the samples that AWS's own tool generates, filled in.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, end, free_ports
from support.servers.hosting import write_scale, write_words

PEERS = Path(os.environ.get("REMORA_LAMBDA_VENV", ROOT / ".venv-lambda"))
PYTHON, EMULATOR, EVENTS = PEERS / "bin" / "python", PEERS / "bin" / "aws-lambda-rie", PEERS / "events"
INVOCATIONS = "2015-03-31/functions/function/invocations"

pytestmark = pytest.mark.skipif(not EMULATOR.exists(), reason="AWS's emulator is not installed: make test-lambda")

REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


class Invoked:
    """Invokes the emulated function."""

    def __init__(self, port: int, log: Path) -> None:
        self.log = log
        self.url = f"http://127.0.0.1:{port}/{INVOCATIONS}"

    def __call__(self, event: object) -> Any:
        """The function's answer; a function error is an answer with ``errorType``."""
        request = urllib.request.Request(self.url, json.dumps(event, ensure_ascii=False).encode(), method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return {"status": error.code, "text": error.read().decode()}


@pytest.fixture(scope="module")
def invoke(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Invoked]:
    models = tmp_path_factory.mktemp("lambda") / "models"
    write_scale(models / "scale")
    write_words(models / "words")
    port, api = free_ports(2)
    command = [
        EMULATOR,
        *("--runtime-interface-emulator-address", f"127.0.0.1:{port}", "--runtime-api-address", f"127.0.0.1:{api}"),
        *(PYTHON, "-m", "remora_adapters.aws_lambda"),
    ]
    versions = {each.name: each.version for each in distributions(path=[str(next(PEERS.glob("lib/python*/site-*")))])}
    print("awslambdaric", versions["awslambdaric"], "mangum", versions["mangum"])
    environment = {**os.environ, "LAMBDA_TASK_ROOT": str(models.parent), "AWS_LAMBDA_FUNCTION_TIMEOUT": "30"}
    environment["REMORA_METRICS_EXPORT"] = "emf"
    environment["PYTHONPATH"] = f"{ROOT / 'core'}:{ROOT / 'adapters'}"
    with (models.parent / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            found = Invoked(port, models.parent / "log.txt")
            while process.poll() is None:  # the emulator starts the function with the first event
                try:
                    found({**REQUEST, "model_name": "scale"})
                    break
                except urllib.error.URLError:
                    continue
            yield found
        finally:
            end(process)


def sample(name: str, path: str, body: bytes, **headers: str) -> dict[str, Any]:
    """An event of the tool's, asking for our path."""
    event: dict[str, Any] = json.loads((EVENTS / name).read_text().replace("/{{{path}}}", path))
    event["body"] = base64.b64encode(body).decode()
    event["queryStringParameters"] = event["multiValueQueryStringParameters"] = None
    event["httpMethod"] = "POST"
    if "http" in event["requestContext"]:
        event["requestContext"]["http"]["method"] = "POST"
        event["requestContext"]["stage"] = "$default"
    event["headers"] = {**{name.lower(): value for name, value in event["headers"].items()}, **headers}
    event.pop("multiValueHeaders", None)
    return event


def test_a_direct_invocation_is_answered(invoke: Invoked) -> None:
    answer = invoke({**REQUEST, "model_name": "scale"})
    assert answer["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("name", ["HttpApi.json", "AwsProxy.json", "ALBRequest.json"])
def test_the_samples_of_every_front_are_answered(invoke: Invoked, name: str) -> None:
    path = "/v2/models/scale/infer"
    answer = invoke(sample(name, path, json.dumps(REQUEST).encode(), **{"accept-encoding": "identity"}))
    assert answer["statusCode"] == 200, answer
    assert json.loads(answer["body"])["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
    missing = invoke(sample(name, "/v2/models/none/infer", json.dumps(REQUEST).encode()))
    assert missing["statusCode"] == 404


def test_a_failure_is_a_function_error_with_our_text(invoke: Invoked) -> None:
    answer = invoke({"model_name": "none", "inputs": []})
    assert answer["errorType"] == "NotFoundError"
    assert "Request for unknown model: 'none' is not found" in answer["errorMessage"]


def test_what_is_too_long_for_lambda_is_refused_by_us_and_not_by_the_platform(invoke: Invoked) -> None:
    def words(text: str) -> dict[str, Any]:
        row = {"name": "x", "datatype": "BYTES", "shape": [1], "data": [text]}
        return {"model_name": "words", "inputs": [row]}

    answer = invoke(words("é" * 1_050_000))
    assert answer["errorType"] == "UnavailableError"
    assert "Lambda takes 6291556" in answer["errorMessage"]
    assert len(invoke(words("a" * 6_200_000))["outputs"][0]["data"][0]) == 6_200_000


def test_the_log_has_a_line_of_metrics_for_each_event(invoke: Invoked) -> None:
    def counted() -> int:
        lines = [json.loads(line) for line in invoke.log.read_text().splitlines() if line.startswith('{"_aws"')]
        return sum(line.get("nv_inference_request_success", 0) for line in lines if line["model"] == "scale")

    before = counted()
    for _ in range(2):
        invoke({**REQUEST, "model_name": "scale"})
    assert counted() == before + 2
