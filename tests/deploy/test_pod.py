"""The pod on Kubernetes: `remora deploy` applies what `remora manifests` prints, with the same probes everywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml

from conftest import ROOT
from remora_deploy.deploy.knative import Knative
from remora_deploy.deploy.kserve import KServe
from remora_deploy.deploy.kubernetes import Place, Replicas
from remora_deploy.deploy.uploads import Source
from remora_deploy.manifests import find_renderer
from remora_deploy.manifests.facts import Choices, Facts, Model
from remora_deploy.manifests.pods import pod_of, scaling_of
from remora_deploy.pod import LIVENESS, Mode, Pod, Scaling, deployment, knative_service, kserve_runtime

Object = dict[str, Any]

MODES = [*Mode]
CHOICES = [
    Choices(namespace="ml"),
    Choices(namespace="ml", gpus=2, gpu_resource="nvidia.com/mig-1g.10gb", service_account="reader", spot="aks"),
]


def facts_of(choices: Choices) -> Facts:
    models = (Model("m", 8, 2, False),)
    return Facts("digits", "registry.example/remora:1", "s3://bucket/models", models, 0.5, 120, choices)


def printed(platform: str, facts: Facts) -> list[Object]:
    return list(yaml.safe_load_all(find_renderer(platform)(facts)))


def applied(platform: Knative | KServe) -> list[Object]:
    steps = platform.steps({"service": None, "revisions": {}, "runtimes": {}})
    return [json.loads(step.call.arguments["input"]) for step in steps if step.call.arguments.get("input")]


def replicas_of(facts: Facts, scaling: Scaling) -> Replicas:
    return Replicas(pod_of(facts), Source(facts.location), scaling)


@pytest.mark.parametrize("choices", CHOICES, ids=["processors", "GPUs"])
def test_knative_gets_the_service_that_is_printed(choices: Choices) -> None:
    facts = facts_of(choices)
    scaling = scaling_of(facts, (0, 4), 600, 600)
    (service,) = applied(Knative(facts.name, Place(choices.namespace), replicas=replicas_of(facts, scaling)))
    # The command names revisions, because it moves traffic between them.
    assert service["spec"].pop("traffic")
    assert service["spec"]["template"]["metadata"].pop("name")
    assert [service] == printed("knative", facts)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choices", CHOICES, ids=["processors", "GPUs"])
def test_kserve_gets_the_runtime_and_predictor_that_are_printed(choices: Choices, mode: Mode) -> None:
    facts = facts_of(choices)._replace(choices=Choices(**{**as_dict(choices), "mode": mode.lower()}))
    scaling = scaling_of(facts, (0, 4), 600)
    place = Place(choices.namespace)
    runtime, service = applied(KServe(facts.name, place, mode, replicas=replicas_of(facts, scaling)))
    _, printed_runtime, printed_service = printed("kserve", facts)
    assert runtime["spec"] == printed_runtime["spec"]
    # The command has a runtime for each image, under a name of its contents.
    name = runtime["metadata"]["name"]
    assert printed_service["spec"]["predictor"]["model"].pop("runtime") == printed_runtime["metadata"]["name"]
    assert service["spec"]["predictor"]["model"].pop("runtime") == name
    assert service["spec"] == printed_service["spec"]


def as_dict(choices: Choices) -> Object:
    return {name: getattr(choices, name) for name in Choices.__slots__}


POD = Pod("registry.example/remora:1", "s3://bucket/models")
LABELLED = {"name": "digits", "labels": {"app": "digits"}}


def containers() -> list[Object]:
    service = knative_service({"name": "digits"}, POD, Scaling())
    return [
        *deployment(LABELLED, POD, Scaling(), 2)["spec"]["template"]["spec"]["containers"],
        *service["spec"]["template"]["spec"]["containers"],
        *(each for mode in MODES for each in kserve_runtime({"name": "digits"}, POD, mode)["spec"]["containers"]),
    ]


def test_a_server_may_take_five_seconds_to_say_that_it_lives() -> None:
    probes = [each["livenessProbe"] for each in containers()]
    assert {(each["timeoutSeconds"], each["failureThreshold"]) for each in probes} == {(5, 6)}


def test_a_server_on_cloud_run_may_take_as_long() -> None:
    (service,) = printed("cloud-run", facts_of(Choices()))
    (container,) = service["spec"]["template"]["spec"]["containers"]
    assert container["livenessProbe"]["timeoutSeconds"] == LIVENESS["timeoutSeconds"] == 5


def test_models_of_a_claim_are_mounted_and_may_be_read_by_the_servers_group() -> None:
    pod = deployment(LABELLED, Pod("remora", claim="models"), Scaling(), 2)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "--model-repository=/models" in container["args"]
    assert container["volumeMounts"][0] == {"name": "models", "mountPath": "/models", "readOnly": True}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert pod["securityContext"]["fsGroup"] == 10001


@pytest.mark.parametrize("value", ["false", "true"])
def test_a_pod_with_a_gpu_requires_it_unless_its_environment_decides(value: str) -> None:
    def arguments(**more: Any) -> list[str]:
        pods = deployment(LABELLED, Pod("remora", "s3://b/m", gpus=1, **more), Scaling(), 2)
        return list(pods["spec"]["template"]["spec"]["containers"][0]["args"])

    assert "--require-gpu" in arguments()
    assert "--require-gpu" not in arguments(environ=(("REMORA_REQUIRE_GPU", value),)), "the flag would win"


@pytest.mark.parametrize("claim", ["", "models"])
def test_no_pod_has_a_fixed_user_which_some_clusters_refuse_and_none_runs_as_root(claim: str) -> None:
    """OpenShift: "unable to validate against any security context constraint: runAsUser: Invalid value"."""
    pod = deployment(LABELLED, Pod("remora", claim=claim), Scaling(), 2)["spec"]["template"]["spec"]
    contexts = [
        pod.get("securityContext", {}),
        *(each["securityContext"] for each in (*pod["containers"], *containers())),
    ]
    assert not any("runAsUser" in each or "runAsGroup" in each for each in contexts)
    assert any(each.get("runAsNonRoot") for each in contexts)
    assert ("fsGroup" in contexts[0]) == bool(claim)


def test_an_objects_fields_without_a_value_are_left_out() -> None:
    pod = deployment(LABELLED, Pod("remora", claim="models", cpu=""), Scaling(), None)
    assert "replicas" not in pod["spec"]
    spec = pod["spec"]["template"]["spec"]
    assert not {"tolerations", "nodeSelector", "serviceAccountName"} & spec.keys()
    assert not {"resources", "env", "envFrom", "command"} & spec["containers"][0].keys()


CHART = Path("infra/helm/remora")
MANIFESTS = ROOT / "infra" / "kubernetes"
FIELD = re.compile(r"""["'\s](?:securityContext|volumeMounts|livenessProbe)["']?(?:\s*[=\]]|: *(?=[^"' ]))""")
"""A field of Kubernetes' containers, in YAML, in a literal of Python, or as an argument; its reason is a text."""
OTHER_PLATFORMS = re.compile(r"azure|cloud.?run")
"""Their documents have a probe of this name, and are no pods."""


def written_by_hand() -> set[Path]:
    generated = {MANIFESTS / name for name in run_path(str(MANIFESTS / "generate.py"))["files"]()}
    found = set()
    for root in ("core", "adapters", "infra", "containers", "docs"):
        for path in (ROOT / root).rglob("*.*"):
            name = path.relative_to(ROOT)
            if path.suffix not in (".py", ".yaml", ".yml", ".md", ".tpl", ".tf") or OTHER_PLATFORMS.search(str(name)):
                continue
            text = path.read_text(encoding="utf-8")
            if FIELD.search(text) and path not in generated:
                found.add(CHART if CHART in name.parents else name)
    return found


def test_a_container_is_written_by_hand_in_the_module_and_in_the_chart() -> None:
    assert written_by_hand() == {Path("adapters/remora_deploy/pod.py"), CHART}
