"""Documents of an Azure ML deployment: model version, environment, deployment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from remora.system.json_text import read_json
from remora_deploy.deploy.plan import digest_of, find
from remora_deploy.pod import with_required_gpu

_GPU = re.compile(r"standard_n", re.IGNORECASE)
_SETTINGS = "remora"
_TIMEOUT_MS = 90_000
_PORT = 5001


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a deployment, which a model's version retains.

    Attributes:
        image: container image.
        model: location of the models, as azureml:// or a blob's URL.
        instance: instance type.
        count: number of instances.
        concurrency: requests in flight per instance.
        startup_s: time limit of the start.
        environ: environment of the server.
        capture_share: percentage of the requests and answers that Azure ML writes to the workspace's storage.
    """

    image: str
    model: str
    instance: str = "Standard_F4s_v2"
    count: int = 1
    concurrency: int = 16
    startup_s: int = 600
    environ: tuple[tuple[str, str], ...] = ()
    capture_share: int = 0

    @property
    def gpu(self) -> bool:
        """True for an instance type with GPUs."""
        return _GPU.match(self.instance) is not None

    @property
    def digest(self) -> str:
        """Digest of all settings but the number of instances, the name of the version."""
        fields = {**asdict(self), "count": 1}
        if not self.capture_share:  # because versions without it had this name before the setting existed
            del fields["capture_share"]
        return digest_of(json.loads(json.dumps(fields)))

    def model_version(self) -> dict[str, Any]:
        """Return the properties of the model's version, which retain the settings."""
        retained = {_SETTINGS: json.dumps(asdict(self))}
        return {"modelUri": self.model, "modelType": "custom_model", "properties": retained}

    def environment(self) -> dict[str, Any]:
        """Return the properties of the environment's version, with the routes of the container."""
        routes = {"livenessRoute": "/livez", "readinessRoute": "/readyz", "scoringRoute": "/"}
        config = {key: {"path": path, "port": _PORT} for key, path in routes.items()}
        return {"image": self.image, "osType": "Linux", "inferenceConfig": config}

    def deployment(self, location: str, model: str, environment: str) -> dict[str, Any]:
        """Return the document of a deployment of a model's and an environment's version."""
        probe = {"initialDelay": "PT5S", "period": "PT5S", "timeout": "PT5S"}
        variables = with_required_gpu(dict(self.environ), gpu=self.gpu)
        collection = {"dataCollectionMode": "Enabled", "samplingRate": self.capture_share / 100}
        # These two names collect the payloads; others belong to scoring scripts that log by Azure's SDK.
        captured = {"collections": {"request": collection, "response": collection}}
        return {
            "location": location,
            "sku": {"name": "Default", "capacity": self.count},
            "properties": {
                **({"dataCollector": captured} if self.capture_share else {}),
                "endpointComputeType": "Managed",
                "instanceType": self.instance,
                "model": model,
                "environmentVariables": variables,
                "environmentId": environment,
                "requestSettings": {
                    "requestTimeout": f"PT{_TIMEOUT_MS // 1000}S",
                    "maxConcurrentRequestsPerInstance": self.concurrency,
                },
                "livenessProbe": {**probe, "failureThreshold": 30},
                "readinessProbe": {**probe, "failureThreshold": max(self.startup_s // 5, 1)},
                "scaleSettings": {"scaleType": "Default"},
            },
        }


def check_mirror(percent: int, *, shared: bool) -> None:
    """Raise ValueError for copies that an endpoint cannot have.

    ``shared`` is True if versions share the traffic.
    """
    if not 0 <= percent <= 50:
        raise ValueError(f"--mirror={percent}: expected 0 to 50 percent")
    if percent and shared:
        raise ValueError("--mirror and --traffic exclude each other: the answers to copies are dropped")


def settings_of(version: Mapping[str, Any]) -> Settings | None:
    """Return the settings that a model's version retains, None without."""
    text = find(version, "properties.properties", {}).get(_SETTINGS)
    if not text:
        return None
    known = read_json(text)
    environ = tuple((str(name), str(value)) for name, value in known.pop("environ", []))
    return Settings(**known, environ=environ)
