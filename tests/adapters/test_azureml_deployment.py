"""Azure's own client reads what `remora manifests azureml` prints, and the commands of docs/deploy/azureml.md.

It runs in a separate environment: `make test-azure-ai-ml`. Nothing is sent: its classes read, check, and say what they
would send.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import ROOT
from remora.cli import main
from remora_adapters import azureml
from remora_deploy.manifests import find_renderer
from remora_deploy.manifests.facts import Facts, Model
from support.servers.hosting import ask, hosted, v2_request, write_scale

PEER = Path(os.environ.get("REMORA_AZURE_AI_ML_VENV", ROOT / ".venv-azure-ai-ml")) / "bin" / "python"

pytestmark = pytest.mark.skipif(not PEER.exists(), reason="azure-ai-ml is not there: make test-azure-ai-ml")

# Reads {"deployment": path} and {"endpoint" | "model": overrides}, as the command line's --file and its flags do.
READ = """
import json, sys
from importlib.metadata import version
from azure.ai.ml import load_model, load_online_deployment, load_online_endpoint

asked, found = json.loads(sys.argv[1]), {"version": version("azure-ai-ml")}
if "deployment" in asked:
    deployment = load_online_deployment(asked["deployment"])
    found["kind"] = type(deployment).__name__
    found["deployment"] = json.loads(json.dumps(deployment._to_dict()))
    found["environment"] = deployment.environment._to_rest_object().as_dict()
    deployment.environment = "azureml:/environments/remora/versions/1"  # by now it is registered
    found["sent"] = deployment._to_arm_resource_param(location="westeurope")["online_deployment"]
for name, load in (("endpoint", load_online_endpoint), ("model", load_model)):
    if name in asked:
        made = load(None, params_override=[{key: value} for key, value in asked[name].items()])
        found[name] = json.loads(json.dumps(made._to_dict()))
print(json.dumps(found))
"""


def read_by_azure(**asked: Any) -> dict[str, Any]:
    """What azure-ai-ml makes of documents. Fails with what it says against them."""
    done = subprocess.run([PEER, "-c", READ, json.dumps(asked)], capture_output=True, text=True, timeout=100)
    if done.returncode:
        raise ValueError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print("azure-ai-ml", found["version"])
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_scale(folder / "scale")
    return folder


@pytest.fixture(scope="module")
def printed(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with what the command prints."""
    path = tmp_path_factory.mktemp("printed") / "deployment.yaml"
    with path.open("w") as file, contextlib.redirect_stdout(file):
        assert main(["manifests", "azureml", str(models), "--name", "digits"]) == 0
    return path


@pytest.fixture(scope="module")
def read(printed: Path) -> dict[str, Any]:
    """What Azure makes of that file."""
    return read_by_azure(deployment=str(printed))


def assert_read_back(read: dict[str, Any], path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert document.pop("$schema").endswith("managedOnlineDeployment.schema.json")
    assert read["kind"] == "ManagedOnlineDeployment"
    assert fitting(read["deployment"], document) == document


def fitting(value: Any, like: Any) -> Any:
    """A value without the members that another one has not."""
    return {name: fitting(value.get(name), each) for name, each in like.items()} if isinstance(like, dict) else value


def test_the_deployment_is_read_back_field_by_field(read: dict[str, Any], printed: Path) -> None:
    assert_read_back(read, printed)


def test_the_deployment_of_a_gpu_is_read_back_too(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    facts = Facts("digits", "registry.azurecr.io/remora:1", "models", (Model("scale", 8, 2, True),), 3.5, 120)
    path.write_text(find_renderer("azureml")(facts))
    assert_read_back(read_by_azure(deployment=str(path)), path)


def test_what_would_be_sent_has_the_times_and_limits_that_the_file_has(read: dict[str, Any], printed: Path) -> None:
    document, sent = yaml.safe_load(printed.read_text()), read["sent"]
    properties = sent["properties"]
    assert (sent["name"], sent["sku"]["capacity"], properties["endpointComputeType"]) == ("blue", 1, "Managed")
    assert properties["requestSettings"] == {
        "maxConcurrentRequestsPerInstance": document["request_settings"]["max_concurrent_requests_per_instance"],
        "requestTimeout": "PT1M",
    }
    for name, probe in (("livenessProbe", "liveness_probe"), ("readinessProbe", "readiness_probe")):
        assert properties[name] == {
            "failureThreshold": document[probe]["failure_threshold"],
            **{key: f"PT{document[probe][given]}S" for key, given in TIMES.items()},
        }


TIMES = {"initialDelay": "initial_delay", "period": "period", "timeout": "timeout"}


def test_the_routes_that_azure_reads_are_answered_by_our_server(read: dict[str, Any], models: Path) -> None:
    config = read["environment"]["properties"]["inferenceConfig"]
    environ = {"AZUREML_MODEL_DIR": str(models)}
    assert {route["port"] for route in config.values()} == {azureml.host(environ).server.http_port}
    with hosted("azureml", environ) as port:
        for route in ("livenessRoute", "readinessRoute"):
            assert ask(port, "GET", config[route]["path"]).status == 200
        scored = ask(port, "POST", f"{config['scoringRoute']['path']}v2/models/scale/infer", v2_request([[1, 2, 3, 4]]))
        assert scored.json["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]


def test_azure_refuses_a_field_that_is_misspelt(tmp_path: Path, printed: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(printed.read_text().replace("failure_threshold", "failure_treshold"))
    with pytest.raises(ValueError, match="failure_treshold"):
        read_by_azure(deployment=str(path))


def test_the_pages_commands_make_the_model_and_the_endpoint_that_the_deployment_names(printed: Path) -> None:
    text = (ROOT / "docs" / "deploy" / "azureml.md").read_text()
    model, endpoint = (overrides(text, f"az ml {kind} create") for kind in ("model", "online-endpoint"))
    found = read_by_azure(model=model, endpoint=endpoint)
    assert {name: found["model"][name] for name in ("name", "version", "type")} == {
        "name": "digits",
        "version": "1",
        "type": "custom_model",
    }
    assert (found["endpoint"]["name"], found["endpoint"]["auth_mode"]) == ("digits", "key")
    document = yaml.safe_load(printed.read_text())
    assert document["endpoint_name"] == found["endpoint"]["name"]
    assert document["model"] == f"azureml:{found['model']['name']}@latest"


def overrides(page: str, command: str) -> dict[str, str]:
    """The flags of a command of the page, as Azure's command line hands them to its loaders."""
    (line,) = re.findall(rf"^\$ {command} (.*)$", page, re.MULTILINE)
    words = shlex.split(line)
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
