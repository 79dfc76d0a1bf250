"""Parts of Kubernetes objects that several manifests share. Pure."""

from __future__ import annotations

from typing import Any

from remora_deploy.manifests.facts import SPOT, Facts

SCRATCH_MOUNT = {"name": "scratch", "mountPath": "/tmp"}
SCRATCH: dict[str, Any] = {"name": "scratch", "emptyDir": {}}
_UID = 10001
SPOT_TOLERATION = {
    "key": "kubernetes.azure.com/scalesetpriority",
    "operator": "Equal",
    "value": "spot",
    "effect": "NoSchedule",
}
"""AKS taints its spot nodes."""


def metadata(facts: Facts, name: str = "", **more: Any) -> dict[str, Any]:
    """Return an object's metadata with the chosen namespace."""
    return {"name": name or facts.name, "namespace": facts.choices.namespace, **more}


def batch_annotations(facts: Facts) -> dict[str, str]:
    """Return the numbers that scaling is computed from."""
    busiest = facts.busiest
    return {
        "remora.dev/max-batch-size": str(max(busiest.max_batch_size, 1)),
        "remora.dev/instances": str(busiest.instances),
    }


def resources(facts: Facts) -> dict[str, Any]:
    """Return equal requests and limits."""
    size = {"cpu": "2", "memory": f"{facts.memory}Mi"}
    if facts.gpu:
        size[facts.choices.gpu_resource] = str(facts.gpus)
    return {"requests": size, "limits": dict(size)}


def flags(facts: Facts) -> list[str]:
    """Return the server's flags that follow from the choices."""
    return ["--require-gpu"] if facts.gpu else []


def env_from(facts: Facts) -> list[dict[str, Any]]:
    """Return the secret with storage credentials, if one is chosen."""
    return [{"secretRef": {"name": facts.choices.secret}}] if facts.choices.secret else []


def security() -> dict[str, Any]:
    """Return the security context of a container that runs without any rights."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": _UID,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def probes(port: int | str | None, **readiness: int) -> dict[str, Any]:
    """Return readiness and liveness probes; without a port the platform sets it."""
    at = {} if port is None else {"port": port}
    return {
        "readinessProbe": {"httpGet": {"path": "/v2/health/ready", **at}, **readiness},
        "livenessProbe": {
            "httpGet": {"path": "/v2/health/live", **at},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }


def placement(facts: Facts) -> dict[str, Any]:
    """Return account, node labels and tolerations of a pod."""
    selector = SPOT[facts.choices.spot] if facts.choices.spot else None
    tolerations: list[dict[str, str]] = []
    if facts.gpu:
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if facts.choices.spot == "aks":
        tolerations.append(SPOT_TOLERATION)
    return {
        "serviceAccountName": facts.choices.service_account,
        "nodeSelector": selector,
        "tolerations": tolerations,
    }
