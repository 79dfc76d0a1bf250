"""The pod on Kubernetes: `remora deploy` applies what `remora manifests` prints, with the same probes everywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from remora_deploy.deploy.knative import Knative
from remora_deploy.deploy.kserve import KServe
from remora_deploy.deploy.kubernetes import Place, Replicas
from remora_deploy.deploy.uploads import Source
from remora_deploy.manifests import find_renderer
from remora_deploy.manifests.facts import Choices, Facts, Model
from remora_deploy.manifests.pods import pod_of, scaling_of
from remora_deploy.pod import Mode, Pod, Scaling, deployment, knative_service, kserve_runtime

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


def test_models_of_a_claim_are_mounted_and_may_be_read_by_the_servers_group() -> None:
    pod = deployment(LABELLED, Pod("remora", claim="models"), Scaling(), 2)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "--model-repository=/models" in container["args"]
    assert container["volumeMounts"][0] == {"name": "models", "mountPath": "/models", "readOnly": True}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]


def test_an_objects_fields_without_a_value_are_left_out() -> None:
    pod = deployment(LABELLED, Pod("remora", claim="models", cpu=""), Scaling(), None)
    assert "replicas" not in pod["spec"]
    spec = pod["spec"]["template"]["spec"]
    assert not {"tolerations", "nodeSelector", "serviceAccountName"} & spec.keys()
    assert not {"resources", "env", "envFrom", "command"} & spec["containers"][0].keys()
