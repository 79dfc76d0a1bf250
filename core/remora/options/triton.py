"""Triton's notation of options and the flags that have no effect here."""

from __future__ import annotations

BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
"""Triton's spelling of booleans [V05], in lower case."""

IGNORED_FLAGS: dict[str, str] = {
    "http-thread-count": "one event loop serves all connections",
    "grpc-infer-allocation-pool-size": "the server has no such pool",
    "grpc-max-response-pool-size": "the server has no such pool",
    "sagemaker-thread-count": "one event loop serves all connections",
    "buffer-manager-thread-count": "tensors are views, not copies",
    "pinned-memory-pool-byte-size": "the server has no such pool",
    "cuda-memory-pool-byte-size": "the runtimes manage device memory",
    "cuda-virtual-address-size": "the runtimes manage device memory",
    "enable-peer-access": "the runtimes manage device memory",
    "metrics-interval-ms": "metrics are read at each scrape",
    "allow-vertex-ai": "--host-platform=vertex serves the routes of Vertex AI",
    "vertex-ai-port": "--host-platform=vertex takes the port from the platform",
    "vertex-ai-thread-count": "one event loop serves all connections",
    "vertex-ai-default-model": "--host-platform=vertex takes the model from the platform",
    "cache-directory": "caches are Python packages",
    "repoagent-directory": "repository agents are not supported",
    "allow-cpu-metrics": "CPU metrics are always on",
    "log-file": "the log goes to standard error",
}
"""Flags of tritonserver that have no effect here, with the reason; accepted with a warning for existing command lines.
Unsupported flags that restrict access are refused instead."""
