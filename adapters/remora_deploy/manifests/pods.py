"""Facts of a pod and of its scaling, from the measurements of models. Pure."""

from __future__ import annotations

from typing import Any

from remora_deploy.manifests.facts import MOST_IN_POD, SPOT, Facts
from remora_deploy.pod import Pod, Scaling, start_limit

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


def pod_of(facts: Facts) -> Pod:
    """Return the facts of a pod."""
    choices = facts.choices
    return Pod(
        image=facts.image,
        location=facts.location,
        memory=f"{facts.memory}Mi",
        gpus=facts.gpus,
        gpu_resource=choices.gpu_resource,
        account=choices.service_account,
        secret=choices.secret,
        node_labels=tuple(SPOT[choices.spot].items()) if choices.spot else (),
        tolerations=(SPOT_TOLERATION,) if choices.spot == "aks" else (),
    )


def scaling_of(facts: Facts, replicas: tuple[int, int], start_s: int, idle_s: int = 0) -> Scaling:
    """Return the limits of the replicas and of their load."""
    batch = (max(facts.busiest.max_batch_size, 1), facts.busiest.instances)
    start_s = start_limit(start_s, facts.gpus)
    return Scaling(*replicas, min(facts.concurrency, MOST_IN_POD), start_s, idle_s, batch)
