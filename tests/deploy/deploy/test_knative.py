"""Knative: shares of the traffic, the request to a candidate, and the objects that are applied."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy_clouds.cluster import KSVC, REVISION, FakeCluster
from deploy_clouds.journeys import Deployments, refuse


@pytest.fixture
def stage() -> Deployments:
    def flags(version: str) -> list[str]:
        return ["--image", "registry.example/remora:1", "--model", f"s3://bucket/models/{version}/"]

    return Deployments("knative", FakeCluster(), flags)


def requests(cluster: Any) -> list[str]:
    return [str(call.arguments["url"]) for call in cluster.calls if call.target == "http"]


def test_a_candidate_is_asked_at_its_tag_before_it_gets_traffic(stage: Deployments) -> None:
    cluster: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    cluster.calls.clear()
    assert stage.deploy("v2"), stage.text()
    assert requests(cluster) == ["http://candidate-digits.default.example.com/v2/models/digits/infer"]
    words = [call.operation for call in cluster.calls]
    assert words.index("POST") < words.index("patch")


def test_a_broken_candidate_leaves_no_revision(stage: Deployments) -> None:
    cluster: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    before = {name for kind, name in cluster.objects if kind == REVISION}
    cluster.fault = "model broken"
    assert not stage.deploy("v2")
    assert {name for kind, name in cluster.objects if kind == REVISION} == before
    assert "ExitCode" not in stage.text()
    assert "digits is as it was before" in stage.text()


def test_a_share_of_the_traffic_is_promoted_and_rolled_back(stage: Deployments) -> None:
    cluster: Any = stage.cloud
    assert not stage.deploy("v1", "--traffic", "10")
    assert stage.deploy("v1"), stage.text()
    assert stage.deploy("v2", "--traffic", "10"), stage.text()
    shares = [target["percent"] for target in cluster.objects[KSVC, "digits"]["spec"]["traffic"]]
    assert shares == [90, 10]
    assert stage.rollback(), stage.text()
    assert cluster.serving() == {"v1": 100}
    assert len(cluster.objects[KSVC, "digits"]["spec"]["traffic"]) == 1
    assert stage.deploy("v2", "--traffic", "10"), stage.text()
    assert stage.deploy("v2"), stage.text()
    assert cluster.serving() == {"v2": 100}


def test_the_rights_of_a_namespace_are_enough_to_deploy(stage: Deployments) -> None:
    """The cluster role `edit` does not read definitions, which belong to the cluster."""
    cluster: Any = stage.cloud
    get = cluster.do_get

    def without(words: Any, *rest: Any) -> Any:
        if words[0] in ("crd", "nodes"):
            raise refuse("denied", f'User "u" cannot get resource "{words[0]}" at the cluster scope')
        return get(words, *rest)

    cluster.do_get = without
    assert stage.deploy("v1"), stage.text()
    assert "definition services.serving.knative.dev: not checked" in stage.text()


def test_a_gateway_gets_the_services_name_as_host(stage: Deployments) -> None:
    cluster: Any = stage.cloud
    stage.place = ["--gateway", "http://10.0.0.1/"]
    hosts: list[str] = []

    def answer(call: Any) -> Any:
        hosts.append(call.arguments["headers"]["Host"])
        assert call.arguments["url"].startswith("http://10.0.0.1/v2/")
        return {"status": 200, "body": json.dumps({"outputs": [{"name": "y", "data": ["v1"]}]}).encode()}

    cluster.http = answer
    assert stage.deploy("v1"), stage.text()
    stage.invoke()
    assert hosts == ["candidate-digits.default.example.com", "digits.default.example.com"]


def test_the_pod_has_the_account_the_secret_and_a_required_gpu(stage: Deployments) -> None:
    cluster: Any = stage.cloud
    image = cluster.image
    cluster.image = lambda name: {**image(name), "labels": {"remora.cuda": "12"}}
    flags = ["--service-account", "reader", "--storage-secret", "keys", "--gpus", "1"]
    nodes = {"status": {"nodeInfo": {"architecture": "amd64"}, "allocatable": {"nvidia.com/gpu": "1"}}}
    get = cluster.do_get
    cluster.do_get = lambda words, *rest: {"items": [nodes]} if words[:1] == ["nodes"] else get(words, *rest)
    assert not stage.deploy("v1", *flags)
    assert "kubernetes.podspec-tolerations are not enabled" in stage.text(), "Knative's webhook would refuse the pod"
    assert stage.deploy("v1", *flags, "--no-tolerations"), stage.text()
    assert "tolerations" not in cluster.objects[KSVC, "digits"]["spec"]["template"]["spec"]
    cluster.features = {"kubernetes.podspec-tolerations": "enabled"}
    assert stage.deploy("v1", *flags), stage.text()
    template = cluster.objects[KSVC, "digits"]["spec"]["template"]
    container = template["spec"]["containers"][0]
    assert template["spec"]["serviceAccountName"] == "reader"
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert "--require-gpu" in container["args"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    annotations = template["metadata"]["annotations"]
    assert annotations["serving.knative.dev/progress-deadline"] == "900s", "a node with a GPU may have to come"
    assert annotations["autoscaling.knative.dev/scale-to-zero-pod-retention-period"] == "900s"
    assert "runAsUser" not in container["securityContext"], "OpenShift chooses the user"
    assert "@sha256:" in container["image"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--model", "models"), "reads a location, not this machine"),
        (("--model", "file:///x"), "expected one of s3://"),
        (("--max", "0"), "the maximum must be"),
        (("--traffic", "0"), "1 to 100 percent"),
        (("--namespace", "A"), "lower-case letters"),
    ],
)
def test_a_value_that_a_cluster_refuses_is_an_error_before_any_call(
    stage: Deployments, flags: tuple[str, str], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        stage.build("v1", *flags)
