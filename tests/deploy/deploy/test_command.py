"""Command `remora deploy`: its words, its dry run and its exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from remora.cli import main
from remora.system.install_advice import install_command
from remora_deploy.deploy import ACTIONS, PLATFORMS

PLAN = ["digits", "--image", "123456789012.dkr.ecr.eu-west-1.amazonaws.com/remora:1", "--model", "s3://bucket/digits/"]


def test_the_help_lists_platforms_and_actions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["deploy", "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert {word for word in (*PLATFORMS, *ACTIONS) if word not in out} == set()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("action", ["", *ACTIONS])
def test_every_platform_has_every_action(action: str, platform: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["deploy", *([action] if action else []), platform, "--help"])
    assert end.value.code == 0
    assert f"remora deploy {action} {platform}".replace("  ", " ") in capsys.readouterr().out


def test_a_dry_run_prints_every_call_and_makes_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "sagemaker", *PLAN, "--max-instances", "3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for call in (
        "sts get_caller_identity",
        "iam create_role",
        "sagemaker create_model",
        "sagemaker create_endpoint_config",
        "sagemaker create_endpoint",
        "application-autoscaling put_scaling_policy",
        "# undo on failure\nsagemaker delete_endpoint",
    ):
        assert call in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["sagemaker", *PLAN, "--serverless", "much"], "expected MB:CONCURRENCY"),
        (["sagemaker", *PLAN, "--env", "A"], "expected NAME=VALUE"),
        (["sagemaker", *PLAN, "--expect", "x"], "--expect needs --request"),
        (["sagemaker", *PLAN, "--request", "/missing"], "/missing: No such file"),
        (["sagemaker", *PLAN, "--release"], "expected one running release"),
        (["lambda", *PLAN, "--release", "stable=1,shadow=2:9%"], "this platform has no shadow of a release"),
        (["status"], "expected a platform"),
        (["status", "mainframe"], "expected a platform"),
    ],
)
def test_wrong_usage_ends_with_2_and_the_reason(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", *words, *(["--dry-run"] if "digits" in words else [])]) == 2
    assert text in capsys.readouterr().err


def test_a_value_of_a_variable_is_not_in_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "sagemaker", *PLAN, "--env", "=s3cret", "--dry-run"]) == 2
    assert "s3cret" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["mainframe", "x"], ["sagemaker"], ["invoke", "sagemaker", "digits"]])
def test_unknown_platforms_and_missing_arguments_are_refused_by_the_parser(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["deploy", *words])
    assert end.value.code == 2


def test_without_the_sdk_the_error_has_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[deploy-sagemaker]'")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    assert main(["deploy", "sagemaker", *PLAN, "--via", "sdk"]) == 1
    assert install_command("sagemaker-sdk") in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert main(["deploy", "sagemaker", *PLAN]) == 1
    assert install_command("deploy-sagemaker") in capsys.readouterr().err
