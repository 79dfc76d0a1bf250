"""SageMaker's own SDK, versions 2 and 3, and its API as moto has it: `make test-sagemaker` installs them.

No container runs here: local mode's `docker compose` is a stand-in that starts our entry point as a process with what
the SDK put into the compose file. What then happens is the SDK's own: probes, serializers, batch transform.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, free_ports
from deploy_clouds.registry import Registry, running
from remora.cli import main
from remora_adapters.sagemaker.settings import settings_of
from remora_deploy.emulate.asking import Address
from remora_deploy.emulate.sagemaker_runtime import Endpoint, runtime_api
from support.models.generation_models import tiny
from support.servers.hosting import ask, hosted, write_scale
from support.servers.moto_server import CREDENTIALS, moto_version, running_moto

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[deploy-sagemaker]'")

HERE = Path(__file__).parent
ROOTS = os.pathsep.join(str(ROOT / name) for name in ("core", "adapters"))
PEERS = {
    version: Path(os.environ.get(f"REMORA_SAGEMAKER{version}_VENV", ROOT / f".venv-sagemaker{version}"))
    for version in (2, 3)
}
ROLE = "arn:aws:iam::123456789012:role/endpoint"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/remora:0.1.0"
TRUST = '{"Statement": [{"Principal": {"Service": "sagemaker.amazonaws.com"}}]}'
DOUBLED = [[2.0, 4.0, 6.0, 8.0], [10.0, 12.0, 14.0, 17.0]]
RECORDS = 5
VPC = {"SecurityGroupIds": ["sg-0123456789abcdef0"], "Subnets": ["subnet-0123456789abcdef0"]}
KEY = "arn:aws:kms:us-east-1:123456789012:key/0"

pytestmark = pytest.mark.timeout(300)


def python_of(version: int) -> Path:
    python = PEERS[version] / "bin" / "python"
    if not python.exists():
        pytest.skip(f"version {version} of the sagemaker SDK is not there: make test-sagemaker")
    return python


def run_peer(python: Path, *words: object, **environ: str) -> str:
    """What a script of ours, or our command, printed under the SDK's interpreter."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    given = inherited | CREDENTIALS | {"AWS_EC2_METADATA_DISABLED": "true"} | environ
    done = subprocess.run(
        [str(word) for word in (python, *words)], env=given, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def quiet(folder: Path, **defaults: object) -> dict[str, str]:
    """A configuration file of the SDK that sends nothing home, and says what resources have by default."""
    said = {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}, **defaults}
    (folder / "sagemaker.yaml").write_text(json.dumps({"SchemaVersion": "1.0", "SageMaker": said}))
    return {"SAGEMAKER_USER_CONFIG_OVERRIDE": str(folder / "sagemaker.yaml")}


