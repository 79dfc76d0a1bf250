"""Manifest of a Knative Service, with computed concurrency and timeouts."""

from __future__ import annotations

from remora_adapters.manifests.facts import MOST_IN_POD, Facts

_LONGEST_S = 600
"""Default limit of a request's duration in a cluster."""


def render(facts: Facts) -> str:
    """Return the YAML."""
    busiest = facts.busiest
    deadline_s = max(_LONGEST_S, 2 * facts.patience_s)
    gpu = ', nvidia.com/gpu: "1"' if facts.gpu else ""
    size = f'{{cpu: "2", memory: {facts.memory}Mi{gpu}}}'
    return f"""\
apiVersion: serving.knative.dev/v1
kind: Service
metadata:
  name: {facts.name}
spec:
  template:
    metadata:
      annotations:
        remora.dev/max-batch-size: "{max(busiest.max_batch_size, 1)}"
        remora.dev/instances: "{busiest.instances}"
        autoscaling.knative.dev/class: kpa.autoscaling.knative.dev
        autoscaling.knative.dev/metric: concurrency
        # Another pod comes at 70 % of containerConcurrency: the rest is room until it is there.
        autoscaling.knative.dev/target-utilization-percentage: "70"
        autoscaling.knative.dev/min-scale: "0"
        autoscaling.knative.dev/max-scale: "4"
        autoscaling.knative.dev/initial-scale: "1"
        # Ten times as long as a start may take ({facts.patience_s} s): going sooner costs more than staying.
        autoscaling.knative.dev/scale-to-zero-pod-retention-period: {min(10 * facts.patience_s, 3600)}s
        # Loading took {facts.load_s:.2f} s on the machine that wrote this; images and models must come as well.
        serving.knative.dev/progress-deadline: {deadline_s}s
    spec:
      # Two batches of {max(busiest.max_batch_size, 1)} for each of {busiest.instances} instances of \
'{busiest.name}': one runs while the next fills. {MOST_IN_POD} are the most.
      containerConcurrency: {min(facts.concurrency, MOST_IN_POD)}
      # Also the grace between SIGTERM and SIGKILL.
      timeoutSeconds: 300
      containers:
        - image: {facts.image}
          command: [python, -m, remora_adapters.knative]
          env:
            - {{name: REMORA_MODEL_REPOSITORY, value: "{facts.location}"}}
          ports:
            # The one port there is. Named h2c, gateways speak HTTP/2 to it, so gRPC; probes stay as they are.
            - {{name: http1, containerPort: 8080}}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            runAsNonRoot: true
            runAsUser: 10001
            capabilities:
              drop: [ALL]
            seccompProfile:
              type: RuntimeDefault
          # Without one Knative takes a bound port for a ready pod.
          readinessProbe:
            httpGet: {{path: /v2/health/ready}}
          # Alive as soon as the port is open, so a slow load is not restarted.
          livenessProbe:
            httpGet: {{path: /v2/health/live}}
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
