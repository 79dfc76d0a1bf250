"""Lambda: versions, shares of the traffic and settings, on a stand-in that knows AWS's service model."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[deploy-sagemaker]'")

from deploy_clouds.aws import FakeAws
from deploy_clouds.journeys import Deployments

IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/remora:1"
INDEX = "application/vnd.oci.image.index.v1+json"


@pytest.fixture
def stage() -> Deployments:
    def flags(version: str) -> list[str]:
        return ["--image", IMAGE, "--model", f"s3://bucket/models/{version}/"]

    return Deployments("lambda", FakeAws(), flags, ["--region", "eu-west-1"])


def test_a_share_goes_to_the_new_version_until_it_is_promoted(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert not stage.deploy("v1", "--traffic", "10")
    assert "does not exist yet" in stage.text()
    assert stage.deploy("v1"), stage.text()
    assert stage.deploy("v2", "--traffic", "10"), stage.text()
    assert aws.alias["FunctionVersion"] == "1"
    assert aws.alias["RoutingConfig"] == {"AdditionalVersionWeights": {"2": 0.1}}
    assert stage.status()
    assert "version 1 90%, version 2 10%" in stage.text()
    assert stage.deploy("v2"), stage.text()
    assert aws.alias["FunctionVersion"] == "2"
    assert aws.alias["RoutingConfig"] == {"AdditionalVersionWeights": {}}
    assert list(aws.versions) == ["1", "2"], "the version of the share is promoted, not published again"


def test_a_rollback_of_a_share_keeps_the_stable_version(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    assert stage.deploy("v2", "--traffic", "10"), stage.text()
    assert stage.rollback(), stage.text()
    assert (aws.alias["FunctionVersion"], aws.alias["RoutingConfig"]) == ("1", {"AdditionalVersionWeights": {}})
    assert not stage.rollback()
    assert "no earlier version" in stage.text()


def test_the_golden_request_asks_the_new_version_before_any_client_does(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    aws.calls.clear()
    assert stage.deploy("v2"), stage.text()
    operations = [call.operation for call in aws.calls]
    assert operations.index("invoke") < operations.index("update_alias")
    asked = next(call for call in aws.calls if call.operation == "invoke")
    assert asked.arguments["Qualifier"] == "2"


def test_a_new_role_is_waited_for(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    assert [call.operation for call in aws.calls].count("create_function") == 3


def test_old_versions_are_deleted_beyond_the_ones_to_keep(stage: Deployments) -> None:
    aws: Any = stage.cloud
    for version in ("v1", "v2", "v3", "v4", "v5"):
        assert stage.deploy(version, "--keep", "2"), stage.text()
    assert len(aws.versions) == 3


@pytest.mark.parametrize("keep", ["-1", "6"])
def test_more_earlier_versions_than_a_rollback_knows_are_refused_and_not_deleted(stage: Deployments, keep: str) -> None:
    with pytest.raises(ValueError, match=f"--keep={keep}: expected 0 to 5 earlier versions"):
        stage.build("v1", "--keep", keep)


def test_an_index_of_images_is_refused_before_anything_is_created(stage: Deployments) -> None:
    aws: Any = stage.cloud
    image = aws.image
    aws.image = lambda name: {**image(name), "media_type": INDEX}
    assert not stage.deploy("v1")
    assert "one image is required" in stage.text()
    assert "--provenance=false" in stage.text(), "the command that mends it"
    assert aws.function is None
    assert aws.roles == {}


def test_a_function_url_belongs_to_the_alias(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1", "--url"), stage.text()
    created = next(call for call in aws.calls if call.operation == "create_function_url_config")
    named = {"FunctionName": "digits", "Qualifier": "live"}
    assert created.arguments == {**named, "AuthType": "AWS_IAM", "InvokeMode": "BUFFERED"}
    assert stage.status()
    assert "lambda-url" in stage.text()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--memory", "64"), "128 to 10240"),
        (("--timeout", "901"), "1 to 900"),
        (("--traffic", "0"), "1 to 100"),
        (("--arch", "riscv"), "amd64 or arm64"),
    ],
)
def test_a_value_that_the_platform_refuses_is_an_error_before_any_call(
    stage: Deployments, flags: tuple[str, str], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        stage.build("v1", *flags)


def test_answers_are_streamed_by_the_function_and_its_url(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1", "--url"), stage.text()
    assert aws.url == "BUFFERED"
    assert stage.deploy("v1", "--stream"), stage.text()
    assert aws.url == "RESPONSE_STREAM"
    serving = aws.versions[aws.alias["FunctionVersion"]]
    assert serving["Environment"]["Variables"]["REMORA_RESPONSE_MODE"] == "stream"
    aws.calls.clear()
    assert stage.deploy("v1", "--stream"), stage.text()
    assert "update_function_url_config" not in {call.operation for call in aws.calls}


def test_results_of_asynchronous_invocations_go_to_their_destinations(stage: Deployments) -> None:
    aws: Any = stage.cloud
    queue, topic = "arn:aws:sqs:eu-west-1:123456789012:done", "arn:aws:sns:eu-west-1:123456789012:failed"
    flags = ("--on-success", queue, "--on-failure", topic, "--retries", "0")
    assert stage.deploy("v1", *flags), stage.text()
    places = {"OnSuccess": {"Destination": queue}, "OnFailure": {"Destination": topic}}
    assert aws.events == {"MaximumRetryAttempts": 0, "DestinationConfig": places}
    allowed = {each["Resource"]: each["Action"] for each in json.loads(aws.role_policies["remora-digits"])["Statement"]}
    assert (allowed[queue], allowed[topic]) == (["sqs:SendMessage"], ["sns:Publish"])
    aws.calls.clear()
    assert stage.deploy("v1", *flags), stage.text()
    assert "put_function_event_invoke_config" not in {call.operation for call in aws.calls}
    assert stage.deploy("v1"), stage.text()
    assert aws.events is None


def test_a_destination_that_is_no_arn_of_a_service_for_it_is_refused(stage: Deployments) -> None:
    for arn in ("done", "arn:aws:s3:::bucket"):
        with pytest.raises(ValueError, match="the ARN of a queue"):
            stage.build("v1", "--on-success", arn)
    with pytest.raises(ValueError, match="0, 1 or 2"):
        stage.build("v1", "--retries", "3")
