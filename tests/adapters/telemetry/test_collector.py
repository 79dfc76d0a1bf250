"""Requests to an OpenTelemetry collector: where they go by the usual variables, and what errors may not reveal."""

from __future__ import annotations

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from conftest import free_ports
from remora.errors import ConfigError
from remora_adapters.telemetry.collector import Collector, any_value, key_values
from support.servers.trace_receiver import collector

BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
OWN = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"


@pytest.mark.parametrize(
    ("base", "environ", "place"),
    [
        ("", {}, "http://localhost:4318/v1/metrics"),
        ("", {BASE: "http://a:1/x/"}, "http://a:1/x/v1/metrics"),
        ("", {BASE: "http://a:1", OWN: "http://b:2/in"}, "http://b:2/in"),
        ("https://c", {BASE: "http://a:1", OWN: "http://b:2/in"}, "https://c/v1/metrics"),
        ("http://user:secret@d:3", {}, "http://d:3/v1/metrics"),
    ],
)
def test_the_flag_and_then_the_variables_name_the_collector(base: str, environ: dict[str, str], place: str) -> None:
    assert Collector("metrics", base, environ).place == place


@pytest.mark.parametrize(
    "base", ["collector:4318", "ftp://collector", "http://", "http://u:s3/cret@collector", "http://["]
)
def test_what_is_no_url_is_refused(base: str) -> None:
    with pytest.raises(
        ConfigError, match=r"the collector of metrics needs a URL .*: give it as otlp=URL or set"
    ) as caught:
        Collector("metrics", base, {})
    assert "s3" not in str(caught.value)


def test_certificates_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Collector("metrics", "https://collector", {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/none.pem"})


def test_headers_and_compression_follow_the_variables() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=general",
        "OTEL_EXPORTER_OTLP_METRICS_HEADERS": "api-key=own",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    with collector() as kept:
        Collector("metrics", kept.base, environ).send(ExportMetricsServiceRequest())
        headers = {name.lower(): value for name, value in kept.headers.items()}
    assert headers["api-key"] == "own"
    assert headers["content-encoding"] == "gzip"
    assert headers["content-type"] == "application/x-protobuf"


def test_the_user_of_the_url_is_sent_as_basic_authentication() -> None:
    with collector() as kept:
        base = kept.base.replace("://", "://user:p%40ss@")
        Collector("metrics", base, {}).send(ExportMetricsServiceRequest())
        assert {name.lower(): value for name, value in kept.headers.items()}["authorization"] == "Basic dXNlcjpwQHNz"


def test_errors_name_the_collector_without_secrets() -> None:
    (port,) = free_ports(1)
    unreachable = Collector("metrics", f"http://user:secret@127.0.0.1:{port}", {})
    with pytest.raises(ConnectionError, match="cannot be reached") as caught:
        unreachable.send(ExportMetricsServiceRequest())
    assert "secret" not in str(caught.value)
    with collector() as kept:
        kept.status = 401
        with pytest.raises(ConnectionError, match="answered 401"):
            Collector("metrics", kept.base, {}).send(ExportMetricsServiceRequest())


def test_values_of_json_become_attributes() -> None:
    members = {"t": True, "i": -3, "big": 1 << 70, "f": 0.5, "s": "x", "l": [1, "a"], "m": {"k": None}}
    found = {each.key: each.value for each in key_values(members)}
    assert found["t"].bool_value is True
    assert (found["i"].int_value, found["big"].string_value, found["f"].double_value) == (-3, str(1 << 70), 0.5)
    assert found["s"] == any_value("x")
    assert [each.int_value or each.string_value for each in found["l"].array_value.values] == [1, "a"]
    assert found["m"].kvlist_value.values[0].value.string_value == "None"
