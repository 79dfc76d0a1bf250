"""Kubernetes objects against their schemas, and against what schemas leave to webhooks and to experience.

Built-in kinds are validated as the API server's strict mode does; Knative's and KServe's by their CRDs; KEDA's and the
Prometheus operator's by closed schemas of the fields used here.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

KUBERNETES = "1.34"
RESERVED_PORTS = {8008, 8012, 8013, 8022, 8112, 9090, 9091}
"""Knative's own in every pod: its webhook refuses them as container ports."""
_TEXT: Manifest = {"type": "string"}
_COUNT: Manifest = {"type": "integer", "minimum": 0}


def _closed(required: Sequence[str] = (), /, **properties: Any) -> Manifest:
    return {"type": "object", "required": list(required), "additionalProperties": False, "properties": properties}


_LABELS: Manifest = {"type": "object", "additionalProperties": _TEXT}
_ENVELOPE = {
    "apiVersion": _TEXT,
    "kind": _TEXT,
    "metadata": _closed(["name"], name=_TEXT, namespace=_TEXT, labels=_LABELS),
}
OWN_SCHEMAS: dict[tuple[str, str], Manifest] = {
    ("keda.sh/v1alpha1", "ScaledObject"): _closed(
        ["spec"],
        **_ENVELOPE,
        spec=_closed(
            ["scaleTargetRef", "triggers"],
            scaleTargetRef=_closed(["name"], name=_TEXT, kind=_TEXT, apiVersion=_TEXT),
            pollingInterval=_COUNT,
            cooldownPeriod=_COUNT,
            minReplicaCount=_COUNT,
            maxReplicaCount=_COUNT,
            triggers={
                "type": "array",
                "items": _closed(
                    ["type", "metadata"],
                    type={"enum": ["prometheus"]},
                    metricType={"enum": ["AverageValue", "Value"]},
                    metadata=_closed(
                        ["serverAddress", "query", "threshold"],
                        serverAddress=_TEXT,
                        query=_TEXT,
                        threshold=_TEXT,
                        activationThreshold=_TEXT,
                        ignoreNullValues={"enum": ["true", "false"]},
                    ),
                ),
            },
        ),
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): _closed(
        ["spec"],
        **_ENVELOPE,
        spec=_closed(
            ["selector", "podMetricsEndpoints"],
            selector=_closed([], matchLabels=_LABELS),
            podMetricsEndpoints={
                "type": "array",
                "items": _closed(["port"], port=_TEXT, path=_TEXT, interval=_TEXT, scrapeTimeout=_TEXT),
            },
        ),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _closed(
        ["spec"],
        **_ENVELOPE,
        spec=_closed(
            ["groups"],
            groups={
                "type": "array",
                "items": _closed(
                    ["name", "rules"],
                    name=_TEXT,
                    rules={
                        "type": "array",
                        "items": _closed(
                            ["alert", "expr"],
                            alert=_TEXT,
                            expr=_TEXT,
                            labels=_LABELS,
                            annotations=_LABELS,
                            **{"for": _TEXT},
                        ),
                    },
                ),
            },
        ),
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _closed(
        ["spec"],
        **_ENVELOPE,
        spec=_closed(
            ["selector", "endpoints"],
            jobLabel=_TEXT,
            selector=_closed([], matchLabels=_LABELS),
            endpoints={
                "type": "array",
                "items": _closed(["port"], port=_TEXT, path=_TEXT, interval=_TEXT, scrapeTimeout=_TEXT),
            },
        ),
    ),
}


def built(folder: Path) -> list[Manifest]:
    """What `kubectl apply -k` would send."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


# -- schemas ----------------------------------------------------------------------------------------------------------


def crd_schemas(folder: Path) -> dict[tuple[str, str], Manifest]:
    """The JSON schemas of the CRDs in a folder, by apiVersion and kind, as strict as the API server."""
    found = {}
    for path in sorted(folder.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document and document.get("kind") == "CustomResourceDefinition":
                spec = document["spec"]
                for version in spec["versions"]:
                    key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                    schema = strict(version["schema"]["openAPIV3Schema"])
                    schema["properties"] |= {"apiVersion": _TEXT, "kind": _TEXT, "metadata": {"type": "object"}}
                    found[key] = schema
    return found


def strict(schema: Any) -> Any:
    """OpenAPI v3 of a CRD as JSON Schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {
        key: value for key, value in schema.items() if not key.startswith("x-") and key not in ("format", "nullable")
    }
    for key in ("items", "additionalProperties", "allOf", "anyOf", "oneOf", "not"):
        if key in kept:
            kept[key] = strict(kept[key])
    if "properties" in kept:
        kept["properties"] = {name: strict(each) for name, each in kept["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept.setdefault("additionalProperties", False)
    return {"anyOf": [kept, {"type": "null"}]} if schema.get("nullable") else kept


def misfits(manifest: Manifest, crds: dict[tuple[str, str], Manifest]) -> Iterator[str]:
    """What a manifest's schema has against it."""
    import jsonschema
    import kubernetes_validate

    key = (manifest["apiVersion"], manifest["kind"])
    known = crds | OWN_SCHEMAS
    if key in known:
        for error in jsonschema.Draft7Validator(known[key]).iter_errors(manifest):
            yield f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
        return
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        yield str(error)


# -- rules that no schema holds ---------------------------------------------------------------------------------------


def containers(manifest: Manifest) -> list[Manifest]:
    """The containers that an object describes, wherever its kind has them."""
    return list(pod_of(manifest).get("containers", ()))


def pod_of(manifest: Manifest) -> Manifest:
    spec: Manifest = manifest.get("spec", {})
    pod: Manifest = spec.get("template", {}).get("spec", spec)
    return pod


def broken_rules(manifests: Sequence[Manifest]) -> Iterator[str]:
    """The rules that a set of objects breaks, which are applied together."""
    for each in manifests:
        name = f"{each['kind']} {each['metadata']['name']}"
        rules = [_container_rules(each)]
        if each["kind"] in _RULES:
            rules.append(_RULES[each["kind"]](each))
        for broken in rules:
            yield from (f"{name}: {text}" for text in broken)
    yield from _rules_between(manifests)


def _container_rules(manifest: Manifest) -> Iterator[str]:
    pod = pod_of(manifest)
    for each in containers(manifest):
        context = pod.get("securityContext", {}) | each.get("securityContext", {})
        if not context.get("runAsNonRoot") or "runAsUser" in context:
            yield "runs as root, or as a user that a cluster may refuse"
        if not context.get("readOnlyRootFilesystem") or context.get("allowPrivilegeEscalation") is not False:
            yield "may write to its root, or gain rights"
        if context.get("capabilities", {}).get("drop") != ["ALL"]:
            yield "keeps capabilities"
        if "seccompProfile" not in context:
            yield "has no seccomp profile"
        scratch = {mount["mountPath"]: mount for mount in each.get("volumeMounts", ())}
        if "/tmp" not in scratch:
            yield "has no /tmp to write to"
        if any(not mount.get("readOnly") for path, mount in scratch.items() if path != "/tmp"):
            yield "may write to its models"
        resources = each.get("resources", {})
        if resources.get("requests", {}) != resources.get("limits", {}):
            yield "asks for less than it may use, and is the first to be killed"
        probes = {
            kind: each.get(f"{kind}Probe", {}).get("httpGet", {}).get("path") for kind in ("readiness", "liveness")
        }
        # A pod that ends, such as a job or a chart's test, serves nothing.
        if pod.get("restartPolicy", "Always") == "Always" and probes != {
            "readiness": "/v2/health/ready",
            "liveness": "/v2/health/live",
        }:
            yield f"probes {probes}: readiness waits for the models, liveness does not"
        if each["image"].endswith(":latest"):
            yield "runs whatever is newest"
    if any("hostPath" in volume for volume in pod.get("volumes", ())):
        yield "reaches into its node"


def _deployment_rules(manifest: Manifest) -> Iterator[str]:
    pod = pod_of(manifest)
    (container,) = containers(manifest)
    drain = next(int(arg.split("=")[1]) for arg in container["args"] if arg.startswith("--exit-timeout-secs="))
    pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    if pod.get("terminationGracePeriodSeconds", 30) <= drain + pause:
        yield "is killed before it has drained"
    if not pause:
        yield "stops before the Service knows"
    rolling = manifest["spec"]["strategy"]["rollingUpdate"]
    # Also the profiles of MIG, which have other names.
    gpu = any(name.startswith("nvidia.com/") for name in container.get("resources", {}).get("limits", {}))
    if (rolling["maxUnavailable"], rolling["maxSurge"]) != ((1, 0) if gpu else (0, 1)):
        yield "a rollout needs a spare GPU, or takes a pod away before another is there"


def _knative_rules(manifest: Manifest) -> Iterator[str]:
    template = manifest["spec"]["template"]
    annotations = template["metadata"]["annotations"]
    spec = template["spec"]
    (container,) = spec["containers"]
    (port,) = container.get("ports", [{}])
    if port.get("name") not in (None, "http1", "h2c") or port.get("containerPort") in RESERVED_PORTS:
        yield f"port {port}: http1 or h2c, and none of Knative's own"
    taken = [
        each["name"] for each in container.get("env", ()) if each["name"] == "PORT" or each["name"].startswith("K_")
    ]
    if taken:
        yield f"sets {taken}, which the platform does"
    unknown = {key for key in annotations if key.startswith(("autoscaling.knative", "serving.knative"))} - KNATIVE_KEYS
    if unknown:
        yield f"unknown annotations: {sorted(unknown)}"
    least, most = (int(annotations[f"autoscaling.knative.dev/{key}-scale"]) for key in ("min", "max"))
    if most and least > most:
        yield "wants more pods at least than at most"
    if least == 0 and annotations["autoscaling.knative.dev/class"].startswith("hpa"):
        yield "the HPA class never goes down to none"
    if spec["containerConcurrency"] < batch_of(annotations):
        yield "admits less than one batch: none ever fills"
    if spec["timeoutSeconds"] > 600:
        yield "allows requests longer than the cluster does"


def _runtime_rules(manifest: Manifest) -> Iterator[str]:
    (container,) = containers(manifest)
    if container["name"] != "kserve-container":
        yield "KServe looks for a container named kserve-container"
    if [port["containerPort"] for port in container["ports"]] != [8080]:
        yield "KServe's agent calls port 8080"
    if any(each.get("autoSelect") for each in manifest["spec"]["supportedModelFormats"]):
        yield "takes predictors from the runtimes that come with KServe"
    if any(mount["mountPath"].startswith("/mnt/models") for mount in container.get("volumeMounts", ())):
        yield "mounts over what the storage initializer brings"


def _predictor_rules(manifest: Manifest) -> Iterator[str]:
    annotations, predictor = manifest["metadata"]["annotations"], manifest["spec"]["predictor"]
    mode = annotations["serving.kserve.io/deploymentMode"]
    if predictor["minReplicas"] > predictor["maxReplicas"]:
        yield "wants more pods at least than at most"
    if predictor["minReplicas"] == 0 and mode != "Knative":
        yield "goes down to none without Knative"
    if "autoscalerClass" in str(annotations) and mode == "Knative":
        yield "names an autoscaler that Knative mode does not read"
    if "runtime" not in predictor["model"]:
        yield "leaves the runtime to chance"
    if mode == "Knative" and predictor["containerConcurrency"] < batch_of(annotations):
        yield "admits less than one batch: none ever fills"


_RULES = {
    "Deployment": _deployment_rules,
    "ServingRuntime": _runtime_rules,
    "InferenceService": _predictor_rules,
}
KNATIVE_KEYS = {
    f"autoscaling.knative.dev/{key}"
    for key in (
        *("class", "metric", "target", "target-utilization-percentage", "min-scale", "max-scale", "initial-scale"),
        *("activation-scale", "scale-down-delay", "scale-to-zero-pod-retention-period", "window"),
        *("panic-window-percentage", "panic-threshold-percentage", "target-burst-capacity"),
    )
} | {"serving.knative.dev/progress-deadline", "serving.knative.dev/rollout-duration"}


def _rules_between(manifests: Sequence[Manifest]) -> Iterator[str]:
    """What one object says of another must hold."""
    for each in manifests:
        if each["apiVersion"].startswith("serving.knative.dev/"):
            yield from (f"{each['kind']} {each['metadata']['name']}: {text}" for text in _knative_rules(each))
    deployments = {each["metadata"]["name"]: each for each in manifests if each["kind"] == "Deployment"}
    for each in manifests:
        kind, spec = each["kind"], each.get("spec", {})
        if kind in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = deployments.get(spec["scaleTargetRef"]["name"])
            if target is None:
                yield f"{kind}: scales what is not there"
            elif "replicas" in target["spec"]:
                yield f"{kind}: a rollout would set the count back"
        selector = spec.get("podSelector" if kind == "NetworkPolicy" else "selector")
        if (
            kind in ("Service", "NetworkPolicy", "PodDisruptionBudget")
            and each["apiVersion"] != "serving.knative.dev/v1"
        ):
            wanted = selector.get("matchLabels", selector if kind == "Service" else {})
            pods = [one["spec"]["template"]["metadata"]["labels"] for one in deployments.values()]
            if not wanted or not any(wanted.items() <= labels.items() for labels in pods):
                yield f"{kind}: selects {wanted or 'everything'}, which matches none of our pods"
        if kind == "Service" and each["apiVersion"] == "v1":
            ports = {port["name"] for one in deployments.values() for c in containers(one) for port in c["ports"]}
            if not {port["targetPort"] for port in spec["ports"]} <= ports:
                yield "Service: leads to a port that no container has"


# -- arithmetic -------------------------------------------------------------------------------------------------------


def batch_of(annotations: Manifest) -> int:
    """How many requests of one row fill every instance: the largest batch times the instances."""
    return int(annotations["remora.dev/max-batch-size"]) * int(annotations["remora.dev/instances"])


def concurrency_of(annotations: Manifest) -> int:
    """What a pod should be let hold: two full batches for each instance, one that runs and one that fills."""
    return 2 * batch_of(annotations)


def target_of(annotations: Manifest) -> int:
    """What scaling should aim at: 70 % of that, so that a pod has room until the next one is there."""
    return concurrency_of(annotations) * 7 // 10


def desired_replicas(current: int, held: int, target: int, tolerance: float = 0.1) -> int:
    """How many pods the HPA wants by its AverageValue rule: `held` over all pods, within the tolerance no change."""
    if current and abs(held / (current * target) - 1) <= tolerance:
        return current
    return -(-held // target)


def seconds(text: str) -> float:
    """Knative's durations: 90s, 10m, 1h30m."""
    units = {"s": 1, "m": 60, "h": 3600}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([smh])", text))
