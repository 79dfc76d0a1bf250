"""PodMonitor and PrometheusRule of a service on Kubernetes. Pure."""

from __future__ import annotations

from typing import Any

from remora_deploy.manifests import pods
from remora_deploy.manifests.facts import Facts


def monitoring_objects(facts: Facts, selector: dict[str, str], port: str) -> list[dict[str, Any]]:
    """Return what scrapes the pods with the labels of ``selector`` at a named port, and the alerts."""
    endpoint = {"port": port, "path": "/metrics", "interval": "15s"}
    monitor = {"selector": {"matchLabels": selector}, "podMetricsEndpoints": [endpoint]}
    labels = {"app.kubernetes.io/name": "remora", "app.kubernetes.io/instance": facts.name}
    specs = {"PodMonitor": monitor, "PrometheusRule": alerts(facts.name)}
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": kind,
            "metadata": pods.metadata(facts, labels=labels),
            "spec": spec,
        }
        for kind, spec in specs.items()
    ]


def alerts(name: str, objective_s: float = 1.0) -> dict[str, Any]:
    """Return alerts for failures, slow requests and a queue that does not decrease."""
    place = f'pod=~"{name}-.*"'
    rules = [
        (
            "RemoraRequestsFail",
            f'sum by (model) (rate(nv_inference_request_failure{{{place},reason!="CANCELED"}}[5m])) > 0.01 * sum by '
            f"(model) (rate(nv_inference_request_success{{{place}}}[5m]))",
            "More than 1 % of the requests of {{ $labels.model }} fail.",
        ),
        (
            "RemoraRequestsAreSlow",
            "histogram_quantile(0.99, sum by (model, le) "
            f"(rate(remora_request_duration_seconds_bucket{{{place}}}[5m]))) > {objective_s:g}",
            "The 99th percentile of {{ $labels.model }} exceeds the objective.",
        ),
        (
            "RemoraQueueDoesNotDecrease",
            f"min_over_time(sum by (model) (nv_inference_pending_request_count{{{place}}})[10m:1m]) > 0",
            "Requests of {{ $labels.model }} have waited for ten minutes: more replicas are needed.",
        ),
    ]
    found = [
        {
            "alert": alert,
            "expr": expression,
            "for": "5m",
            "labels": {"severity": "warning"},
            "annotations": {"summary": summary},
        }
        for alert, expression, summary in rules
    ]
    return {"groups": [{"name": "remora", "rules": found}]}
