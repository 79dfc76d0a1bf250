"""The manifests as kustomize builds them: validated strictly, held to the platforms' rules, numbers recomputed."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import manifests
from infra.manifests import Manifest
from infra.terraform import INFRA, ROOT
from remora.cache import LocalCache
from remora.management.metrics import MetricsExporter, page_text
from remora.startup import StartupReport
from remora.statistics import LATENCY_BOUNDS_NS, HeldLoad, Histogram, MetricsSettings, ServerLoad
from remora.system.clock import SystemClock
from remora.system.gpus import GpuReading
from remora_deploy.manifests.facts import Facts, Model
from remora_deploy.manifests.kserve import render

KUBERNETES = INFRA / "kubernetes"
SETS = (
    "base",
    "overlays/cpu",
    "overlays/gpu",
    "overlays/gpu-eks",
    "overlays/gpu-gke",
    "knative",
    "kserve",
    "kserve-graph",
    "monitoring",
)
SCHEMAS = Path(os.environ.get("CRD_SCHEMAS", ROOT.parent / "shared" / "schemas"))
SCRAPED = re.compile(r"\b(?:nv|remora)_\w+\b")
HELD = "remora_requests_held"


@pytest.fixture(scope="session")
def crds() -> dict[tuple[str, str], Manifest]:
    for module in ("jsonschema", "kubernetes_validate"):
        pytest.importorskip(module, reason=f"{module} is not installed here: make test-infra")
    if not SCHEMAS.exists():
        pytest.skip(f"no CRDs of Knative and KServe in {SCHEMAS}: CRD_SCHEMAS names a folder of them")
    return manifests.crd_schemas(SCHEMAS)


def objects(name: str) -> list[Manifest]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: its kustomize builds the manifests")
    return manifests.built(KUBERNETES / name)


def one(name: str, kind: str) -> Manifest:
    return next(each for each in objects(name) if each["kind"] == kind)


@pytest.mark.parametrize("name", SETS)
def test_every_object_fits_its_schema(name: str, crds: dict[tuple[str, str], Manifest]) -> None:
    found = [(each["kind"], problem) for each in objects(name) for problem in manifests.misfits(each, crds)]
    assert not found


@pytest.mark.parametrize("name", SETS)
def test_every_object_keeps_the_rules(name: str) -> None:
    assert not list(manifests.broken_rules(objects(name)))


@pytest.mark.parametrize(
    ("name", "kind", "path", "value"),
    [
        ("overlays/cpu", "Deployment", ("spec", "replica"), 2),
        ("overlays/cpu", "HorizontalPodAutoscaler", ("spec", "minReplica"), 2),
        ("overlays/gpu", "ScaledObject", ("spec", "minReplicas"), 0),
        ("knative", "Service", ("spec", "template", "spec", "containerConcurrency"), "eight"),
        ("kserve", "InferenceService", ("spec", "predictor", "minReplica"), 0),
        ("kserve", "ServingRuntime", ("spec", "supportedModelFormat"), []),
        ("monitoring", "ServiceMonitor", ("spec", "endpoint"), []),
    ],
)
def test_a_field_that_does_not_exist_is_found(
    name: str, kind: str, path: tuple[str, ...], value: Any, crds: dict[tuple[str, str], Manifest]
) -> None:
    wrong = copy.deepcopy(one(name, kind))
    place = wrong
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert list(manifests.misfits(wrong, crds))


def _first_container(manifest: Manifest) -> Manifest:
    return manifests.containers(manifest)[0]


BREAKAGES: dict[str, tuple[str, str, Callable[[Manifest], Any]]] = {
    "as root": ("base", "Deployment", lambda m: m["spec"]["template"]["spec"]["securityContext"].update(runAsUser=0)),
    "drained too late": (
        "base",
        "Deployment",
        lambda m: m["spec"]["template"]["spec"].update(terminationGracePeriodSeconds=30),
    ),
    "writable root": (
        "knative",
        "Service",
        lambda m: _first_container(m)["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    "reserved port": (
        "knative",
        "Service",
        lambda m: _first_container(m).update(ports=[{"name": "http1", "containerPort": 9090}]),
    ),
    "PORT taken": ("knative", "Service", lambda m: _first_container(m).update(env=[{"name": "PORT", "value": "1"}])),
    "no readiness": ("knative", "Service", lambda m: _first_container(m).pop("readinessProbe")),
    "no batch": ("knative", "Service", lambda m: m["spec"]["template"]["spec"].update(containerConcurrency=1)),
    "other name": ("kserve", "ServingRuntime", lambda m: _first_container(m).update(name="remora")),
    "grabs models": (
        "kserve",
        "ServingRuntime",
        lambda m: m["spec"]["supportedModelFormats"][0].update(autoSelect=True),
    ),
    "zero without Knative": (
        "kserve",
        "InferenceService",
        lambda m: m["metadata"]["annotations"].update({"serving.kserve.io/deploymentMode": "Standard"}),
    ),
    "count set back": ("overlays/cpu", "Deployment", lambda m: m["spec"].update(replicas=1)),
    "selects nothing": ("base", "Service", lambda m: m["spec"].update(selector={"app": "other"})),
}


@pytest.mark.parametrize(("name", "kind", "breaks"), BREAKAGES.values(), ids=BREAKAGES)
def test_a_broken_rule_is_found(name: str, kind: str, breaks: Callable[[Manifest], Any]) -> None:
    together = copy.deepcopy(objects(name))
    breaks(next(each for each in together if each["kind"] == kind))
    assert list(manifests.broken_rules(together))


# -- arithmetic -------------------------------------------------------------------------------------------------------


def annotations_of(manifest: Manifest) -> Manifest:
    template: Manifest = manifest["spec"].get("template", {}).get("metadata", {}).get("annotations", {})
    return template if "remora.dev/instances" in template else manifest["metadata"]["annotations"]


def test_the_hpa_aims_at_seventy_percent_of_two_batches() -> None:
    (metric,) = one("overlays/cpu", "HorizontalPodAutoscaler")["spec"]["metrics"]
    aimed = int(metric["pods"]["target"]["averageValue"])
    assert aimed == manifests.target_of(annotations_of(one("overlays/cpu", "Deployment")))


def test_keda_aims_at_the_same() -> None:
    (trigger,) = one("overlays/gpu", "ScaledObject")["spec"]["triggers"]
    assert int(trigger["metadata"]["threshold"]) == manifests.target_of(
        annotations_of(one("overlays/gpu", "Deployment"))
    )


def test_knative_admits_two_batches_and_aims_at_seventy_percent() -> None:
    service = one("knative", "Service")
    spec, annotations = service["spec"]["template"]["spec"], annotations_of(service)
    assert spec["containerConcurrency"] == manifests.concurrency_of(annotations)
    assert annotations["autoscaling.knative.dev/target-utilization-percentage"] == "70"


def test_kserve_does_as_knative() -> None:
    predictor = one("kserve", "InferenceService")
    wanted = annotations_of(predictor)
    spec = predictor["spec"]["predictor"]
    assert spec["containerConcurrency"] == manifests.concurrency_of(wanted)
    assert spec["scaleTarget"] == manifests.target_of(wanted)


@pytest.mark.parametrize(
    ("current", "held", "wanted"),
    [(2, 0, 0), (2, 44, 2), (2, 46, 2), (2, 66, 3), (2, 200, 10), (5, 60, 3), (0, 1, 1)],
)
def test_replicas_follow_what_the_pods_hold(current: int, held: int, wanted: int) -> None:
    assert manifests.desired_replicas(current, held, target=22) == wanted


def test_a_pod_outlives_the_pause_between_requests_and_the_rollout_waits_for_a_node() -> None:
    annotations = annotations_of(one("knative", "Service"))
    assert manifests.seconds(annotations["autoscaling.knative.dev/scale-to-zero-pod-retention-period"]) == 600
    assert manifests.seconds(annotations["serving.knative.dev/progress-deadline"]) >= 900


# -- monitoring -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """The names on the metrics page, with the series of histograms."""
    load = ServerLoad({200: 1}, Histogram((0,) * (len(LATENCY_BOUNDS_NS) + 1), 0), HeldLoad(0, 0, 1, {}))
    cache, gpu = LocalCache(1 << 20, SystemClock.monotonic_ns), GpuReading("GPU-1", 0.5, 1000, 250, 65.0, 300.0, 130.0)
    exporter = MetricsExporter(MetricsSettings(), SystemClock(), cache, lambda: [gpu])
    page = page_text(exporter.families([], StartupReport(True, 1, (), (), ()), load=load))
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    series = {
        f"{name}{end}" for name, kind in kinds.items() if kind == "histogram" for end in ("_bucket", "_sum", "_count")
    }
    return set(kinds) | series


def test_the_dashboard_asks_for_metrics_that_there_are(exported: set[str]) -> None:
    dashboard = json.loads((KUBERNETES / "monitoring" / "dashboard.json").read_text())
    asked = {
        name for panel in dashboard["panels"] for target in panel["targets"] for name in SCRAPED.findall(target["expr"])
    }
    asked |= {name for each in dashboard["templating"]["list"] for name in SCRAPED.findall(str(each.get("query", "")))}
    assert asked
    assert not asked - exported


def test_the_dashboard_has_no_panel_twice_and_none_over_another() -> None:
    dashboard = json.loads((KUBERNETES / "monitoring" / "dashboard.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    squares = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(squares) == len(set(squares))
    assert max(x for x, _ in squares) < 24


def test_scaling_asks_for_metrics_that_there_are(exported: set[str]) -> None:
    (trigger,) = one("overlays/gpu", "ScaledObject")["spec"]["triggers"]
    assert set(SCRAPED.findall(trigger["metadata"]["query"])) <= exported
    rule = (KUBERNETES / "scaling" / "hpa" / "prometheus-adapter-values.yml").read_text()
    (metric,) = one("overlays/cpu", "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == HELD
    assert set(SCRAPED.findall(rule)) - {HELD} <= exported
    (custom,) = yaml.safe_load(rule)["rules"]["custom"]
    assert custom["name"]["as"] == HELD


def test_alerts_ask_for_metrics_that_there_are(exported: set[str]) -> None:
    (group,) = one("monitoring", "PrometheusRule")["spec"]["groups"]
    asked = {rule["alert"]: set(SCRAPED.findall(rule["expr"])) for rule in group["rules"]}
    assert all(asked.values()), asked
    assert set().union(*asked.values()) <= exported


def test_the_monitor_scrapes_a_port_that_the_service_has() -> None:
    monitor, service = one("monitoring", "ServiceMonitor"), one("base", "Service")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "remora"


@pytest.mark.parametrize(
    ("name", "label"), [("knative", "serving.knative.dev/service"), ("kserve", "serving.kserve.io/inferenceservice")]
)
def test_pods_of_the_serverless_platforms_are_scraped_at_their_only_port(name: str, label: str) -> None:
    service = next(each for each in objects(name) if each["kind"] in ("Service", "InferenceService"))
    monitor = next(each for each in objects("monitoring") if each["metadata"]["name"] == f"remora-{name}")
    assert monitor["spec"]["selector"]["matchLabels"] == {label: service["metadata"]["name"]}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "user-port", "Knative names the container's port so in the pod"


# -- storage and network ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("overlays/gpu", "Deployment"), ("knative", "Service")])
def test_a_pod_that_pays_for_a_gpu_is_not_ready_while_it_is_idle(name: str, kind: str) -> None:
    (container,) = one(name, kind)["spec"]["template"]["spec"]["containers"]
    required = {"name": "REMORA_REQUIRE_GPU", "value": "true"} in container.get("env", ())
    assert required or "--require-gpu" in container.get("args", ())


def test_the_runtime_of_kserve_with_a_gpu_requires_it() -> None:
    (container,) = one("kserve", "ServingRuntime")["spec"]["containers"]
    assert "--require-gpu" in container["args"]


@pytest.mark.parametrize("name", ["base", "overlays/gpu", "knative", "kserve"])
def test_pods_run_as_an_account_that_can_be_given_the_right_to_read_models(name: str) -> None:
    together = objects(name)
    accounts = {each["metadata"]["name"] for each in together if each["kind"] == "ServiceAccount"}
    pods = [
        manifests.pod_of(each)
        for each in together
        if each["kind"] in ("Deployment", "Service") and "template" in each["spec"]
    ]
    pods += [each["spec"]["predictor"] for each in together if each["kind"] == "InferenceService"]
    assert [pod["serviceAccountName"] for pod in pods] == ["remora"]
    assert accounts == {"remora"}


@pytest.mark.parametrize("name", ["base", "knative"])
def test_keys_and_region_of_a_bucket_come_from_a_secret_that_need_not_be_there(name: str) -> None:
    (pod,) = [each for each in objects(name) if manifests.containers(each)]
    (source,) = _first_container(pod)["envFrom"]
    assert source == {"secretRef": {"name": "remora-storage", "optional": True}}


def egress_of(name: str) -> set[tuple[str, int]]:
    """The address (* for any) and port of all that the policy of a set lets out."""
    return {
        (place.get("ipBlock", {}).get("cidr", "*"), port["port"])
        for rule in one(name, "NetworkPolicy")["spec"]["egress"]
        for place in rule.get("to", [{}])
        for port in rule["ports"]
    }


def test_traces_reach_a_collector_and_credentials_come_where_the_platform_has_a_server_for_them() -> None:
    assert {("*", 4317), ("*", 4318), ("*", 443), ("*", 53)} == egress_of("overlays/gpu")
    assert egress_of("overlays/gpu-eks") - egress_of("overlays/gpu") == {("169.254.170.23/32", 80)}
    google = {(f"169.254.169.{host}/32", port) for host in (252, 254) for port in (80, 988)}
    assert egress_of("overlays/gpu-gke") - egress_of("overlays/gpu") == google


def test_the_runtime_does_not_take_the_name_of_the_one_that_is_generated() -> None:
    facts = Facts("digits", "remora:cuda13", "s3://bucket/models", (Model("m", 8, 1, True),), 0.5, 120)
    generated = {each["metadata"]["name"] for each in yaml.safe_load_all(render(facts)) if "Runtime" in each["kind"]}
    assert generated == {"remora"}
    runtime = one("kserve", "ServingRuntime")["metadata"]["name"]
    assert runtime not in generated
    assert one("kserve", "InferenceService")["spec"]["predictor"]["model"]["runtime"] == runtime


@pytest.mark.parametrize("name", ["knative", "kserve", "overlays/gpu"])
def test_the_documented_command_leaves_no_name_of_an_example(name: str) -> None:
    page = (ROOT / "docs" / "infrastructure.md").read_text()
    command = re.search(r"\| (sed -e 's\|remora:cuda13\|.*?) \| kubectl apply -f -", page, re.DOTALL)
    assert command
    sent = yaml.safe_dump_all(objects(name))
    edit = command[1].replace("\\\n", " ").replace("REGISTRY", "registry.example").replace("DIGEST", "0" * 64)
    done = subprocess.run(["sh", "-c", edit], input=sent, capture_output=True, text=True, check=True)
    assert "registry.example/remora@sha256:" in done.stdout
    assert not re.findall(r"remora:cuda13|example-models", done.stdout)


# -- the files --------------------------------------------------------------------------------------------------------


def test_the_files_with_a_pod_are_those_that_the_module_of_the_pod_makes() -> None:
    check = [sys.executable, str(KUBERNETES / "generate.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_yaml_file_is_part_of_a_set() -> None:
    listed = set()
    for path in KUBERNETES.rglob("kustomization.yaml"):
        document = yaml.safe_load(path.read_text())
        named = [*document.get("resources", ()), *(each.get("path", "") for each in document.get("patches", ()))]
        listed |= {path.parent / name for name in named if name.endswith(".yaml")}
    written = {path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml"}
    assert written == listed


def test_every_kustomization_is_built_by_itself_or_as_part_of_one_that_is() -> None:
    files = {path.parent: yaml.safe_load(path.read_text()) for path in KUBERNETES.rglob("kustomization.yaml")}
    built, reached = [KUBERNETES / name for name in SETS], set()
    while built:
        folder = built.pop()
        reached.add(folder)
        named = [*files[folder].get("resources", ()), *files[folder].get("components", ())]
        built += [(folder / name).resolve() for name in named if (folder / name).is_dir()]
    assert reached == set(files)
