"""Jobs that score a file with `remora score`, on Cloud Run and Kubernetes. Pure."""

from __future__ import annotations

import math
from typing import Any

from remora_deploy.manifests import pods
from remora_deploy.manifests.documents import document
from remora_deploy.manifests.facts import TASK, Facts
from remora_deploy.pod import job

_WORK = "/tmp/score"
_RETRIES = 3
_LONGEST_S = 86_400
_LONGEST_WITH_GPU_S = 3_600
"""Cloud Run's limit of a task with a GPU."""
_KEPT_S = 86_400
"""Time that Kubernetes keeps a finished job, for its log."""


def render_cloud_run(facts: Facts) -> str:
    """Return the YAML of a Cloud Run job."""
    reasons = {
        "resources": _memory_reason(facts) + " Input is streamed, results are in memory until they are uploaded.",
        "maxRetries": "A retry is a new container, which begins the file again.",
        "timeoutSeconds": "Of one task. The platform allows seven days, and an hour with a GPU.",
    }
    header = "gcloud run jobs replace THIS --region REGION\ngcloud run jobs execute NAME --region REGION --wait"
    return document(cloud_run_job(facts), reasons, header)


def cloud_run_job(facts: Facts) -> dict[str, Any]:
    """Return the job of Cloud Run."""
    choices = facts.choices
    limits = {"cpu": "4" if facts.gpu else "2", "memory": f"{math.ceil(facts.memory / 1024)}Gi"}
    annotations = {}
    if facts.gpu:
        limits |= {"memory": f"{max(16, math.ceil(facts.memory / 1024))}Gi", "nvidia.com/gpu": "1"}
        annotations["run.googleapis.com/gpu-zonal-redundancy-disabled"] = "true"
    words = _words(facts, "${CLOUD_RUN_TASK_INDEX}")
    # Cloud Run replaces no variables in arguments, so a shell does. The words have no character that it would read.
    several = {"command": ["sh"], "args": ["-c", f"exec python {' '.join(words)}"]}
    container: dict[str, Any] = {
        "image": facts.image,
        **(several if choices.tasks > 1 else {"command": ["python"], "args": words}),
        "resources": {"limits": limits},
    }
    task: dict[str, Any] = {
        "containers": [container],
        "maxRetries": _RETRIES,
        "timeoutSeconds": _LONGEST_WITH_GPU_S if facts.gpu else _LONGEST_S,
        "serviceAccountName": choices.service_account,
    }
    if facts.gpu:
        task["nodeSelector"] = {"run.googleapis.com/accelerator": choices.instance or "nvidia-l4"}
    execution: dict[str, Any] = {"spec": {"taskCount": choices.tasks, "template": {"spec": task}}}
    if annotations:
        execution = {"metadata": {"annotations": annotations}, **execution}
    return {
        "apiVersion": "run.googleapis.com/v1",
        "kind": "Job",
        "metadata": {"name": facts.name},
        "spec": {"template": execution},
    }


def render_kubernetes(facts: Facts) -> str:
    """Return the YAML of a Kubernetes job."""
    reasons = {
        "resources": _memory_reason(facts),
        "restartPolicy": "The container starts again in its pod and goes on with the first row that no finished "
        "segment has.",
        "ttlSecondsAfterFinished": "The log is there for a day.",
    }
    return document(
        kubernetes_job(facts), reasons, "kubectl apply -f THIS\nkubectl wait --for=condition=complete job/NAME"
    )


def kubernetes_job(facts: Facts) -> dict[str, Any]:
    """Return the job of Kubernetes."""
    tasks = facts.choices.tasks
    indexed = {"completions": tasks, "parallelism": tasks, "completionMode": "Indexed"} if tasks > 1 else {}
    labels = {"app.kubernetes.io/name": "remora", "app.kubernetes.io/instance": facts.name}
    words = _words(facts, "$(JOB_COMPLETION_INDEX)")
    spec = {**indexed, "backoffLimit": _RETRIES, "ttlSecondsAfterFinished": _KEPT_S}
    return job(pods.metadata(facts, labels=labels), pods.pod_of(facts), words, spec)


def _words(facts: Facts, index: str) -> list[str]:
    """Return the arguments of python, with the number of the task in the files' names."""
    source, target = (each.replace(TASK, index) for each in facts.choices.job)
    return ["-m", "remora", "score", facts.location, source, target, f"--work-directory={_WORK}"]


def _memory_reason(facts: Facts) -> str:
    return f"The process had {facts.memory_mib} MiB with all models loaded; twice that."
