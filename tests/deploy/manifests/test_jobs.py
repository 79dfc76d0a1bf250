"""Scoring jobs: their files, and the rows that their containers write."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

from remora.cli import main
from remora_deploy.manifests import find_renderer
from remora_deploy.manifests.facts import Choices, Facts, Model
from support.models import onnx_models
from support.servers.object_store import object_store

ONE = ("gs://bucket/in.csv", "gs://bucket/out.csv")
MANY = ("gs://bucket/in-{task}.csv", "gs://bucket/out-{task}.csv")
FACTS = Facts("scores", "registry.example/remora:1", "gs://bucket/models", (Model("m", 8, 2, False),), 0.5, 700)


def job(platform: str, choices: Choices) -> dict[str, Any]:
    (found,) = yaml.safe_load_all(find_renderer(platform)(FACTS._replace(choices=choices)))
    return dict(found)


def task_of(found: dict[str, Any]) -> dict[str, Any]:
    template = found["spec"]["template"]["spec"]
    return dict(template["template"]["spec"] if found["apiVersion"].startswith("run.") else template)


def command_of(found: dict[str, Any], environ: dict[str, str]) -> list[str]:
    """The words of the container; Kubernetes replaces variables in them, Cloud Run does not."""
    (container,) = task_of(found)["containers"]
    words = [*container["command"], *container["args"]]
    if found["apiVersion"] == "batch/v1":
        words = [word.replace("$(JOB_COMPLETION_INDEX)", environ["JOB_COMPLETION_INDEX"]) for word in words]
    return words


@pytest.mark.parametrize("platform", ["cloud-run", "kubernetes"])
def test_each_task_scores_its_file(platform: str, tmp_path: Path, child_environment: dict[str, str]) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
    onnx.save(onnx_models.identity("FP32", ("n", 2)), tmp_path / "model.onnx")
    found = job(platform, Choices(job=MANY, tasks=2))
    variables = {"cloud-run": "CLOUD_RUN_TASK_INDEX", "kubernetes": "JOB_COMPLETION_INDEX"}
    with object_store() as store:
        store.put("bucket", "models/model.onnx", (tmp_path / "model.onnx").read_bytes())
        for task in range(2):
            store.put("bucket", f"in-{task}.csv", f"a,b\n{task},1.5\n".encode())
        for task in range(2):
            environ = {
                **child_environment,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "STORAGE_EMULATOR_HOST": store.url,
                variables[platform]: str(task),
                "XDG_CACHE_HOME": str(tmp_path),
            }
            words = [
                f"{word}/model.onnx"
                if word == "gs://bucket/models"
                else word.replace("/tmp/score", str(tmp_path / "w"))
                for word in command_of(found, environ)
            ]
            words = [word.replace("gs://bucket/models ", "gs://bucket/models/model.onnx ") for word in words]
            assert shutil.which(words[0])
            done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
        assert store.buckets["bucket"]["out-0.csv"] == b"row,y_0,y_1\n0,0.0,1.5\n"
        assert store.buckets["bucket"]["out-1.csv"] == b"row,y_0,y_1\n0,1.0,1.5\n"


def test_one_task_needs_no_shell() -> None:
    (container,) = task_of(job("cloud-run", Choices(job=ONE)))["containers"]
    assert container["command"] == ["python"]
    assert container["args"][:6] == ["-m", "remora", "score", "gs://bucket/models", *ONE]
    assert "ports" not in container


def test_a_job_of_cloud_run_has_its_tasks_account_and_time() -> None:
    found = job("cloud-run", Choices(job=MANY, tasks=20, service_account="a@p.iam.gserviceaccount.com"))
    assert found["spec"]["template"]["spec"]["taskCount"] == 20
    task = task_of(found)
    assert (task["serviceAccountName"], task["timeoutSeconds"]) == ("a@p.iam.gserviceaccount.com", 86_400)
    assert task["containers"][0]["resources"]["limits"] == {"cpu": "2", "memory": "2Gi"}


def test_a_job_with_a_gpu_keeps_to_the_platforms_hour() -> None:
    task = task_of(job("cloud-run", Choices(job=ONE, gpus=1)))
    assert (task["timeoutSeconds"], task["nodeSelector"]) == (3600, {"run.googleapis.com/accelerator": "nvidia-l4"})
    assert task["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_a_pod_of_a_job_continues_in_its_folder() -> None:
    found = job("kubernetes", Choices(job=ONE, gpus=1, secret="keys", spot="gke", namespace="ml"))
    task = task_of(found)
    assert task["restartPolicy"] == "OnFailure"
    assert "completions" not in found["spec"]
    assert "--work-directory=/tmp/score" in task["containers"][0]["args"]
    assert {"name": "scratch", "mountPath": "/tmp"} in task["containers"][0]["volumeMounts"]


@pytest.mark.parametrize(
    ("platform", "flags", "reason"),
    [
        ("cloud-run", ["--job", "in.csv", "gs://b/out.csv"], "--job in.csv: expected a URL"),
        ("cloud-run", ["--job", *MANY], "expected {task} in both names with --tasks"),
        ("cloud-run", ["--job", *ONE, "--tasks", "2"], "expected {task} in both names with --tasks"),
        ("cloud-run", ["--tasks", "2"], "--tasks needs --job"),
        ("cloud-run", ["--job", *ONE, "--tasks", "0"], "--tasks 0: expected 1 to 10000"),
        ("cloud-run", ["--job", "gs://b/$(x)", "gs://b/out.csv"], "--job 'gs://b/$(x)': expected"),
        ("cloud-run", ["--job", *ONE, "--canary", "10"], "--canary has no place in a job"),
        ("kubernetes", ["--job", *ONE, "--max-replicas", "9"], "--max-replicas has no place in a job"),
        ("knative", ["--job", *ONE], "--job has no place in the files of knative"),
    ],
)
def test_a_job_that_cannot_run_is_refused(
    platform: str, flags: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifests", platform, str(tmp_path), "--models", "gs://bucket/models", *flags]) == 2
    assert reason in capsys.readouterr().err
