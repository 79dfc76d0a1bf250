"""install.sh against a kubectl that plays a cluster and fails as one does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.terraform import INFRA

SCRIPT = INFRA / "knative-gpu" / "install.sh"
EMPTY: dict[str, Any] = {"minor": "33+", "version": "v1.33.5-eks", "broken": [], "calls": [], "jobs": []}
EMPTY |= {"crds": {}, "deployments": {}, "configmaps": {}, "daemonsets": []}


class Cluster:
    """A played cluster, and install.sh run on it."""

    def __init__(self, folder: Path) -> None:
        self._state = folder / "state.json"
        self._folder = folder
        kubectl = folder / "kubectl"
        player = Path(__file__).with_name("scripted_cluster.py")
        kubectl.write_text(f'#!/bin/sh\nexec {sys.executable} -S {player} {self._state} "$@"\n')
        kubectl.chmod(0o755)
        self.set()

    def set(self, **state: Any) -> None:
        self._state.write_text(json.dumps(EMPTY | state))

    def change(self, **state: Any) -> None:
        self._state.write_text(json.dumps(self.state() | state))

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._state.read_text())
        return found

    def install(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self._folder}:/usr/bin:/bin", **environment}
        return subprocess.run(
            ["sh", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.fixture(scope="module")
def installed_state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """State of a cluster after one installation, which starts some thirty processes."""
    cluster = Cluster(tmp_path_factory.mktemp("installed"))
    done = cluster.install()
    assert done.returncode == 0, done.stderr
    return cluster.state()


@pytest.fixture
def installed(cluster: Cluster, installed_state: dict[str, Any]) -> Cluster:
    """A cluster after an installation."""
    cluster.set(**installed_state)
    return cluster


def test_what_is_installed_lacks_nothing(installed: Cluster) -> None:
    checked = installed.install("--check")
    assert checked.returncode == 0, checked.stdout
    assert "missing" not in checked.stdout


def test_kserve_is_not_left_waiting_for_istio(installed: Cluster) -> None:
    settings = json.loads(installed.state()["configmaps"]["inferenceservice-config"]["ingress"])
    assert settings == {"enableGatewayApi": False, "ingressDomain": "example.com", "disableIstioVirtualHost": True}


def test_a_second_installation_changes_no_setting(installed: Cluster) -> None:
    before = installed.state()["configmaps"]
    done = installed.install()
    assert done.returncode == 0, done.stderr
    assert installed.state()["configmaps"] == before


def test_addresses_have_the_domain_that_is_given(cluster: Cluster) -> None:
    assert cluster.install(DOMAIN="models.example.com").returncode == 0
    assert "models.example.com" in cluster.state()["configmaps"]["config-domain"]
    assert not cluster.state()["jobs"]


def test_a_load_balancer_without_an_ip_address_needs_a_domain(cluster: Cluster) -> None:
    cluster.set(broken=["load balancer"])
    done = cluster.install()
    assert done.returncode == 1
    assert "DOMAIN" in done.stderr


def test_a_cluster_that_is_too_old_is_left_alone(cluster: Cluster) -> None:
    cluster.set(minor="32")
    done = cluster.install()
    assert done.returncode == 1
    assert "Kubernetes 1.32" in done.stderr
    assert not [call for call in cluster.state()["calls"] if call[0] in ("apply", "patch")]


@pytest.mark.parametrize("namespace", ["knative-serving", "kourier-system", "cert-manager", "kserve"])
def test_what_does_not_get_ready_ends_the_installation_by_its_name(namespace: str, cluster: Cluster) -> None:
    cluster.set(broken=[namespace])
    done = cluster.install()
    assert done.returncode == 1
    assert f"kubectl get pods --namespace {namespace}" in done.stderr


def test_gpus_can_be_scheduled_where_the_platform_brings_no_device_plugin(
    cluster: Cluster, installed_state: dict[str, Any]
) -> None:
    assert installed_state["daemonsets"]
    cluster.set(version="v1.33.5-gke.1000")
    assert cluster.install().returncode == 0
    assert not cluster.state()["daemonsets"]


def test_the_check_of_an_empty_cluster_names_everything_and_changes_nothing(cluster: Cluster) -> None:
    done = cluster.install("--check")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("ok")] == ["ok       Kubernetes 1.33 or newer"]
    assert all(": " in line for line in lines if line.startswith("missing"))
    assert {call[0] for call in cluster.state()["calls"]} == {"get", "wait"}


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("config-network", "ingress-class", "istio.ingress.networking.knative.dev", "Kourier is Knative's ingress"),
        ("config-features", "kubernetes.podspec-tolerations", "disabled", "services may use tolerations"),
        ("inferenceservice-config", "ingress", '{"disableIstioVirtualHost": false}', "KServe without Istio"),
    ],
)
def test_the_check_finds_a_setting_that_was_changed(
    name: str, key: str, value: str, said: str, installed: Cluster
) -> None:
    settings = installed.state()["configmaps"]
    settings[name][key] = value
    installed.change(configmaps=settings)
    done = installed.install("--check")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("missing")]
    assert said in line


def test_the_check_finds_a_domain_and_a_device_plugin_that_are_not_there(installed: Cluster) -> None:
    settings = installed.state()["configmaps"] | {"config-domain": {"_example": "..."}}
    installed.change(daemonsets=[], configmaps=settings)
    said = installed.install("--check").stdout
    assert "missing  a domain for addresses" in said
    assert "missing  NVIDIA's device plugin" in said


def test_an_unknown_flag_prints_the_usage(cluster: Cluster) -> None:
    done = cluster.install("--cheque")
    assert done.returncode == 2
    assert "usage: install.sh" in done.stderr


def test_definitions_come_before_what_uses_them(cluster: Cluster) -> None:
    assert cluster.install(KNATIVE="1.2.3").returncode == 0
    calls = cluster.state()["calls"]
    applied = [call[-1].rpartition("/")[2] for call in calls if call[0] == "apply"]
    knative = ["serving-crds.yaml", "serving-core.yaml", "kourier.yaml", "serving-default-domain.yaml"]
    kserve = ["kserve.yaml", "kserve-cluster-resources.yaml"]
    assert applied == [*knative, "cert-manager.yaml", *kserve, "nvidia-device-plugin.yml"]
    assert all("knative-v1.2.3" in call[-1] for call in calls if call[0] == "apply" and "/knative" in call[-1])


def test_what_a_gpu_service_needs_is_allowed(installed_state: dict[str, Any]) -> None:
    features = installed_state["configmaps"]["config-features"]
    pod = yaml.safe_load((INFRA / "kubernetes" / "knative" / "service.yaml").read_text())["spec"]["template"]["spec"]
    needed = {"nodeSelector": "kubernetes.podspec-nodeselector", "tolerations": "kubernetes.podspec-tolerations"}
    assert all(features[needed[field]] == "enabled" for field in needed if field in pod)
