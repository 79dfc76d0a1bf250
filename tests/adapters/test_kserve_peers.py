"""A predictor from its storage to its clients: kserve-storage brings the models, we serve them, kserve's client asks.

`make test-kserve` installs kserve-storage; the models come out of moto's S3. Our process is started as KServe starts a
container: models where `Storage.download` put them, the model's name as the runtime's argument.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conftest import ROOT, end, free_ports, wait_until_ready
from support.servers.hosting import write_scale
from support.servers.moto_server import CREDENTIALS, moto_version, running_moto, wait_for

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[deploy-sagemaker]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

STORAGE = Path(os.environ.get("REMORA_KSERVE_STORAGE_VENV", ROOT / ".venv-kserve-storage")) / "bin" / "python"
DOWNLOAD = """
import sys
from importlib.metadata import version
from kserve_storage import Storage
Storage.download(sys.argv[1], sys.argv[2])
print(version("kserve-storage"))
"""
HERE = Path(__file__).parent
DOUBLED = [[2.0, 4.0, 6.0, 8.0], [10.0, 12.0, 14.0, 17.0]]
LAYOUTS = {"repository": ("s3://models/repository", "scale"), "model": ("s3://models/repository/scale", "isvc")}
"""What a predictor's storageUri names, and how its model is then called: by its folder, or by the service."""

pytestmark = pytest.mark.timeout(300)


class Served(NamedTuple):
    layout: str
    http: int
    grpc: int
    model: str


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an S3 that holds a repository."""
    if not STORAGE.exists():
        pytest.skip("kserve-storage is not there: make test-kserve")
    models = tmp_path_factory.mktemp("models")
    write_scale(models / "scale")
    with running_moto(tmp_path_factory.mktemp("moto")) as url:
        client = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="AK", aws_secret_access_key="sk"
        )
        client.create_bucket(Bucket="models")
        for path in models.rglob("*"):
            if path.is_file():
                client.upload_file(str(path), "models", f"repository/{path.relative_to(models)}")
        client.close()
        print("moto", moto_version())
        yield url


@pytest.fixture(scope="module", params=LAYOUTS)
def served(
    request: pytest.FixtureRequest,
    bucket: str,
    child_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """A predictor whose storageUri is of one of both layouts."""
    location, model = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("mnt")
    mounted = folder / "models"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environ |= CREDENTIALS | {"AWS_ENDPOINT_URL": bucket, "S3_USE_HTTPS": "0"}
    done = subprocess.run(
        [STORAGE, "-c", DOWNLOAD, location, mounted], env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    print("kserve-storage", done.stdout.split()[-1])
    for path in mounted.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)  # the mount is read-only
    http, grpc = free_ports(2)
    command = [sys.executable, "-m", "remora_adapters.kserve", "--model_name=isvc"]
    command += [f"--http-port={http}", f"--grpc-port={grpc}"]
    given = child_environment | {"REMORA_MODEL_REPOSITORY": str(mounted)}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, env=given, stdout=log, stderr=log)
    try:
        wait_until_ready(process, http, folder / "log.txt")
        yield Served(request.param, http, grpc, model)
    finally:
        status = end(process)
    assert status == 0, (folder / "log.txt").read_text()


@pytest.fixture(scope="module")
def talked(served: Served) -> dict[str, Any]:
    """What kserve's client got from the predictor."""
    return talk(served.http, served.grpc, served.model)


def talk(http: int, grpc: int, model: str) -> dict[str, Any]:
    if importlib.util.find_spec("kserve") is None:
        pytest.skip("kserve is not installed: pip install '.[dev]'")
    command = [sys.executable, str(HERE / "kserve_talk.py"), str(http), str(grpc), model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print("kserve", found["version"])
    return found


def test_every_probe_of_the_client_finds_the_predictor_ready(talked: dict[str, Any]) -> None:
    assert talked["ready"] == [True] * 7


def test_v1_v2_and_grpc_give_the_same_numbers(talked: dict[str, Any], served: Served) -> None:
    assert talked["v1"] == DOUBLED
    assert talked["v2"] == talked["grpc"] == ["7", served.model, DOUBLED]


def test_a_model_that_is_not_there_is_not_found_by_any_door(talked: dict[str, Any]) -> None:
    by_v1, by_v2, by_grpc = talked["unknown"]
    assert by_v1 == by_v2 == [404, ["error"]]
    assert by_grpc[0] == "NOT_FOUND"


def test_inputs_that_do_not_fit_are_the_clients_fault_by_every_door(talked: dict[str, Any]) -> None:
    by_v1, by_v2, by_grpc = talked["wrong"]
    assert by_v1 == by_v2 == [400, ["error"]]
    assert by_grpc[0] == "INVALID_ARGUMENT"
    assert "nothing" in by_grpc[1]


def test_the_client_cannot_tell_ours_from_kserves_own_server(
    talked: dict[str, Any], served: Served, tmp_path: Path
) -> None:
    if served.layout != "repository":
        pytest.skip("once is enough: for the layout whose model has the reference's name")
    http, grpc = free_ports(2)
    with (tmp_path / "log.txt").open("wb") as log:
        command = [sys.executable, HERE / "kserve_model_server.py", str(http), str(grpc)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(process, f"http://127.0.0.1:{http}/v2/health/ready")
        theirs = talk(http, grpc, "scale")
    finally:
        end(process)
    for each in (theirs, ours := dict(talked)):
        each["unknown"] = [refusal[0] for refusal in each["unknown"]]  # its words are Triton's in ours
        each.pop("wrong")  # its model takes any input
    assert ours == theirs
