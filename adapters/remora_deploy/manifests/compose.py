"""Compose file of one server, for docker compose or podman compose."""

from __future__ import annotations

from typing import Any

from remora_deploy.manifests.documents import document
from remora_deploy.manifests.facts import Facts

_DRAIN_S = 30


def render(facts: Facts) -> str:
    """Return the YAML. Raises ValueError."""
    facts.choices.check()
    model, rows = facts.busiest, max(facts.busiest.max_batch_size, 1)
    reasons = {
        "command": f"Two batches of {rows} for each of {model.instances} instances of '{model.name}' are "
        f"{facts.concurrency} requests at a time, which clients should keep open.",
        "ports": "On this machine only: the server checks no callers.",
        "mem_limit": facts.reasons()["resources"],
        "healthcheck": f"Loading took {facts.load_s:.2f} s on the machine that wrote this.",
        "stop_grace_period": "The drain of --exit-timeout-secs has to fit in.",
    }
    return document(
        {"name": facts.name, "services": {"remora": service(facts)}}, reasons, "docker compose --file THIS up"
    )


def service(facts: Facts) -> dict[str, Any]:
    """Return the service."""
    remote = "://" in facts.location
    probe = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz')"
    found: dict[str, Any] = {
        "image": facts.image,
        "command": [
            f"--model-repository={facts.location if remote else '/models'}",
            f"--exit-timeout-secs={_DRAIN_S}",
            *(["--require-gpu"] if facts.gpu else []),
        ],
        "ports": [f"127.0.0.1:{port}:{port}" for port in (8000, 8001, 8002)],
        "volumes": [] if remote else [f"{facts.location}:/models:ro"],
        "env_file": [facts.choices.secret] if facts.choices.secret else [],
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "mem_limit": f"{facts.memory}m",
        "stop_grace_period": f"{_DRAIN_S + 5}s",
        "restart": "unless-stopped",
        "healthcheck": {
            "test": ["CMD", "python", "-c", probe],
            "interval": "10s",
            "timeout": "5s",
            "start_period": f"{facts.patience_s}s",
        },
    }
    if facts.gpu:
        device = {"driver": "nvidia", "count": facts.gpus, "capabilities": ["gpu"]}
        found["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return found
