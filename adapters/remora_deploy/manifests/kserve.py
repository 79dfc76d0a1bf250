"""Manifests of a KServe runtime, per cluster and per namespace, and of a predictor."""

from __future__ import annotations

from typing import Any

from remora_deploy.manifests import pods, releases
from remora_deploy.manifests.documents import document, documents
from remora_deploy.manifests.facts import Facts
from remora_deploy.manifests.monitoring import monitoring_objects
from remora_deploy.pod import (
    FULL_PERCENT,
    KSERVE_SECRET,
    SCRAPED_PORT,
    Mode,
    inference_service,
    kserve_predictor,
    kserve_runtime,
)

_RUNTIME = "remora"


def render(facts: Facts) -> str:
    """Return three YAML documents. Raises ValueError."""
    choices = facts.choices
    choices.check()
    shares = choices.canary is not None or choices.release is not None
    if choices.mode == "standard" and (choices.least == 0 or shares):
        raise ValueError("--mode standard: neither scale to zero nor canaries, which are Knative's")
    if choices.secret:
        raise ValueError(f"--secret: {KSERVE_SECRET}")
    rows = (("ClusterServingRuntime", "For the whole cluster: needs the rights of its administrator, once."),
            ("ServingRuntime", "For one namespace; it goes before the cluster's."))  # fmt: skip
    parts = [document(_runtime(facts, kind), _reasons(facts), header) for kind, header in rows]
    selector = {"serving.kserve.io/inferenceservice": facts.name}
    watched = monitoring_objects(facts, selector, SCRAPED_PORT) if choices.monitoring else []
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
        "scaleTarget": f"{FULL_PERCENT} % of the concurrency of a pod: the rest is room until another pod is there.",
        "canaryTrafficPercent": "The previous revision keeps the rest. 0 rolls back, and removing the line finishes.",
    }
    mode = "Scale to zero, canaries and concurrency limits are Knative's: the mode Standard has none of them."
    return shared | {"serving.kserve.io/deploymentMode": mode}


def _runtime(facts: Facts, kind: str) -> dict[str, Any]:
    namespace = "" if kind.startswith("Cluster") else facts.choices.namespace
    metadata = {"name": _RUNTIME, "namespace": namespace}
    return kserve_runtime(metadata, pods.pod_of(facts), _mode(facts), kind=kind)


def _predictor(facts: Facts) -> dict[str, Any]:
    mode = _mode(facts)
    replicas = facts.replicas(0 if mode is Mode.KNATIVE else 1, 4)
    scaling = pods.scaling_of(facts, replicas, facts.patience_s)
    predictor = kserve_predictor(pods.pod_of(facts), scaling, mode, _RUNTIME)
    if facts.choices.canary is not None:
        predictor["canaryTrafficPercent"] = facts.choices.canary
    return inference_service(pods.metadata(facts, annotations=scaling.annotations), predictor, mode)


def _mode(facts: Facts) -> Mode:
    return Mode(facts.choices.mode.capitalize())
