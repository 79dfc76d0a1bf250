"""Manifest of a Knative Service, with computed concurrency and timeouts."""

from __future__ import annotations

from typing import Any

from remora_deploy.manifests import pods, releases
from remora_deploy.manifests.documents import documents
from remora_deploy.manifests.facts import MOST_IN_POD, Facts
from remora_deploy.manifests.monitoring import monitoring_objects

_LONGEST_S = 600
"""Default limit of a request's duration in a cluster."""
_TIMEOUT_S = 300


def render(facts: Facts) -> str:
    """Return the YAML. Raises ValueError."""
    facts.choices.check()
    idle = "--require-gpu: not ready while the GPU is idle. " if facts.gpu else ""
    reasons = facts.reasons() | {
        "ports": "The one port there is. Named h2c, gateways speak HTTP/2 to it, so gRPC; probes stay as they are.",
        "readinessProbe": "Without one Knative takes a bound port for a ready pod.",
        "args": f"{idle}The drain ends before the grace of timeoutSeconds.",
        "traffic": "LATEST is the revision of this file. Name the revision that serves: kubectl get revisions.",
    }
    # Knative gives the port of requests this name; there is no other.
    selector = {"serving.knative.dev/service": facts.name}
    watched = monitoring_objects(facts, selector, "user-port") if facts.choices.monitoring else []
    release = facts.choices.release
    if release is None:
        return documents([service(facts), *watched], reasons)
    reasons["traffic"] = "The other revisions exist before: each is the template of an earlier file."
    version = releases.newest(release)
    found = service(releases.facts_of(facts, version))
    found["spec"]["template"]["metadata"]["name"] = releases.name_of(facts, version)
    found["spec"]["traffic"] = releases.targets(facts, release)
    return documents([found, *watched], reasons, releases.notes(release))


def service(facts: Facts) -> dict[str, Any]:
    """Return the Service."""
    least, most = facts.replicas(0, 4)
    annotations = pods.batch_annotations(facts)
    annotations |= {f"autoscaling.knative.dev/{key}": value for key, value in _scaling(facts, least, most).items()}
    annotations["serving.knative.dev/progress-deadline"] = f"{max(_LONGEST_S, 2 * facts.patience_s)}s"
    container: dict[str, Any] = {
        "image": facts.image,
        "command": ["python", "-m", "remora_adapters.knative"],
        "args": [*pods.flags(facts), f"--exit-timeout-secs={_TIMEOUT_S - 10}"],
        "env": [{"name": "REMORA_MODEL_REPOSITORY", "value": facts.location}],
        "envFrom": pods.env_from(facts),
        "ports": [{"name": facts.choices.port_name, "containerPort": 8080}],
        "securityContext": pods.security(),
        **pods.probes(None),
        "resources": pods.resources(facts),
        "volumeMounts": [pods.SCRATCH_MOUNT],
    }
    spec: dict[str, Any] = {
        "template": {
            "metadata": {"annotations": annotations},
            "spec": {
                **pods.placement(facts),
                "containerConcurrency": min(facts.concurrency, MOST_IN_POD),
                "timeoutSeconds": _TIMEOUT_S,
                "containers": [container],
                "volumes": [pods.SCRATCH],
            },
        }
    }
    if facts.choices.canary is not None:
        share = facts.choices.canary
        spec["traffic"] = [
            {"latestRevision": True, "percent": share, "tag": "canary"},
            {"revisionName": f"{facts.name}-00001", "percent": 100 - share},
        ]
    return {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": pods.metadata(facts),
        "spec": spec,
    }


def _scaling(facts: Facts, least: int, most: int) -> dict[str, str]:
    return {
        "class": "kpa.autoscaling.knative.dev",
        "metric": "concurrency",
        "target-utilization-percentage": "70",
        "min-scale": str(least),
        "max-scale": str(most),
        "initial-scale": str(max(1, least)),
        "scale-to-zero-pod-retention-period": f"{min(10 * facts.patience_s, 3600)}s",
    }
