"""Manifests of a KServe runtime, per cluster and per namespace, and of a predictor."""

from __future__ import annotations

from typing import Any

from remora_deploy.manifests import pods, releases
from remora_deploy.manifests.documents import document, documents
from remora_deploy.manifests.facts import MOST_IN_POD, Facts
from remora_deploy.manifests.monitoring import monitoring_objects

_FORMAT = "remora"
_PORT = "user-port"
"""Knative gives the port this name and refuses one in the manifest; in Standard mode the manifest has it."""
_EXIT_S = 290
"""Below the grace of 300 s that KServe's revisions have."""
_STANDARD_EXIT_S = 20
"""Below Kubernetes' grace of 30 s, which applies in Standard mode."""


def render(facts: Facts) -> str:
    """Return three YAML documents. Raises ValueError."""
    choices = facts.choices
    choices.check()
    shares = choices.canary is not None or choices.release is not None
    if choices.mode == "standard" and (choices.least == 0 or shares):
        raise ValueError("--mode standard: neither scale to zero nor canaries, which are Knative's")
    if choices.secret:
        raise ValueError(
            "--secret: KServe's storage initializer reads the secrets of the service account; pass --service-account, "
            "and attach the secret to it"
        )
    rows = (("ClusterServingRuntime", "For the whole cluster: needs the rights of its administrator, once."),
            ("ServingRuntime", "For one namespace; it goes before the cluster's."))  # fmt: skip
    parts = [document(_runtime(facts, kind), _reasons(facts), header) for kind, header in rows]
    selector = {"serving.kserve.io/inferenceservice": facts.name}
    watched = monitoring_objects(facts, selector, _PORT) if choices.monitoring else []
    predictor, header = _predictor(facts), ""
    if choices.release is not None:
        version, _ = releases.the_canary(choices.release, "KServe")
        predictor = _predictor(releases.facts_of(facts, version or choices.release.stable))
        share = releases.whole_percents(choices.release).get(version)
        predictor["spec"]["predictor"]["canaryTrafficPercent"] = share
        header = releases.notes(choices.release)
    return "---\n".join((*parts, documents([predictor, *watched], _reasons(facts), header)))


def _reasons(facts: Facts) -> dict[str, str]:
    shared = facts.reasons()
    shared |= {
        "prometheus.kserve.io/port": "Metrics are on the port of requests.",
        "supportedModelFormats": "A separate format, selected by name: KServe's own runtimes keep their formats.",
        "containers": "KServe finds the container by its name, and its agent calls port 8080.",
        "args": "What a model is called whose files lie directly in /mnt/models, and how long requests may finish.",
        "scaleTarget": "70 % of the concurrency of a pod: the rest is room until another pod is there.",
        "canaryTrafficPercent": "The previous revision keeps the rest. 0 rolls back, and removing the line finishes.",
    }
    mode = "Scale to zero, canaries and concurrency limits are Knative's: the mode Standard has none of them."
    return shared | {"serving.kserve.io/deploymentMode": mode}


def _runtime(facts: Facts, kind: str) -> dict[str, Any]:
    knative = facts.choices.mode == "knative"
    exit_s = _EXIT_S if knative else _STANDARD_EXIT_S
    container = {
        "name": "kserve-container",
        "image": facts.image,
        "command": ["python", "-m", "remora_adapters.kserve"],
        "args": ["--model-name={{.Name}}", f"--exit-timeout-secs={exit_s}", *pods.flags(facts)],
        "ports": [{"name": "" if knative else _PORT, "containerPort": 8080, "protocol": "TCP"}],
        "securityContext": pods.security(),
        **pods.probes(8080, periodSeconds=2, timeoutSeconds=2),
        "resources": pods.resources(facts),
        "volumeMounts": [pods.SCRATCH_MOUNT],
    }
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": "remora", "namespace": "" if kind.startswith("Cluster") else facts.choices.namespace},
        "spec": {
            "annotations": {"prometheus.kserve.io/port": "8080", "prometheus.kserve.io/path": "/metrics"},
            "supportedModelFormats": [{"name": _FORMAT, "version": "1"}],
            "protocolVersions": ["v1", "v2", "grpc-v2"],
            "containers": [container],
            "volumes": [pods.SCRATCH],
        },
    }


def _predictor(facts: Facts) -> dict[str, Any]:
    concurrency = min(facts.concurrency, MOST_IN_POD)
    knative = facts.choices.mode == "knative"
    least, most = facts.replicas(0 if knative else 1, 4)
    scaling: dict[str, Any] = {"minReplicas": least, "maxReplicas": most}
    if knative:
        scaling |= {
            "scaleMetric": "concurrency",
            "scaleTarget": max(1, concurrency * 7 // 10),
            "containerConcurrency": concurrency,
            "canaryTrafficPercent": facts.choices.canary,
        }
    else:
        scaling |= {"scaleMetric": "cpu", "scaleTarget": 70}
    model = {
        "runtime": "remora",
        "modelFormat": {"name": _FORMAT},
        "protocolVersion": "v2",
        "storageUri": facts.location,
    }
    mode = {"serving.kserve.io/deploymentMode": "Knative" if knative else "Standard"}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": pods.metadata(facts, annotations={**mode, **pods.batch_annotations(facts)}),
        "spec": {"predictor": {**scaling, **pods.placement(facts), "model": model}},
    }
