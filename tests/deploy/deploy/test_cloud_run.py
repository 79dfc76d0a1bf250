"""Cloud Run: revisions, shares of the traffic, GPUs with their drivers, and rights."""

from __future__ import annotations

from typing import Any

import pytest

from deploy_clouds.google import FakeGoogle
from deploy_clouds.journeys import Deployments
from remora_deploy.deploy.plan import find


@pytest.fixture
def stage() -> Deployments:
    def flags(version: str) -> list[str]:
        return ["--image", "europe-west4-docker.pkg.dev/p/ml/remora:1", "--model", f"gs://bucket/models/{version}/"]

    return Deployments("cloud-run", FakeGoogle(), flags, ["--project", "p", "--region", "europe-west4"])


def test_a_candidate_is_asked_at_its_tag_before_it_gets_traffic(stage: Deployments) -> None:
    google: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    google.calls.clear()
    assert stage.deploy("v2"), stage.text()
    (asked,) = [call.arguments["url"] for call in google.calls if call.target == "service"]
    assert asked == "https://candidate---digits-x.a.run.app"


def test_a_share_of_the_traffic_is_promoted_and_rolled_back(stage: Deployments) -> None:
    google: Any = stage.cloud
    assert not stage.deploy("v1", "--traffic", "10")
    assert stage.deploy("v1"), stage.text()
    assert stage.deploy("v2", "--traffic", "10"), stage.text()
    assert [each["percent"] for each in google.service["traffic"]] == [90, 10]
    assert stage.rollback(), stage.text()
    assert google.serving() == {"v1": 100}
    assert stage.deploy("v2"), stage.text()
    assert google.serving() == {"v2": 100}


def test_a_revision_that_never_gets_ready_is_deleted_and_its_reason_shown(stage: Deployments) -> None:
    google: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    google.fault = "rollback"
    assert not stage.deploy("v2")
    assert "startup probe" in stage.text()
    assert len(google.revisions) == 1
    assert "digits is as it was before" in stage.text()


@pytest.mark.parametrize(("gpu", "cuda", "runs"), [("nvidia-l4", "13", False), ("nvidia-l4", "12", True)])
def test_an_image_for_a_newer_driver_than_the_platforms_is_refused(
    stage: Deployments, gpu: str, cuda: str, runs: bool
) -> None:
    google: Any = stage.cloud
    image = google.image
    google.image = lambda name: {**image(name), "labels": {"remora.cuda": cuda}}
    assert stage.deploy("v1", "--gpu", gpu) is runs, stage.text()
    if runs:
        template = google.service["template"]
        assert template["nodeSelector"] == {"accelerator": gpu}
        assert template["containers"][0]["resources"]["limits"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
        variables = {each["name"]: each["value"] for each in template["containers"][0]["env"]}
        assert variables["REMORA_REQUIRE_GPU"] == "true"
    else:
        assert "the platform's driver supports 12" in stage.text()


def test_the_container_is_probed_on_the_port_that_serves(stage: Deployments) -> None:
    google: Any = stage.cloud
    assert stage.deploy("v1", "--service-account", "reader@p"), stage.text()
    template = google.service["template"]
    assert template["serviceAccount"] == "reader@p"
    assert find(template, "containers.0.startupProbe.httpGet") == {"path": "/v2/health/ready", "port": 8080}


def test_an_account_that_cannot_read_the_bucket_is_a_failed_check_with_its_command(stage: Deployments) -> None:
    google: Any = stage.cloud
    assert not stage.deploy("v1", "--service-account", "other@p")
    assert "no role of the bucket names other@p" in stage.text()
    assert "gcloud storage buckets add-iam-policy-binding gs://bucket --member serviceAccount:other@p" in stage.text()
    assert google.service is None


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--gpu", "tpu"), "nvidia-l4"),
        (("--max", "0"), "the maximum must be"),
        (("--concurrency", "2000"), "1 to 1000"),
        (("--model", "s3://bucket/models"), "such as gs://"),
    ],
)
def test_a_value_that_the_platform_refuses_is_an_error_before_any_call(
    stage: Deployments, flags: tuple[str, str], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        stage.build("v1", *flags)
