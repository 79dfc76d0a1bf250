"""Generator of the manifests that have a pod, from the module `remora_deploy.pod`.

    python infra/kubernetes/generate.py            write the files
    python infra/kubernetes/generate.py --check    exit with status 1 if a file is stale

`make reference` runs the first command, the tests run the second.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from remora_deploy.manifests.documents import document
from remora_deploy.pod import (
    REQUEST_S,
    Mode,
    Pod,
    Scaling,
    deployment,
    inference_service,
    knative_service,
    kserve_predictor,
    kserve_runtime,
)

Object = dict[str, Any]

FOLDER = Path(__file__).parent
HEADER = "Written by `make reference` from adapters/remora_deploy/pod.py. Change it by a kustomization."
LABELS = {"app.kubernetes.io/name": "remora"}
BUCKET = "s3://example-models/repository"
TRITON = {"name": "triton", "version": "2"}
ONNX = {"name": "onnx", "version": "1"}
RUNTIME = "remora-gpu"

ON_CLAIM = Pod("remora", claim="models", cpu="", account="remora", secret="remora-storage", optional_secret=True)
ON_GPU = replace(ON_CLAIM, cpu="3", memory="12Gi", gpus=1, node_labels=(("remora.dev/pool", "gpu"),))
FROM_BUCKET = replace(ON_GPU, claim="", location=BUCKET)
KSERVE = replace(FROM_BUCKET, image="remora:cuda13", secret="")
SCALING = Scaling(least=0, most=4, concurrency=32, start_s=900, idle_s=600, batch=(16, 1))
START_S = 600
RUNTIME_HEADER = f"""{HEADER}
The name is not `remora`, that of the runtime that `remora manifests kserve` prints, which has another model format."""

REASONS = {
    "remora.dev/max-batch-size": "What scaling is computed from: batch and instances of the busiest model.",
    "maxUnavailable": "A pod that is ready takes over before one goes.",
    "terminationGracePeriodSeconds": "preStop (5 s) and the drain (--exit-timeout-secs, 30 s) have to fit in.",
    "fsGroupChangePolicy": "A large claim is not handed over file by file at each start.",
    "envFrom": "Keys and region of a bucket, where the service account has no right to read it.",
    "startupProbe": "Ready means: all models are loaded. Large ones may take ten minutes.",
    "sleep": "Until every node has taken the pod out of the Service.",
}
ON_GPU_REASONS = {
    "maxUnavailable": "A spare GPU for a rollout is rarely there: the old pod goes first.",
    "args": "Not ready while the GPU is idle: a driver too old, or a model for processors.",
}
KNATIVE_REASONS = {
    "autoscaling.knative.dev/target-utilization-percentage": "Two full batches for each instance are in a pod: one "
    "runs while the next fills. Scaling aims at 70 %.",
    "autoscaling.knative.dev/scale-to-zero-pod-retention-period": "A GPU node takes minutes to come: keep it as long "
    "as waiting costs less than starting anew (remora cost).",
    "args": "The drain ends before timeoutSeconds. Not ready while the GPU is idle: a driver too old, for example.",
    "envFrom": REASONS["envFrom"],
    "ports": "REST and gRPC are both answered here. Gateways send gRPC to a port named h2c: a Service each.",
    "readinessProbe": "Without one Knative takes a bound port for a ready pod.",
}
KSERVE_REASONS = {
    "supportedModelFormats": "No autoSelect: predictors name this runtime, and KServe's own retain the other models.",
    "args": "KServe's revisions end after 300 s: requests may use the time, but for the last 10 s.",
    "scaleTarget": "0.7 of containerConcurrency, rounded down.",
}


def base_deployment(pod: Pod) -> Object:
    found = deployment({"name": "remora", "labels": LABELS}, pod, replace(SCALING, start_s=START_S), replicas=2)
    found["spec"]["template"]["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": LABELS},
        }
    ]
    return found


def predictor() -> Object:
    found = {**kserve_predictor(KSERVE, SCALING, Mode.KNATIVE, RUNTIME, TRITON), "timeout": REQUEST_S}
    return inference_service({"name": "remora", "annotations": SCALING.annotations}, found, Mode.KNATIVE)


def runtime() -> Object:
    return kserve_runtime({"name": RUNTIME}, KSERVE, Mode.KNATIVE, (TRITON, ONNX))


def patch(pod: Pod) -> Object:
    """Return the strategic merge patch that gives the base another pod."""
    base, found = base_deployment(ON_CLAIM), base_deployment(pod)
    return {
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "metadata": {"name": found["metadata"]["name"]},
        "spec": difference(base["spec"], found["spec"]),
    }


def difference(base: Mapping[str, Any], found: Mapping[str, Any]) -> Object:
    """Return the fields that differ; containers are merged by their name, all other lists are replaced."""
    changed: Object = {}
    for key, value in found.items():
        before = base.get(key)
        if value == before:
            continue
        if key == "containers":
            pairs = zip(before or [], value, strict=True)
            changed[key] = [{"name": each["name"], **difference(old, each)} for old, each in pairs]
        else:
            changed[key] = difference(before, value) if isinstance(before, dict) else value
    return changed


def files() -> dict[str, str]:
    """Return the text of each file by its path in this folder."""
    service = knative_service({"name": "remora"}, FROM_BUCKET, SCALING)
    processors = replace(ON_CLAIM, cpu="2", memory="2Gi")
    sized = {"resources": "Requests and limits are the same: the server sizes its threads by the limit."}
    return {
        "base/deployment.yaml": document(base_deployment(ON_CLAIM), REASONS, HEADER),
        "overlays/cpu/deployment.yaml": document(patch(processors), sized, HEADER),
        "overlays/gpu/deployment.yaml": document(patch(ON_GPU), ON_GPU_REASONS, HEADER),
        "knative/service.yaml": document(service, KNATIVE_REASONS, HEADER),
        "kserve/servingruntime.yaml": document(runtime(), KSERVE_REASONS, RUNTIME_HEADER),
        "kserve/inferenceservice.yaml": document(predictor(), KSERVE_REASONS, HEADER),
    }


def main(arguments: list[str]) -> int:
    """Write the files, or compare them if `--check` is given."""
    stale = 0
    for name, text in files().items():
        path = FOLDER / name
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is stale: make reference", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
