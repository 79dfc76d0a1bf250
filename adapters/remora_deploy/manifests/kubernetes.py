"""Manifests of a plain Deployment and the objects around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remora_deploy.manifests import pods
from remora_deploy.manifests.documents import documents
from remora_deploy.manifests.facts import Facts
from remora_deploy.manifests.jobs import render_kubernetes
from remora_deploy.manifests.monitoring import monitoring_objects
from remora_deploy.pod import FULL_PERCENT, deployment, load_target, start_limit

_OTLP = (4317, 4318)
_METADATA = {
    ("169.254.170.23/32",): (80,),
    ("169.254.169.254/32", "169.254.169.252/32"): (80, 988),
}
"""Addresses and ports of EKS Pod Identity and of GKE's workload identity; AKS projects a token into the pod."""


def render(facts: Facts) -> str:
    """Return the YAML documents. Raises ValueError."""
    facts.choices.check()
    if facts.choices.job:
        return render_kubernetes(facts)
    if facts.choices.least == 0:
        raise ValueError("--min-replicas 0: without a pod no request is counted; knative and kserve scale to zero")
    rows, model = max(facts.busiest.max_batch_size, 1), facts.busiest
    start_s = start_limit(facts.patience_s, facts.gpus)
    reasons = facts.reasons() | {
        "startupProbe": f"Loading took {facts.load_s:.2f} s on the machine that wrote this: {start_s} s until "
        "something is wrong.",
        "terminationGracePeriodSeconds": "preStop and the drain have to fit in.",
        "lifecycle": "The Service learns of the end before the server stops.",
        "strategy": "A spare GPU for a rollout is rarely there: the old pod goes first."
        if facts.gpu
        else "A new pod is ready before an old one ends.",
        "threshold": f"Two batches of {rows} for each of {model.instances} instances of '{model.name}' are "
        f"{facts.concurrency} at a time; scaling begins at {FULL_PERCENT} % of it.",
        "remora.dev/max-batch-size": f"Two batches of {rows} for each of {model.instances} instances of "
        f"'{model.name}' keep a pod busy.",
        "egress": "DNS, storage by HTTPS, traces by OTLP, and the metadata servers of EKS and GKE.",
    }
    return documents(list(_objects(facts)), reasons)


def _objects(facts: Facts) -> Iterator[dict[str, Any]]:
    labels = {"app.kubernetes.io/name": "remora", "app.kubernetes.io/instance": facts.name}
    yield _deployment(facts, labels)
    ports = [
        {"name": "http", "port": 8000, "targetPort": "http"},
        {"name": "grpc", "port": 8001, "targetPort": "grpc", "appProtocol": "kubernetes.io/h2c"},
    ]
    yield _object(facts, "v1", "Service", {"selector": labels, "ports": ports}, labels)
    budget = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": labels},
    }
    yield _object(facts, "policy/v1", "PodDisruptionBudget", budget, labels)
    yield _object(facts, "networking.k8s.io/v1", "NetworkPolicy", _policy(labels), labels)
    if facts.choices.prometheus:
        yield _object(facts, "keda.sh/v1alpha1", "ScaledObject", _scaled(facts), labels)
    if facts.choices.monitoring:
        yield from monitoring_objects(facts, labels, "metrics")


def _object(facts: Facts, version: str, kind: str, spec: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": pods.metadata(facts, labels=labels), "spec": spec}


def _deployment(facts: Facts, labels: dict[str, str]) -> dict[str, Any]:
    replicas = facts.replicas(2, 4)
    scaling = pods.scaling_of(facts, replicas, facts.patience_s)
    count = None if facts.choices.prometheus else replicas[0]
    return deployment(pods.metadata(facts, labels=labels), pods.pod_of(facts), scaling, count)


def _policy(labels: dict[str, str]) -> dict[str, Any]:
    clients = [{"podSelector": {"matchLabels": {"remora.dev/client": "true"}}}]
    calls = [{"port": port, "protocol": "TCP"} for port in ("http", "grpc")]
    scrapes = {
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "ports": [{"port": "metrics", "protocol": "TCP"}],
    }
    dns = {
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}],
        "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}],
    }
    traces = {
        "to": [{"namespaceSelector": {}}],
        "ports": [{"port": port, "protocol": "TCP"} for port in _OTLP],
    }
    servers = [
        {
            "to": [{"ipBlock": {"cidr": cidr}} for cidr in cidrs],
            "ports": [{"port": port, "protocol": "TCP"} for port in ports],
        }
        for cidrs, ports in _METADATA.items()
    ]
    return {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": clients, "ports": calls}, scrapes],
        "egress": [dns, {"ports": [{"port": 443, "protocol": "TCP"}]}, traces, *servers],
    }


def _scaled(facts: Facts) -> dict[str, Any]:
    least, most = facts.replicas(1, 4)
    place = f'pod=~"{facts.name}-.*"'
    held = f"sum(nv_inference_pending_request_count{{{place}}}) + sum(remora_requests_running{{{place}}})"
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": facts.choices.prometheus,
            "query": held,
            "threshold": str(load_target(facts.concurrency)),
            "ignoreNullValues": "true",
        },
    }
    return {
        "scaleTargetRef": {"name": facts.name},
        "pollingInterval": 15,
        "minReplicaCount": least,
        "maxReplicaCount": most,
        "triggers": [trigger],
    }
