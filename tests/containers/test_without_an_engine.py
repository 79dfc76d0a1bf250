"""The images' entry points where nothing can build them: the same wheels, user, variables and read-only root.

The system below is this machine's own, so it says nothing about the base; the rest is what the image would run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import free_ports
from containers.dockerfiles import configuration

pytestmark = pytest.mark.timeout(900)

# Which image plays which platform, where its models lie, and the variables that the platform sets for port and models.
HOSTS: dict[str, tuple[str, list[str] | None, str, dict[str, str]]] = {
    "sagemaker": ("sagemaker", None, "/opt/ml/model", {"SAGEMAKER_BIND_TO_PORT": "{port}"}),
    "azureml": (
        "azureml",
        None,
        "/models/digits/1",
        {"SERVER_PORT": "{port}", "AZUREML_MODEL_DIR": "/models/digits/1"},
    ),
    "knative": ("cpu", ["python", "-m", "remora_adapters.knative"], "/mnt/models", {"PORT": "{port}"}),
}


@pytest.mark.parametrize("platform", HOSTS)
def test_an_entry_point_passes_for_a_container_of_its_platform(
    platform: str, installed: Any, models: Path, digits: Any, child_environment: dict[str, str], figures: list[str]
) -> None:
    name, entrypoint, place, variables = HOSTS[platform]
    image = installed(name)
    if entrypoint:
        image = image._replace(config={**image.config, "Entrypoint": entrypoint})
    (port,) = free_ports(1)
    environment = {key: value.format(port=port) for key, value in variables.items()}
    # Where the Dockerfile names no user the platform runs its containers as root.
    uid = int((image.config["User"] or "0").partition(":")[0])
    url = f"http://127.0.0.1:{port}"
    ready = f"{url}/ping" if platform == "sagemaker" else f"{url}/v2/health/ready"
    with image.running(image.config["Cmd"], uid=uid, mounts={place: models}, environment=environment) as container:
        container.answer(ready)
        figures.append(f"{platform}, no engine, uid {uid}: ready {time.monotonic() - container.started_s:.2f} s after")
        body = str(digits.requests / "seven.json")
        ask = [sys.executable, "-m", "remora", "emulate", platform, url, "--body", body]
        # A Knative service's paths are its own.
        ask += ["--with", "path=/v2/models/digits/infer"] if platform == "knative" else []
        done = subprocess.run(ask, env=child_environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr + container.said()
        figures.append(f"{platform}, no engine, remora emulate: {done.stdout.strip().splitlines()[-1]}")
        assert container.stop() == 0


def test_a_write_outside_tmp_is_refused(installed: Any) -> None:
    """The root is as read-only as the images': otherwise the runs above would show too little."""
    code = "import pathlib; pathlib.Path('/tmp/a').touch(); pathlib.Path('/opt/remora/a').touch()"
    image = installed("cpu")._replace(config={**configuration("cpu"), "Entrypoint": ["python", "-c", code]})
    with image.running([], uid=0, mounts={}, environment={}) as container:
        assert container.process.wait(30) == 1
        assert "Read-only file system: '/opt/remora/a'" in container.said()
