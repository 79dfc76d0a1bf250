"""What deployments to a cluster share: quotas, nodes, conditions and errors of kubectl."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from remora_deploy.deploy.kubernetes import condition, node_problem, pod_reason, quantity, quota_problem
from remora_deploy.deploy.programs import error_of
from remora_deploy.pod import Pod

POD = Pod("registry.example/remora:1", "s3://bucket/models/")


@pytest.mark.parametrize(
    ("text", "number"),
    [("500m", 0.5), ("2", 2.0), ("1Gi", 2**30), ("1G", 1e9), ("1.5Ki", 1536), ("x", 0.0), ("", 0.0)],
)
def test_a_quantity_has_kubernetes_units(text: str, number: float) -> None:
    assert quantity(text) == number


@pytest.mark.parametrize(
    ("hard", "used", "problem"),
    [
        ({"requests.cpu": "8"}, {"requests.cpu": "6"}, ""),
        ({"requests.cpu": "8"}, {"requests.cpu": "6500m"}, "2 of requests.cpu exceed the quota: 6500m of 8 are used"),
        ({"limits.memory": "4Gi"}, {"limits.memory": "1Gi"}, "4Gi of limits.memory"),
        ({"requests.nvidia.com/gpu": "0"}, {}, "1 of requests.nvidia.com/gpu"),
        ({"configmaps": "0"}, {}, ""),
    ],
)
def test_a_quota_is_compared_with_the_pod(hard: dict[str, str], used: dict[str, str], problem: str) -> None:
    pod = replace(POD, gpus=1) if "gpu" in problem else POD
    found = quota_problem({"items": [{"status": {"hard": hard, "used": used}}]}, pod)
    assert problem in found
    assert bool(problem) == bool(found)


def node(architecture: str, **allocatable: str) -> dict[str, Any]:
    return {"status": {"nodeInfo": {"architecture": architecture}, "allocatable": allocatable}}


def test_nodes_need_the_architecture_and_the_gpu() -> None:
    assert node_problem({"items": []}, POD) == "", "nodes may be added on demand"
    assert "are arm64" in node_problem({"items": [node("arm64")]}, POD)
    assert node_problem({"items": [node("arm64"), node("amd64")]}, POD) == ""
    assert "no node offers nvidia.com/gpu" in node_problem({"items": [node("amd64")]}, replace(POD, gpus=1))
    gpu = node("amd64", **{"nvidia.com/gpu": "1"})
    assert node_problem({"items": [gpu]}, replace(POD, gpus=1)) == ""


def test_a_condition_of_an_older_generation_does_not_count() -> None:
    ready = {"observedGeneration": 1, "conditions": [{"type": "Ready", "status": "True"}]}
    assert condition({"metadata": {"generation": 1}, "status": ready}) == ("True", "")
    assert condition({"metadata": {"generation": 2}, "status": ready})[0] == "Unknown"
    assert condition({})[0] == "Unknown"


def test_a_pods_waiting_container_is_the_reason() -> None:
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    pods = {"items": [{"status": {"containerStatuses": [{"state": state}]}}]}
    assert pod_reason({"pods": pods}) == "ImagePullBackOff: no such image"
    creating = {"waiting": {"reason": "ContainerCreating"}}
    assert pod_reason({"pods": {"items": [{"status": {"containerStatuses": [{"state": creating}]}}]}}) == ""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('Error from server (NotFound): services "x" not found', "missing"),
        ('Error from server (Forbidden): services is forbidden: User "u" cannot create', "denied"),
        ('Error from server (Forbidden): pods "x" is forbidden: exceeded quota: q', "quota"),
        ("Unable to connect to the server: dial tcp 127.0.0.1:6443: connect: connection refused", "unreachable"),
        ('Error from server (AlreadyExists): "x" already exists', "exists"),
        ("error: something else", "failed"),
    ],
)
def test_errors_of_kubectl_have_kinds(text: str, kind: str) -> None:
    assert error_of(text, 1).kind == kind
