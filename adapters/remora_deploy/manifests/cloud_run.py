"""Manifest of a Cloud Run service or job, for gcloud's commands `replace`."""

from __future__ import annotations

import math
from typing import Any

from remora_deploy.manifests import releases
from remora_deploy.manifests.documents import document
from remora_deploy.manifests.facts import Facts
from remora_deploy.manifests.jobs import render_cloud_run
from remora_deploy.pod import LIVENESS

_MOST_CONCURRENT = 1000
_GPU = "nvidia-l4"
_GPU_MIB = 16384
_LONGEST_START_S = 240


def render(facts: Facts) -> str:
    """Return the YAML. Raises ValueError."""
    facts.choices.check()
    if facts.gpus > 1:
        raise ValueError(f"--gpus {facts.gpus}: an instance of Cloud Run has one GPU")
    if facts.choices.secret:
        raise ValueError("--secret: Cloud Run reads buckets with the service account: pass --service-account")
    if facts.choices.job:
        return render_cloud_run(facts)
    model, rows = facts.busiest, max(facts.busiest.max_batch_size, 1)
    reasons = {
        "containerConcurrency": f"Two batches of {rows} for each of {model.instances} instances of '{model.name}': one "
        "runs while the next fills.",
        "resources": f"The process had {facts.memory_mib} MiB with all models loaded; twice that in GiB: files "
        "are in memory too.",
        "startupProbe": f"Loading took {facts.load_s:.2f} s on the machine that wrote this; the platform allows "
        f"{_LONGEST_START_S} s.",
        "run.googleapis.com/cpu-throttling": "A GPU needs its processors all the time.",
        "traffic": "Name the revision that serves: gcloud run revisions list.",
    }
    header = "gcloud run services replace THIS --region REGION"
    release = facts.choices.release
    if release is None:
        return document(service(facts), reasons, header)
    reasons["traffic"] = "The other revisions exist before: each is the template of an earlier file."
    version = releases.newest(release)
    found = service(releases.facts_of(facts, version))
    found["spec"]["template"]["metadata"]["name"] = releases.name_of(facts, version)
    found["spec"]["traffic"] = releases.targets(facts, release)
    return document(found, reasons, f"{header}\n{releases.notes(release)}")


def service(facts: Facts) -> dict[str, Any]:
    """Return the service."""
    choices = facts.choices
    least, most = facts.replicas(0, 4)
    annotations = {
        "autoscaling.knative.dev/minScale": str(least),
        "autoscaling.knative.dev/maxScale": str(most),
        "run.googleapis.com/startup-cpu-boost": "true",
    }
    memory = max(facts.memory, _GPU_MIB) if facts.gpu else facts.memory
    limits = {"cpu": "4" if facts.gpu else "2", "memory": f"{math.ceil(memory / 1024)}Gi"}
    if facts.gpu:
        limits["nvidia.com/gpu"] = "1"
        annotations["run.googleapis.com/cpu-throttling"] = "false"
        annotations["run.googleapis.com/gpu-zonal-redundancy-disabled"] = "true"
    container: dict[str, Any] = {
        "image": facts.image,
        "command": ["python"],
        "args": ["-m", "remora_adapters.cloud_run", *(["--require-gpu"] if facts.gpu else [])],
        "env": [{"name": "REMORA_MODEL_REPOSITORY", "value": facts.location}],
        "ports": [{"name": choices.port_name, "containerPort": 8080}],
        "resources": {"limits": limits},
        "startupProbe": {
            "httpGet": {"path": "/v2/health/ready", "port": 8080},
            "periodSeconds": 1,
            "timeoutSeconds": 1,
            "failureThreshold": min(facts.patience_s, _LONGEST_START_S),
        },
        "livenessProbe": {"httpGet": {"path": "/v2/health/live", "port": 8080}, **LIVENESS},
    }
    spec: dict[str, Any] = {
        "containerConcurrency": min(facts.concurrency, _MOST_CONCURRENT),
        "timeoutSeconds": 300,
        "serviceAccountName": choices.service_account,
        "containers": [container],
    }
    if facts.gpu:
        spec["nodeSelector"] = {"run.googleapis.com/accelerator": choices.instance or _GPU}
    found: dict[str, Any] = {"template": {"metadata": {"annotations": annotations}, "spec": spec}}
    if choices.canary is not None:
        found["traffic"] = [
            {"latestRevision": True, "percent": choices.canary, "tag": "canary"},
            {"revisionName": f"{facts.name}-00001", "percent": 100 - choices.canary},
        ]
    return {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": {"name": facts.name},
        "spec": found,
    }