# -- local mode -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 3])
def local(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a version of the SDK got from its local mode."""
    python = python_of(request.param)
    base = tmp_path_factory.mktemp("local")
    for name in ("archive", "records", "scratch", "bin"):
        (base / name).mkdir()
    write_scale(base / "scale")
    with tarfile.open(base / "archive" / "model.tar.gz", "w:gz") as archive:
        archive.add(base / "scale", "scale")
    (base / "records" / "rows.csv").write_text("".join(f"{row},1,2,3\n" for row in range(RECORDS)))
    docker = base / "bin" / "docker"
    docker.write_text(f'#!/bin/sh\nPYTHONPATH={ROOTS} exec {sys.executable} {HERE / "docker_stand_in.py"} "$@"\n')
    docker.chmod(0o755)
    words = (base / "archive" / "model.tar.gz", base / "records" / "rows.csv", base / "scratch", free_ports(1)[0])
    nowhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "PATH": f"{docker.parent}{os.pathsep}{os.environ['PATH']}"}
    printed = run_peer(python, HERE / "sdk_local.py", *words, **nowhere, **quiet(base))
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    print(f"sagemaker {found['version']}; no container was run: its compose file was, as a process")
    return found


def test_local_mode_starts_our_container_and_finds_it_in_service(local: dict[str, Any]) -> None:
    assert local["status"] == "InService"


def test_what_the_sdks_serializers_write_is_answered_and_their_deserializers_read_it(local: dict[str, Any]) -> None:
    assert local["json"]["outputs"][0]["data"] == [value for row in DOUBLED for value in row]
    assert [[float(cell) for cell in row] for row in local["csv"]] == DOUBLED
    assert [[float(cell) for cell in row] for row in local["csv of one row"]] == DOUBLED[:1]
    assert local["npy"] == DOUBLED
    assert local["jsonlines"] == DOUBLED
    assert local["csv to json"] == {"y": DOUBLED}
    assert [float(name) for name in local["pandas"]] == DOUBLED[0], "CSV has no line of names"


def test_what_cannot_be_read_comes_back_as_a_reason(local: dict[str, Any]) -> None:
    assert "a row has 2 cells and the model takes 4" in local["wrong"]


def test_a_local_batch_transform_gives_a_line_for_each_record_in_order(local: dict[str, Any]) -> None:
    expected = [f"{2.0 * row},2.0,4.0,6.0" for row in range(RECORDS)]
    for settings, text in local["transformed"].items():
        assert text.split() == expected, settings
    assert local["transformed"]["many"].splitlines() == expected, (
        "no blank lines unless the call makes the SDK add them"
    )


# -- endpoints of moto ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_moto(tmp_path_factory.mktemp("moto")) as url:
        print("moto", moto_version(), "boto3", boto3.__version__)
        yield url


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    with running(Registry()) as registry:
        digest = registry.add("remora:0.1.0")
        yield f"{registry.address}/remora@{digest}"


@pytest.fixture
def plan(image: str) -> list[str]:
    flags = ["--image", image, "--model", "s3://bucket/models/digits/", "--role", ROLE]
    return ["digits", "--instance-type", "ml.c5.xlarge", *flags]


@pytest.fixture
def clients(moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Makes boto3's clients of a moto with a bucket and a role, which is AWS for this process."""
    for name, value in (*CREDENTIALS.items(), ("AWS_ENDPOINT_URL", moto)):
        monkeypatch.setenv(name, value)
    made: list[Any] = []

    def client(service: str) -> Any:
        made.append(boto3.client(service))
        return made[-1]

    subprocess.run([sys.executable, "-c", RESET, moto], check=True)
    client("s3").create_bucket(Bucket="bucket")
    client("iam").create_role(RoleName="endpoint", AssumeRolePolicyDocument=TRUST)
    yield client
    for each in made:
        each.close()


RESET = "import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1] + '/moto-api/reset', method='POST')).close()"


def test_a_deployment_is_made_and_found_as_it_was_planned(
    clients: Any, plan: list[str], image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "sagemaker", *plan, "--max-instances", "4", "--env", "A=b"]) == 0
    assert "digits serves what was requested" in capsys.readouterr().out
    sagemaker, scaling = clients("sagemaker"), clients("application-autoscaling")
    endpoint = sagemaker.describe_endpoint(EndpointName="digits")
    config = sagemaker.describe_endpoint_config(EndpointConfigName=endpoint["EndpointConfigName"])
    (variant,) = config["ProductionVariants"]
    assert (endpoint["EndpointStatus"], variant["InstanceType"]) == ("InService", "ml.c5.xlarge")
    assert variant["RoutingConfig"] == {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}
    container = sagemaker.describe_model(ModelName=variant["ModelName"])["PrimaryContainer"]
    assert (container["Image"], container["Environment"]) == (image, {"A": "b"})
    assert container["ModelDataSource"]["S3DataSource"]["S3DataType"] == "S3Prefix"
    (target,) = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert (target["ResourceId"], target["MaxCapacity"]) == ("endpoint/digits/variant/AllTraffic", 4)
    (policy,) = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    assert policy["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] == 8.0


def test_the_same_deployment_again_makes_nothing(
    clients: Any, plan: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "sagemaker", *plan]) == 0
    assert "create_endpoint digits" in capsys.readouterr().out
    assert main(["deploy", "sagemaker", *plan]) == 0
    out = capsys.readouterr().out
    assert "create_" not in out
    assert "update_endpoint" not in out
    assert len(clients("sagemaker").list_models()["Models"]) == 1


