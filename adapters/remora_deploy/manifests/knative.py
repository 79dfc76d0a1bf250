"""Manifest of a Knative Service, with computed concurrency and timeouts."""

from __future__ import annotations

from typing import Any

from remora_deploy.manifests import pods, releases
from remora_deploy.manifests.documents import documents
from remora_deploy.manifests.facts import Facts
from remora_deploy.manifests.monitoring import monitoring_objects
from remora_deploy.pod import SCRAPED_PORT, knative_service

_LONGEST_S = 600
"""Default limit of a request's duration in a cluster."""


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
    selector = {"serving.knative.dev/service": facts.name}
    watched = monitoring_objects(facts, selector, SCRAPED_PORT) if facts.choices.monitoring else []
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
    start_s, idle_s = max(_LONGEST_S, 2 * facts.patience_s), min(10 * facts.measured_s, 3600)
    scaling = pods.scaling_of(facts, facts.replicas(0, 4), start_s, idle_s)
    found = knative_service(pods.metadata(facts), pods.pod_of(facts), scaling, facts.choices.port_name)
    if facts.choices.canary is not None:
        share = facts.choices.canary
        found["spec"]["traffic"] = [
            {"latestRevision": True, "percent": share, "tag": "canary"},
            {"revisionName": f"{facts.name}-00001", "percent": 100 - share},
        ]
    return found
