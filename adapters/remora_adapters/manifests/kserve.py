"""Manifests of a KServe runtime, per cluster and per namespace, and of a predictor."""

from __future__ import annotations

from remora_adapters.manifests.facts import MOST_IN_POD, Facts


def render(facts: Facts) -> str:
    """Return three YAML documents."""
    runtimes = (_runtime(facts, kind) for kind in ("ClusterServingRuntime", "ServingRuntime"))
    return "---\n".join((*runtimes, _predictor(facts)))


def _runtime(facts: Facts, kind: str) -> str:
    gpu = ', nvidia.com/gpu: "1"' if facts.gpu else ""
    size = f'{{cpu: "2", memory: {facts.memory}Mi{gpu}}}'
    scope = "the whole cluster" if kind.startswith("Cluster") else "one namespace; it goes before the cluster's"
    return f"""\
# For {scope}.
apiVersion: serving.kserve.io/v1alpha1
kind: {kind}
metadata:
  name: remora
spec:
  annotations:
    # Metrics are on the port of requests.
    prometheus.kserve.io/port: "8080"
    prometheus.kserve.io/path: /metrics
  # A separate format, selected by name: KServe's own runtimes keep their formats.
  supportedModelFormats:
    - {{name: remora, version: "1"}}
  protocolVersions: [v1, v2, grpc-v2]
  containers:
    # KServe finds the container by this name, and its agent calls port 8080.
    - name: kserve-container
      image: {facts.image}
      command: [python, -m, remora_adapters.kserve]
      args:
        # What a model is called whose files lie directly in /mnt/models.
        - "--model-name={{{{.Name}}}}"
      ports:
        - {{containerPort: 8080, protocol: TCP}}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        runAsNonRoot: true
        runAsUser: 10001
        capabilities:
          drop: [ALL]
        seccompProfile:
          type: RuntimeDefault
      readinessProbe:
        httpGet: {{path: /v2/health/ready, port: 8080}}
        periodSeconds: 2
        timeoutSeconds: 2
      # Alive as soon as the port is open, so a slow load is not restarted.
      livenessProbe:
        httpGet: {{path: /v2/health/live, port: 8080}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      # The process had {facts.memory_mib} MiB with all models loaded; twice that, in quarters of a GiB.
      resources:
        requests: {size}
        limits: {size}
      volumeMounts:
        - {{name: scratch, mountPath: /tmp}}
  volumes:
    - name: scratch
      emptyDir: {{}}
"""


def _predictor(facts: Facts) -> str:
    busiest, concurrency = facts.busiest, min(facts.concurrency, MOST_IN_POD)
    return f"""\
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: {facts.name}
  annotations:
    # Going down to none, canaries and concurrency limits are Knative's: the other mode has none of them.
    serving.kserve.io/deploymentMode: Knative
    remora.dev/max-batch-size: "{max(busiest.max_batch_size, 1)}"
    remora.dev/instances: "{busiest.instances}"
spec:
  predictor:
    minReplicas: 0
    maxReplicas: 4
    scaleMetric: concurrency
    # 70 % of containerConcurrency: the rest is room until another pod is there.
    scaleTarget: {max(1, concurrency * 7 // 10)}
    # Two batches of {max(busiest.max_batch_size, 1)} for each of {busiest.instances} instances of '{busiest.name}'; \
{MOST_IN_POD} are the most.
    containerConcurrency: {concurrency}
    model:
      runtime: remora
      modelFormat: {{name: remora}}
      protocolVersion: v2
      storageUri: "{facts.location}"
"""
