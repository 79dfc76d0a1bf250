"""Helm: the chart's values, and releases that an interruption left pending."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from conftest import ROOT
from deploy_clouds.helm import FakeHelm
from deploy_clouds.journeys import Deployments


@pytest.fixture
def stage() -> Deployments:
    def flags(version: str) -> list[str]:
        return ["--image", "registry.example:5000/ml/remora:1", "--model", f"s3://bucket/models/{version}/"]

    return Deployments("helm", FakeHelm(), flags)


def paths(values: Any, below: str = "") -> set[str]:
    if not isinstance(values, dict) or not values:
        return {below}
    return {each for key, value in values.items() for each in paths(value, f"{below}.{key}" if below else key)}


def test_every_value_is_one_of_the_chart(stage: Deployments) -> None:
    helm: Any = stage.cloud
    image = helm.image
    helm.image = lambda name: {**image(name), "labels": {"remora.cuda": "13"}}
    helm.do_get = lambda words, *rest: {"items": []}
    flags = ["--gpus", "1", "--service-account", "reader", "--storage-secret", "keys"]
    assert stage.deploy("v1", *flags), stage.text()
    values = helm.history[-1]["values"]
    chart = paths(yaml.safe_load((ROOT / "infra" / "helm" / "remora" / "values.yaml").read_text()))
    assert paths(values) <= chart
    assert values["image"]["repository"] == "registry.example:5000/ml/remora"
    assert values["image"]["digest"].startswith("sha256:")
    assert values["models"] == {"uri": "s3://bucket/models/v1/", "claim": ""}
    assert values["gpu"]["count"] == 1
    assert "arguments" not in values  # the chart adds --require-gpu to a pod with GPUs
    assert values["serviceAccount"] == {"create": False, "name": "reader"}


def test_an_interrupted_upgrade_is_ended_before_the_next_one(stage: Deployments) -> None:
    helm: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    helm.fault = "interrupted"
    with pytest.raises(KeyboardInterrupt):
        stage.deploy("v2")
    assert helm.history[-1]["status"] == "pending-upgrade"
    assert stage.deploy("v2"), stage.text()
    assert [each["status"] for each in helm.history if each["status"] == "deployed"] == ["deployed"]
    assert helm.serving() == {"v2": 100}


def test_an_interrupted_first_installation_is_removed_before_the_next_one(stage: Deployments) -> None:
    helm: Any = stage.cloud
    helm.fault = "interrupted"
    with pytest.raises(KeyboardInterrupt):
        stage.deploy("v1")
    assert stage.deploy("v1"), stage.text()
    assert helm.serving() == {"v1": 100}


def test_an_upgrade_that_fails_is_rolled_back_to_the_revision_that_serves(stage: Deployments) -> None:
    helm: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    helm.fault = "rollback"
    assert not stage.deploy("v2")
    rollback = next(call for call in helm.calls if call.operation == "rollback")
    assert rollback.arguments["words"][:3] == ["rollback", "digits", "1"]
    assert helm.history[-1]["status"] == "deployed"


@pytest.mark.parametrize(("start_s", "limit_s"), [(120, 600), (1200, 1200)])
def test_a_rollback_has_as_much_time_as_a_start_may_take(stage: Deployments, start_s: int, limit_s: int) -> None:
    helm: Any = stage.cloud
    for version in ("v1", "v2"):
        assert stage.deploy(version, "--startup-timeout", str(start_s)), stage.text()
    assert stage.rollback(), stage.text()
    helm.fault = "rollback"
    assert not stage.deploy("v3")
    back = [call.arguments["words"] for call in helm.calls if call.operation == "rollback"]
    assert [f"--timeout={limit_s}s" in words for words in back] == [True, True]


def test_shares_of_the_traffic_are_refused(stage: Deployments) -> None:
    with pytest.raises(ValueError, match="use Knative or KServe"):
        stage.build("v1", "--traffic", "10")
