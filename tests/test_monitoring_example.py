"""The compose file of docs/examples/monitoring: its files, flags, ports and names fit each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from remora.cli import parse_arguments

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "monitoring"


def loaded(name: str) -> Any:
    return yaml.safe_load((EXAMPLE / name).read_text())


COMPOSE = loaded("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned_and_every_mounted_file_is_there(name: str) -> None:
    service = SERVICES[name]
    assert re.search(r":v?[0-9]+\.[0-9]+\.[0-9]+$", service["image"]) or name == "remora"
    for volume in service.get("volumes", ()):
        source, target, mode = volume.replace("${MODELS:-./models}", "MODELS").split(":")
        assert source == "MODELS" or (EXAMPLE / source).resolve().is_file(), source
        assert target.startswith("/")
        assert mode == "ro"


def test_no_port_is_open_to_other_machines() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_server_takes_its_flags() -> None:
    options = parse_arguments(["serve", *SERVICES["remora"]["command"]])  # as the image's entry point does
    assert options.metrics_address == "0.0.0.0"


def test_traces_go_to_a_receiver_of_the_collector() -> None:
    collector = loaded("otel-collector.yaml")
    (url,) = re.findall(r"opentelemetry,url=http://([^/]+)/v1/traces", " ".join(SERVICES["remora"]["command"]))
    host, _, port = url.partition(":")
    assert host in SERVICES
    assert collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"].endswith(f":{port}")
    for pipeline in collector["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(collector[kind])


def test_prometheus_scrapes_the_port_of_metrics_and_has_the_alerts_of_the_cluster() -> None:
    config = loaded("prometheus.yaml")
    (job,) = config["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["remora:8002"]
    assert config["rule_files"] == ["alerts.yaml"]
    cluster = yaml.safe_load((ROOT / "infra/kubernetes/monitoring/alerts.yaml").read_text())
    assert loaded("alerts.yaml")["groups"] == cluster["spec"]["groups"]


def test_grafana_has_the_dashboard_and_its_source() -> None:
    (source,) = loaded("grafana/datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = loaded("grafana/dashboards.yaml")["providers"]
    mounts = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    assert any(mount.startswith(f"{provider['options']['path']}/") for mount in mounts)
    board = json.loads((ROOT / "infra/kubernetes/monitoring/dashboard.json").read_text())
    assert {each["query"] for each in board["templating"]["list"] if each["type"] == "datasource"} == {source["type"]}
