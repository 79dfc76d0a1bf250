"""Metrics and log records that a server process sends: to a collector, and as CloudWatch's lines on SageMaker."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from conftest import free_ports
from support.process.eventually import eventually
from support.servers.hosting import write_scale
from support.servers.live_server import PATIENCE_S, ask, client, free_port, process, status_of, until, write_version
from support.servers.sagemaker_door import V2
from support.servers.trace_receiver import attributes, collector

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("frontends", ["0", "1"])
def test_a_collector_gets_metrics_and_log_records_with_their_trace(
    tmp_path: Path, child_environment: dict[str, str], frontends: str
) -> None:
    write_version(tmp_path / "models", 1)
    port = free_port()
    with collector() as kept:
        flags = (
            f"--metrics-export=otlp={kept.base}",
            "--metrics-export-secs=0.05",
            f"--log-export=otlp={kept.base}",
            "--access-log=all",
            f"--frontends={frontends}",
        )
        with process(tmp_path / "models", port, child_environment, *flags) as server:
            until(port, "/v2/health/ready", server)
            with client(port) as connection:
                connection.request("GET", "/v2/models/none", headers={"traceparent": TRACE})
                with connection.getresponse() as reply:
                    assert (reply.status, bool(reply.read())) == (404, True)
                assert [ask(connection, value)[0] for value in (3, 4)] == [200, 200]
            metrics = kept.metrics(
                lambda found: (
                    "nv_inference_count" in found
                    and found["nv_inference_count"].sum.data_points[0].as_int == 2
                    and found["remora_queue_duration_seconds"].histogram.data_points[0].count == 2
                )
            )
            assert attributes(metrics["nv_inference_count"].sum.data_points[0]) == {"model": "m", "version": "1"}
            (missing,) = kept.records(lambda record: "/v2/models/none" in record.body.string_value, "remora.access")
            assert (missing.trace_id.hex(), missing.span_id.hex()) == (TRACE[3:35], TRACE[36:52])
            assert missing.severity_text == "WARNING"
            server.terminate()
            assert server.wait(PATIENCE_S) == 0
            kept.records(lambda record: record.body.string_value.startswith("All models are stopped"))


def test_a_server_serves_and_ends_in_time_without_its_collector(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    write_version(tmp_path / "models", 1)
    port, nowhere = free_ports(2)
    url = f"otlp=http://127.0.0.1:{nowhere}"
    flags = (f"--metrics-export={url}", "--metrics-export-secs=0.01", f"--log-export={url}", "--access-log=all")
    with process(tmp_path / "models", port, child_environment, *flags) as server:
        until(port, "/v2/health/ready", server)
        with client(port) as connection:
            for _ in range(100):
                assert ask(connection, 3)[0] == 200
        server.terminate()
        _, text = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == 0
    assert text.count("metrics cannot be exported by otlp") == 1
    assert text.count("log records cannot be written and are dropped until they can") == 1


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--log-export=file", "--log-export=file: expected off, otlp or otlp=URL"),
        ("--log-export=otlp=nowhere", "the collector of logs needs a URL"),
        ("--metrics-export=statsd", "--metrics-export=statsd: expected otlp"),
    ],
)
def test_an_export_that_cannot_be_ends_the_start(
    tmp_path: Path, child_environment: dict[str, str], flag: str, text: str
) -> None:
    write_version(tmp_path / "models", 1)
    with process(tmp_path / "models", free_port(), child_environment, flag) as server:
        _, printed = server.communicate(timeout=PATIENCE_S)
    assert text in printed
    assert server.returncode == 2


def test_sagemaker_has_lines_for_cloudwatch(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_scale(tmp_path / "model" / "scale")
    port = free_port()
    environ = child_environment | {
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--metrics-export=emf=shop --metrics-export-secs=0",
    }
    command = [sys.executable, "-m", "remora_adapters.sagemaker", "serve"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as server:
        try:
            eventually(lambda: status_of(port, "/ping") == 200, process=server)
            with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
                for _ in range(3):
                    connection.request("POST", "/invocations", V2, {"Content-Type": "application/json"})
                    with connection.getresponse() as reply:
                        assert (reply.status, bool(reply.read())) == (200, True)
            server.terminate()
            _, printed = server.communicate(timeout=PATIENCE_S)
        finally:
            server.kill()
    (line,) = (json.loads(line) for line in printed.splitlines() if line.startswith('{"_aws"'))
    assert (line["model"], line["version"], line["nv_inference_request_success"]) == ("scale", "1", 3)
    assert len(line["remora_request_duration_seconds"]) == 3
    assert line["_aws"]["CloudWatchMetrics"][0]["Namespace"] == "shop"
