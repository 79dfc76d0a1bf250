"""Vertex AI: versions of a model, shares of the traffic, and the return to an earlier version."""

from __future__ import annotations

from typing import Any

import pytest

from deploy_clouds.google import FakeGoogle
from deploy_clouds.journeys import Deployments


@pytest.fixture
def stage() -> Deployments:
    def flags(version: str) -> list[str]:
        return ["--image", "europe-west4-docker.pkg.dev/p/ml/remora:1", "--model", f"gs://bucket/models/{version}/"]

    return Deployments("vertex", FakeGoogle(), flags, ["--project", "p", "--region", "europe-west4"])


def test_the_version_before_is_undeployed_only_after_the_golden_request(stage: Deployments) -> None:
    google: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    google.calls.clear()
    assert stage.deploy("v2"), stage.text()
    paths = [call.arguments.get("path", "") for call in google.calls]
    golden = next(at for at, path in enumerate(paths) if path.endswith(":rawPredict"))
    dropped = next(at for at, path in enumerate(paths) if path.endswith(":undeployModel"))
    assert golden < dropped
    assert len(google.endpoint["deployedModels"]) == 1


def test_a_share_stays_beside_the_stable_version_until_it_is_promoted(stage: Deployments) -> None:
    google: Any = stage.cloud
    assert not stage.deploy("v1", "--traffic", "10")
    assert stage.deploy("v1"), stage.text()
    assert stage.deploy("v2", "--traffic", "10"), stage.text()
    assert google.serving() == {"v1": 90, "v2": 10}
    assert stage.rollback(), stage.text()
    assert (google.serving(), len(google.endpoint["deployedModels"])) == ({"v1": 100}, 1)
    assert stage.deploy("v2", "--traffic", "10"), stage.text()
    assert stage.deploy("v2"), stage.text()
    assert (google.serving(), len(google.endpoint["deployedModels"])) == ({"v2": 100}, 1)


def test_a_rollback_deploys_the_earlier_version_with_the_same_resources(stage: Deployments) -> None:
    google: Any = stage.cloud
    flags = ("--machine-type", "n1-standard-8", "--max", "3")
    assert stage.deploy("v1", *flags), stage.text()
    assert stage.deploy("v2", *flags), stage.text()
    assert stage.rollback(), stage.text()
    (deployed,) = google.endpoint["deployedModels"]
    assert deployed["dedicatedResources"] == {
        "machineSpec": {"machineType": "n1-standard-8"},
        "minReplicaCount": 1,
        "maxReplicaCount": 3,
    }
    assert google.serving() == {"v1": 100}
    assert not stage.rollback()
    assert "no earlier version" in stage.text()


def test_requests_go_to_the_dedicated_name_of_an_endpoint(stage: Deployments) -> None:
    google: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    google.endpoint["dedicatedEndpointDns"] = "7.europe-west4-1.prediction.vertexai.goog"
    call = stage.service().ask(stage.runner().read(stage.service()), b"{}")
    assert call.target == "7.europe-west4-1.prediction.vertexai.goog"


CAPTURE = "predictRequestResponseLoggingConfig"


def test_requests_and_answers_are_captured_in_a_table(stage: Deployments) -> None:
    google: Any = stage.cloud
    flags = ("--capture", "bq://p.captured.digits", "--capture-percent", "20")
    assert stage.deploy("v1", *flags), stage.text()
    expected = {
        "enabled": True,
        "samplingRate": 0.2,
        "bigqueryDestination": {"outputUri": "bq://p.captured.digits"},
    }
    assert google.endpoint[CAPTURE] == expected
    google.calls.clear()
    assert stage.deploy("v1", *flags), stage.text()
    assert not [call for call in google.calls if call.arguments.get("method") == "PATCH"]
    assert stage.deploy("v1", *flags[:2]), stage.text()
    assert google.endpoint[CAPTURE]["samplingRate"] == 1.0
    assert stage.deploy("v1"), stage.text()
    assert google.endpoint[CAPTURE] == {"enabled": False}


def test_a_failed_update_restores_what_was_captured(stage: Deployments) -> None:
    google: Any = stage.cloud
    assert stage.deploy("v1", "--capture", "bq://p.captured.digits"), stage.text()
    google.fault = "rollback"
    assert not stage.deploy("v2")
    assert google.endpoint[CAPTURE]["bigqueryDestination"] == {"outputUri": "bq://p.captured.digits"}
    assert google.serving() == {"v1": 100}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--capture", "gs://bucket/captured"), "expected bq://PROJECT.DATASET.TABLE"),
        (("--capture", "bq://p.captured.digits", "--capture-percent", "0"), "expected 1 to 100 percent"),
    ],
)
def test_a_capture_that_the_platform_refuses_is_an_error_before_any_call(
    stage: Deployments, flags: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        stage.deploy("v1", *flags)
    assert not stage.cloud.calls


def test_the_model_is_removed_with_the_endpoint(stage: Deployments) -> None:
    google: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    assert stage.undeploy(), stage.text()
    assert (google.endpoint, google.versions) == (None, {})
