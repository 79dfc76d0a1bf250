"""Every platform from the first deployment to its removal, and each way to fail, against its stand-in."""

from __future__ import annotations

import pytest

from deploy_clouds.journeys import FAULTS, answer_of, changing
from remora_deploy.deploy.plan import Call

pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[deploy-sagemaker]'")

from deploy_clouds.stages import STAGES

WORDS = {
    "no rights": ("not authorized", "may not", "forbidden", "denied"),
    "no quota": ("quota", "exceeds", "allowed", "exceeded"),
    "wrong image": ("arm64",),
    "model broken": ("broken",),
    "rollback": ("rolled", "health check", "not ready", "timed out"),
}
each_platform = pytest.mark.parametrize("platform", STAGES)


@each_platform
def test_a_service_is_deployed_asked_updated_rolled_back_and_removed(platform: str) -> None:
    stage = STAGES[platform]()
    assert not stage.status(), "nothing is there before"
    assert stage.deploy("v1"), stage.text()
    assert stage.cloud.serving() == {"v1": 100}
    assert "golden request" in stage.text()
    assert stage.invoke() == answer_of("v1")
    assert stage.status(), stage.text()
    assert stage.deploy("v2"), stage.text()
    assert stage.invoke() == answer_of("v2")
    assert stage.rollback("v1"), stage.text()
    assert stage.invoke() == answer_of("v1")
    assert stage.undeploy(), stage.text()
    assert stage.cloud.serving() == {}
    assert not stage.status()


@each_platform
def test_the_same_deployment_again_changes_nothing_that_serves(platform: str) -> None:
    stage = STAGES[platform]()
    assert stage.deploy("v1"), stage.text()
    stage.cloud.calls.clear()
    assert stage.deploy("v1"), stage.text()
    assert changing(stage.cloud.calls, STAYING) == []


@pytest.mark.parametrize(
    ("platform", "flag", "arm"),
    [
        *((name, "--traffic", "canary") for name in STAGES if name not in ("helm", "compose")),
        ("sagemaker", "--shadow", "shadow"),
        ("azureml", "--mirror", "shadow"),
    ],
)
def test_a_release_means_the_same_as_its_share_on_every_platform(platform: str, flag: str, arm: str) -> None:
    def calls(*words: str) -> list[Call]:
        stage = STAGES[platform]()
        assert stage.deploy("v1"), stage.text()
        stage.cloud.calls.clear()
        assert stage.deploy("v2", *words), stage.text()
        return stage.cloud.calls

    ten, twenty = calls(flag, "10"), calls(flag, "20")
    assert calls("--release", f"stable=1,{arm}=2:10%") == ten
    assert calls("--release", f"stable=1,{arm}=2:20%") == twenty
    assert ten != twenty
    assert calls() not in (ten, twenty)


@each_platform
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_update_gives_the_reason_and_leaves_what_serves(platform: str, fault: str) -> None:
    stage = STAGES[platform]()
    assert stage.deploy("v1"), stage.text()
    stage.cloud.fault = fault
    if fault == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            stage.deploy("v2")
        assert stage.cloud.serving() in ({"v1": 100}, {"v2": 100}), (
            "something serves, whatever the platform has finished"
        )
        assert stage.deploy("v2"), stage.text()
        assert stage.cloud.serving() == {"v2": 100}
        return
    assert not stage.deploy("v2"), stage.text()
    assert any(word in stage.text() for word in WORDS[fault]), stage.text()
    assert stage.cloud.serving() == {"v1": 100}, stage.text()
    stage.cloud.fault = ""
    assert stage.invoke() == answer_of("v1")
    assert stage.deploy("v2"), f"the cause is gone: {stage.text()}"


@each_platform
@pytest.mark.parametrize("fault", ["rollback", "model broken"])
def test_a_failed_first_deployment_leaves_nothing(platform: str, fault: str) -> None:
    stage = STAGES[platform]()
    stage.cloud.fault = fault if fault == "rollback" else f"{fault} never ready"
    assert not stage.deploy("v1"), stage.text()
    assert stage.cloud.serving() == {}
    assert not stage.status(), stage.text()
    stage.cloud.fault = ""
    assert stage.deploy("v1"), stage.text()


_READING: dict[str, tuple[str, ...]] = dict.fromkeys(("show", "status", "history", "create", "info", "image", "ps"), ())
STAYING: dict[str, tuple[str, ...]] = {
    "invoke_endpoint": (),
    "invoke": (),
    "auth": (),
    "logs": (),
    "POST": (),
    **_READING,
}
"""Operations that neither read nor change."""
