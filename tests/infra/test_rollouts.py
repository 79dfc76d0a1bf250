"""Releases of aws-sagemaker one after another, against a stand-in of AWS that undoes an update as SageMaker does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.terraform import MODULES, Prepared, mirrored
from infra.test_apply import CREDENTIALS, PROVIDER, SERVICES

REPOSITORY = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/remora"
FIRST, SECOND, BROKEN = (f"{REPOSITORY}@sha256:{digit * 64}" for digit in "12f")
MODULE = """
module "digits" {
  source        = "./aws-sagemaker"
  name          = "digits"
  model_uri     = "s3://digits-models/models/"
  image_uri     = var.image_uri
  instance_type = var.instance_type
}

variable "image_uri" {
  type = string
}

variable "instance_type" {
  type    = string
  default = "ml.c7i.large"
}
"""
KEPT = """
variable "previous" {
  type    = any
  default = []
}

output "releases" {
  value = module.digits.releases
}
"""

pytestmark = pytest.mark.timeout(500)


class Root:
    """A root module with one endpoint, and AWS's own client on the stand-in that it is applied to."""

    def __init__(self, folder: Path, mirror: Path, address: str) -> None:
        import boto3

        shutil.copytree(
            MODULES["aws-sagemaker"], folder / "aws-sagemaker", ignore=shutil.ignore_patterns(".terraform*")
        )
        endpoints = "\n".join(f'    {service} = "{address}"' for service in SERVICES)
        self.folder = folder
        self.write(MODULE)
        (folder / "provider.tf").write_text(PROVIDER.format(endpoints=endpoints))
        self._prepared = Prepared(folder, mirrored(mirror, folder / "rc"))
        self.sagemaker = boto3.Session(**CREDENTIALS).client("sagemaker", endpoint_url=address)
        self.s3 = boto3.Session(**CREDENTIALS).client("s3", endpoint_url=address)

    def write(self, module: str) -> None:
        (self.folder / "main.tf").write_text(module)

    def run(self, *command: str, **variables: Any) -> subprocess.CompletedProcess[str]:
        values = [f"-var={name}={value}" for name, value in variables.items()]
        return self._prepared.run(*command, *values)

    def apply(self, **variables: Any) -> subprocess.CompletedProcess[str]:
        return self.run("apply", "-auto-approve", "-input=false", "-no-color", "-parallelism=30", **variables)

    def serving(self, name: str) -> str:
        """The image that an endpoint serves by. Its configuration and its model are there, or this raises."""
        configuration = self.sagemaker.describe_endpoint(EndpointName=name)["EndpointConfigName"]
        (variant,) = self.sagemaker.describe_endpoint_config(EndpointConfigName=configuration)["ProductionVariants"]
        image: str = self.sagemaker.describe_model(ModelName=variant["ModelName"])["PrimaryContainer"]["Image"]
        return image

    def images(self) -> set[str]:
        """The images of all models that are left."""
        names = [each["ModelName"] for each in self.sagemaker.list_models()["Models"]]
        return {self.sagemaker.describe_model(ModelName=name)["PrimaryContainer"]["Image"] for name in names}


@pytest.fixture
def root(tool: str, mirror: Path, tmp_path: Path) -> Iterator[Root]:
    pytest.importorskip("moto", reason="moto is not installed here: make test-infra")
    command = [sys.executable, str(Path(__file__).with_name("undoing_aws.py"))]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout
        root = Root(tmp_path, mirror, process.stdout.readline().strip())
        done = root.run("init", "-input=false", "-no-color")
        assert done.returncode == 0, done.stderr
        yield root
        process.kill()


def test_an_update_that_sagemaker_undoes_fails_the_apply_and_deletes_nothing(root: Root) -> None:
    done = root.apply(image_uri=FIRST)
    assert done.returncode == 0, done.stderr
    done = root.apply(image_uri=BROKEN)
    assert root.serving("digits") == FIRST
    assert done.returncode == 1, "SageMaker rolled back, and the apply calls it a success"
    assert "SageMaker rolled digits back" in done.stderr
    # Both ways out are open: back to what serves, and on to what is mended.
    done = root.apply(image_uri=FIRST)
    assert done.returncode == 0, done.stderr
    assert (root.serving("digits"), root.images()) == (FIRST, {FIRST})
    assert root.apply(image_uri=BROKEN).returncode == 1
    done = root.apply(image_uri=SECOND)
    assert done.returncode == 0, done.stderr
    assert (root.serving("digits"), root.images()) == (SECOND, {SECOND})


def test_earlier_releases_that_are_listed_stay(root: Root) -> None:
    root.write(MODULE.replace("var.instance_type\n", "var.instance_type\n  previous      = var.previous\n") + KEPT)
    assert root.apply(image_uri=FIRST).returncode == 0
    releases = json.loads(root.run("output", "-json", "releases").stdout)
    assert [each["image_uri"] for each in releases] == [FIRST]
    done = root.apply(image_uri=SECOND, previous=json.dumps(releases))
    assert done.returncode == 0, done.stderr
    assert (root.serving("digits"), root.images()) == (SECOND, {FIRST, SECOND})
    assert len(root.sagemaker.list_endpoint_configs()["EndpointConfigs"]) == 2


def test_an_instance_type_changes_on_an_endpoint_that_scales(root: Root) -> None:
    assert root.apply(image_uri=FIRST).returncode == 0
    done = root.apply(image_uri=FIRST, instance_type="ml.c7i.xlarge")
    assert done.returncode == 0, done.stderr
    assert root.serving("digits") == FIRST
    done = root.run("state", "list")
    assert "module.digits.aws_appautoscaling_policy.concurrency[0]" in done.stdout


def test_bucket_models_and_endpoint_come_in_one_apply_and_changed_models_in_a_new_place(root: Root) -> None:
    models = root.folder / "models" / "digits" / "1"
    models.mkdir(parents=True)
    (models / "model.onnx").write_bytes(b"weights")
    own = f'  create_bucket = true\n  models_path   = "{root.folder}/models"\n'
    root.write(MODULE.replace("  image_uri ", own + "  image_uri "))
    keys = []
    for content in (b"weights", b"better weights"):
        (models / "model.onnx").write_bytes(content)
        done = root.apply(image_uri=FIRST)
        assert done.returncode == 0, done.stderr
        (found,) = root.s3.list_objects_v2(Bucket="digits-models")["Contents"]
        (model,) = root.sagemaker.list_models()["Models"]
        source = root.sagemaker.describe_model(ModelName=model["ModelName"])["PrimaryContainer"]["ModelDataSource"]
        assert f"s3://digits-models/{found['Key']}" == source["S3DataSource"]["S3Uri"] + "digits/1/model.onnx"
        keys.append(found["Key"])
    assert len(set(keys)) == 2