def test_a_folder_is_uploaded_and_a_role_created_updated_rolled_back_and_removed(
    clients: Any, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_scale(tmp_path / "models" / "scale")
    words = ["deploy", "sagemaker", "digits", "--instance-type", "ml.c5.xlarge", "--image", image]
    words += ["--model", str(tmp_path / "models"), "--bucket", "s3://bucket/models"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "upload" in printed
    sagemaker, s3 = clients("sagemaker"), clients("s3")
    first = sagemaker.describe_endpoint(EndpointName="digits")["EndpointConfigName"]
    keys = [each["Key"] for each in s3.list_objects_v2(Bucket="bucket")["Contents"]]
    assert all(re.fullmatch(r"models/digits/[0-9a-f]{16}/scale/.+", key) for key in keys)
    write_scale(tmp_path / "models" / "other")
    assert main(words) == 0
    assert sagemaker.describe_endpoint(EndpointName="digits")["EndpointConfigName"] != first
    assert main(["deploy", "rollback", "sagemaker", "digits"]) == 0
    assert sagemaker.describe_endpoint(EndpointName="digits")["EndpointConfigName"] == first
    capsys.readouterr()
    assert main(["deploy", "status", "sagemaker", "digits"]) == 0
    assert f"InService by {first}" in capsys.readouterr().out
    assert main(["deploy", "undeploy", "sagemaker", "digits"]) == 0
    assert main(["deploy", "status", "sagemaker", "digits"]) == 1
    left = [sagemaker.list_endpoint_configs()["EndpointConfigs"], sagemaker.list_models()["Models"]]
    roles = [each["RoleName"] for each in clients("iam").list_roles()["Roles"]]
    assert (left, roles) == ([[], []], ["endpoint"])


@pytest.mark.parametrize("via", ["boto3", "sdk"])
def test_another_plan_moves_the_endpoint_over_and_leaves_what_it_was(
    via: str, clients: Any, plan: list[str], moto: str, tmp_path: Path
) -> None:
    python = python_of(3) if via == "sdk" else Path(sys.executable)
    environ = {"AWS_ENDPOINT_URL": moto, "PYTHONPATH": ROOTS}
    somewhere = quiet(tmp_path, Model={"VpcConfig": VPC})
    words = ("-m", "remora", "deploy", "sagemaker", *plan, "--via", via, "--max-instances", "4")
    run_peer(python, *words, **environ, **somewhere)
    sagemaker = clients("sagemaker")
    scaled = [{"VariantName": "AllTraffic", "DesiredInstanceCount": 3}]
    sagemaker.update_endpoint_weights_and_capacities(EndpointName="digits", DesiredWeightsAndCapacities=scaled)
    before = sagemaker.describe_endpoint(EndpointName="digits")["EndpointConfigName"]
    lines = run_peer(python, *words, "--env", "A=b", **environ, **somewhere).splitlines()
    after = sagemaker.describe_endpoint(EndpointName="digits")["EndpointConfigName"]
    made = [line.split("  ")[0] for line in (each[16:] for each in lines) if line.startswith("sagemaker ")]
    model = sagemaker.describe_endpoint_config(EndpointConfigName=after)["ProductionVariants"][0]["ModelName"]
    assert made == [
        "sagemaker add_tags",
        f"sagemaker create_model {model}",
        f"sagemaker create_endpoint_config {after}",
        "sagemaker update_endpoint digits",
        "sagemaker describe_endpoint digits: InService",
        "sagemaker add_tags",
    ]
    assert sagemaker.describe_model(ModelName=model)["PrimaryContainer"]["Environment"] == {"A": "b"}
    (variant,) = sagemaker.describe_endpoint(EndpointName="digits")["ProductionVariants"]
    assert variant["DesiredInstanceCount"] == 3, "not the least, under the load of three"
    kept = {row["EndpointConfigName"] for row in sagemaker.list_endpoint_configs()["EndpointConfigs"]}
    assert kept == {before, after}


def test_by_the_sdk_the_same_is_made_with_the_defaults_of_an_organisation(
    clients: Any, plan: list[str], moto: str, tmp_path: Path
) -> None:
    environ = {"AWS_ENDPOINT_URL": moto, "PYTHONPATH": ROOTS}
    defaults = quiet(tmp_path, Model={"VpcConfig": VPC}, EndpointConfig={"KmsKeyId": KEY})
    words = ("-m", "remora", "deploy", "sagemaker", *plan, "--via", "sdk", "--env", "MY_name=b", "--max-instances", "4")
    printed = run_peer(python_of(3), *words, **environ, **defaults)
    assert "put_scaling_policy digits-requests" in printed
    sagemaker = clients("sagemaker")
    config = sagemaker.describe_endpoint(EndpointName="digits")["EndpointConfigName"]
    made = sagemaker.describe_endpoint_config(EndpointConfigName=config)
    model = sagemaker.describe_model(ModelName=made["ProductionVariants"][0]["ModelName"])
    assert model["VpcConfig"] == VPC
    assert model["PrimaryContainer"]["Environment"] == {"MY_name": "b"}
    (variant,) = made["ProductionVariants"]
    assert made["KmsKeyId"] == KEY
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] == 600


def test_a_model_builder_builds_and_deploys_and_its_endpoint_answers(clients: Any, moto: str, tmp_path: Path) -> None:
    python = python_of(3)
    write_scale(tmp_path / "model" / "scale")
    with (
        hosted("sagemaker", {"SAGEMAKER_BASE_DIR": str(tmp_path)}) as port,
        runtime_api(Endpoint(Address("127.0.0.1", port), tmp_path)) as api,
    ):
        places = {
            "SAGEMAKER_VALIDATE_ROLE": "false",  # by a simulation that moto has not
            "AWS_ENDPOINT_URL": moto,
            "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": f"http://127.0.0.1:{api.server_address[1]}",
        }
        words = (HERE / "sdk_endpoint.py", IMAGE, "s3://bucket/models/digits.tar.gz")
        somewhere = quiet(tmp_path, Model={"VpcConfig": VPC})  # moto answers with half of one where there is none
        found = json.loads(run_peer(python, *words, **places, **somewhere).splitlines()[-1])
    print("sagemaker", found["version"])
    print("not run: ModelBuilder's LOCAL_CONTAINER (no Docker)")
    assert (found["built"], found["deployed"]) == ("built", "InService")
    (variant,) = clients("sagemaker").describe_endpoint_config(EndpointConfigName="built")["ProductionVariants"]
    assert (variant["ModelName"], variant["InstanceType"]) == ("built", "ml.c5.xlarge")
    assert [value for row in DOUBLED for value in row] == found["json"]["outputs"][0]["data"]
    assert [[float(cell) for cell in row] for row in found["csv"]] == DOUBLED
    assert (found["npy"], found["custom attributes"]) == (DOUBLED, "a=1")
    code, status, message = found["error"]
    assert (code, status) == ("ModelError", 400)
    assert "a row has 2 cells" in message
    container = clients("sagemaker").describe_model(ModelName="built")["PrimaryContainer"]
    assert container["Image"] == IMAGE
    settings = settings_of(container["Environment"])  # the settings that the SDK adds are taken as well
    assert settings.log == (2, True, True, True)


def test_the_token_of_the_sdk_opens_openais_path(tmp_path: Path) -> None:
    make = "from sagemaker.core.token_generator import generate_token; print(generate_token(region='us-east-1'))"
    token = run_peer(python_of(3), "-c", make).split()[-1]
    tiny(tmp_path / "model")
    chat = {"model": "", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}
    with (
        hosted("sagemaker", {"SAGEMAKER_BASE_DIR": str(tmp_path)}) as port,
        runtime_api(Endpoint(Address("127.0.0.1", port), tmp_path)) as api,
    ):
        path = "/endpoints/chat/openai/v1/chat/completions"
        found = ask(api.server_address[1], "POST", path, chat, {"Authorization": f"Bearer {token}"})
    assert found.json["usage"]["completion_tokens"] == 4
