"""Values for the chart in infra/helm/remora, with computed batches, memory and startup time."""

from __future__ import annotations

from typing import Any

from remora_deploy.manifests import pods
from remora_deploy.manifests.documents import document
from remora_deploy.manifests.facts import SPOT, Facts
from remora_deploy.pod import secret_variables, start_limit


def render(facts: Facts) -> str:
    """Return the YAML. Raises ValueError."""
    choices = facts.choices
    choices.check()
    if choices.least == 0:
        raise ValueError("--min-replicas 0: without a pod no request is counted; knative and kserve scale to zero")
    if facts.gpu and facts.image.endswith(":cpu"):
        raise ValueError(
            f"--image {facts.image}: the models use GPUs, and the image has no CUDA: pass cuda12 or cuda13"
        )
    model, rows = facts.busiest, max(facts.busiest.max_batch_size, 1)
    reasons = {
        "maxBatchSize": f"Two batches of {rows} for each of {model.instances} instances of '{model.name}' keep a pod "
        "busy; the chart computes the scaling targets from both numbers.",
        "resources": facts.reasons()["resources"],
        "startupSeconds": f"Loading took {facts.load_s:.2f} s on the machine that wrote this.",
    }
    return document(values(facts), reasons, f"helm install {facts.name} infra/helm/remora --values THIS")


def values(facts: Facts) -> dict[str, Any]:
    """Return the values."""
    choices = facts.choices
    least, most = facts.replicas(2, 4)
    found: dict[str, Any] = {
        "image": _image(facts.image),
        "models": {"uri": facts.location},
        "maxBatchSize": max(facts.busiest.max_batch_size, 1),
        "instances": facts.busiest.instances,
        "resources": {"cpu": "2", "memory": f"{facts.memory}Mi"},
        "startupSeconds": start_limit(facts.patience_s, facts.gpus),
        "envFrom": [secret_variables(choices.secret)] if choices.secret else [],
        "replicas": least,
    }
    if facts.gpu:
        found["gpu"] = {"count": facts.gpus, "resource": choices.gpu_resource}
    if choices.spot:
        found["nodeSelector"] = SPOT[choices.spot]
        if choices.spot == "aks":
            found["tolerations"] = [pods.SPOT_TOLERATION]
    if choices.service_account:
        found["serviceAccount"] = {"create": False, "name": choices.service_account}
    if choices.prometheus:
        found["keda"] = {"enabled": True, "prometheus": choices.prometheus, "min": least, "max": most}
    if choices.prometheus or choices.monitoring:
        found["serviceMonitor"] = {"enabled": True}
    return found


def _image(image: str) -> dict[str, str]:
    name, _, digest = image.partition("@")
    head, slash, tail = name.rpartition("/")
    repository, colon, tag = tail.partition(":")
    found = {"repository": f"{head}{slash}{repository}"}
    return found | ({"tag": tag} if colon else {}) | ({"digest": digest} if digest else {})
