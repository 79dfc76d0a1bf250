"""`remora build`: what its context has, what is refused, and that its steps make a server of the model."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from conftest import free_ports
from containers.dockerfiles import instructions
from remora.cli import main
from remora_deploy.images import IMAGES
from remora_deploy.images.wheel import repack
from support.process.small_wheels import write_wheel
from support.servers.live_server import client, until

APP = """
import remora
import remora_probe
from features import scale

@remora.model
def answer(x: int) -> int:
    return scale.by_two(x) + remora_probe.ANSWER
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A file in place of the wheel, for tests that install nothing."""
    made = tmp_path / "remora-9.8.7-py3-none-any.whl"
    made.write_bytes(b"wheel")
    return made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with an app.py, its modules, and files that do not belong to it."""
    folder = tmp_path / "project"
    (folder / "features").mkdir(parents=True)
    (folder / "app.py").write_text(APP)
    (folder / "features" / "scale.py").write_text("def by_two(x):\n    return 2 * x\n")
    (folder / "features" / "factors.json").write_text("{}")
    (folder / "requirements.txt").write_text("-r base.txt\n")
    (folder / "base.txt").write_text("remora-probe>=1\n")
    (folder / "notebook.py").write_text("import nothing")
    (folder / ".env").write_text("PASSWORD=1")
    return folder


def built(source: Path | str, wheel: Path, target: Path, *flags: str) -> Path:
    assert main(["build", str(source), "--wheel", str(wheel), "--output", str(target), *flags]) == 0
    return target


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def variables(context: Path) -> dict[str, str]:
    lines = instructions((context / "Dockerfile").read_text())
    return dict(pair.split("=", 1) for each in lines if each.word == "ENV" for pair in each.rest.split())


def test_a_python_file_comes_with_its_modules_and_requirements_alone(
    project: Path, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = built(project / "app.py", wheel, tmp_path / "context")
    assert files(context / "models" / "app") == {
        *("app.py", "features/scale.py", "features/factors.json", "requirements.txt", "base.txt")
    }
    assert (context / "requirements" / "all.txt").read_text() == "-r requirements.txt\n"
    assert files(context / "requirements") == {"all.txt", "requirements.txt", "base.txt"}
    assert {"Dockerfile", ".dockerignore", "constraints.txt", f"dist/{wheel.name}"} <= files(context)
    assert variables(context)["REMORA_MODEL_REPOSITORY"] == "/models/app"
    assert f"build it: docker build --tag app {context}" in capsys.readouterr().out


def test_the_dockerfile_copies_only_what_the_context_has(project: Path, wheel: Path, tmp_path: Path) -> None:
    for name in IMAGES:
        context = built(project / "app.py", wheel, tmp_path / "context", "--image", name)
        lines = instructions((context / "Dockerfile").read_text())
        copied = [each.rest.split()[0] for each in lines if each.word == "COPY" and not each.rest.startswith("--from")]
        assert all((context / path).exists() for path in copied), copied
        assert "models/app" in copied
        assert any("VERSION=9.8.7" in each.rest for each in lines if each.word == "ARG")


@pytest.mark.parametrize("name", IMAGES)
def test_a_context_has_no_files_of_other_images_and_no_comments_for_maintainers(
    name: str, project: Path, wheel: Path, tmp_path: Path
) -> None:
    context = built(project / "app.py", wheel, tmp_path / "context", "--image", name)
    own = {each for each in files(context) if not each.startswith(("models/", "requirements/"))}
    needed = {"Dockerfile", ".dockerignore", "constraints.txt", f"dist/{wheel.name}", "containers/install.sh"}
    assert own == needed | {*filter(None, [IMAGES[name].requirements])}
    for file in own - {".dockerignore", f"dist/{wheel.name}"}:
        lines = (context / file).read_text().splitlines()
        comments = [line for line in lines if line.lstrip().startswith("#") and not line.startswith("#!")]
        assert len(comments) == (4 if file == "Dockerfile" else 0), comments
    assert (context / "containers" / "install.sh").read_text().startswith("#!/bin/sh\nset -eu\n")


def test_the_same_files_give_the_same_context(project: Path, wheel: Path, tmp_path: Path) -> None:
    first = built(project / "app.py", wheel, tmp_path / "one")
    os.utime(project / "app.py", (1, 1))
    (project / "app.py").chmod(0o600)
    second = built(project / "app.py", wheel, tmp_path / "two")
    assert files(first) == files(second)
    _, different, unreadable = filecmp.cmpfiles(first, second, files(first), shallow=False)
    assert (different, unreadable) == ([], [])
    stamps = [
        {path.relative_to(root): (path.stat().st_mtime_ns, path.stat().st_mode) for path in root.rglob("*")}
        for root in (first, second)
    ]
    assert stamps[0] == stamps[1]


def test_a_context_is_written_again_but_no_folder_of_others(
    project: Path, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = built(project / "app.py", wheel, tmp_path / "context")
    (context / "models" / "app" / "stale.py").touch()
    built(project / "app.py", wheel, context)
    assert "stale.py" not in files(context / "models" / "app")
    flags = ["--wheel", str(wheel), "--output", str(project)]
    assert main(["build", str(project / "app.py"), *flags]) == 2
    assert "is not empty and was not written by this command" in capsys.readouterr().err
    assert (project / "notebook.py").is_file()


def test_named_functions_and_other_file_names_are_served_by_the_file(
    project: Path, wheel: Path, tmp_path: Path
) -> None:
    context = built(f"{project / 'app.py'}:answer", wheel, tmp_path / "context")
    assert variables(context)["REMORA_MODEL_REPOSITORY"] == "/models/app/app.py:answer"
    (project / "app.py").rename(project / "service.py")
    context = built(project / "service.py", wheel, tmp_path / "context")
    assert variables(context)["REMORA_MODEL_REPOSITORY"] == "/models/service/service.py"


def test_a_folder_is_copied_without_hidden_files_environments_and_itself(
    project: Path, wheel: Path, tmp_path: Path
) -> None:
    (project / "venv" / "lib").mkdir(parents=True)
    (project / "venv" / "pyvenv.cfg").touch()
    (project / "venv" / "lib" / "big.py").touch()
    (project / "features" / "again").symlink_to(project)
    (project / "__pycache__").mkdir()
    (project / "__pycache__" / "app.cpython-311.pyc").touch()
    for _ in range(2):
        context = built(project, wheel, project / "image")
    assert files(context / "models" / "project") == {
        *("app.py", "notebook.py", "features/scale.py", "features/factors.json", "requirements.txt", "base.txt")
    }


def test_a_repository_has_the_requirements_of_each_of_its_models(wheel: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    for name in ("a", "b", "c"):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text("class TritonPythonModel: ...")
    (repository / "a" / "requirements.txt").write_text("one==1\n")
    (repository / "c" / "requirements.txt").write_text("two==2\n")
    context = built(repository, wheel, tmp_path / "context")
    assert (context / "requirements" / "all.txt").read_text() == "-r a/requirements.txt\n-r c/requirements.txt\n"
    assert variables(context)["REMORA_MODEL_REPOSITORY"] == "/models/models"


def test_a_model_file_comes_with_its_data_and_without_foreign_requirements(wheel: Path, tmp_path: Path) -> None:
    for name in ("churn.onnx", "churn.onnx.data", "churn.onnx_data", "other.onnx", "requirements.txt"):
        (tmp_path / name).touch()
    context = built(tmp_path / "churn.onnx", wheel, tmp_path / "context")
    assert files(context / "models") == {"churn/churn.onnx", "churn/churn.onnx.data", "churn/churn.onnx_data"}
    assert "MODEL_REQUIREMENTS" not in (context / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("names", "source", "extras"),
    [
        (["churn.onnx"], "churn.onnx", []),
        (["net.pt2"], "net.pt2", ["torch"]),
        (["trees.ubj"], "trees.ubj", ["trees"]),
        (["saved/saved_model.pb", "saved/variables/variables.index"], "saved", ["tensorflow"]),
        (["m/a/1/model.onnx", "m/b/1/model.pt", "m/c/1/model.xml", "m/d/1/model.py"], "m", ["openvino", "torch"]),
        (["m/a/1/model.savedmodel/saved_model.pb", "m/b/1/xgboost.json"], "m", ["tensorflow", "trees"]),
        (["m/chat/1/genai_config.json", "m/chat/1/model.onnx"], "m", ["generation"]),
    ],
)
def test_the_extras_of_an_image_follow_from_the_files(
    names: list[str],
    source: str,
    extras: list[str],
    wheel: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{L" if name.endswith("ubj") else b"x")
    context = built(tmp_path / source, wheel, tmp_path / "context")
    lines = instructions((context / "Dockerfile").read_text())
    (installed,) = {each.rest for each in lines if each.word == "ARG" and each.rest.startswith("EXTRAS=")}
    assert installed.removeprefix("EXTRAS=").split(",") == [*IMAGES["cpu"].extras, *extras]
    assert (f" with {', '.join(extras)}" in capsys.readouterr().out) == bool(extras)


def test_a_configuration_decides_about_the_backend_before_the_names_of_files(wheel: Path, tmp_path: Path) -> None:
    for name, config in (("a", 'backend: "vllm"'), ("b", 'platform: "pytorch_libtorch"'), ("c", 'backend: "fil"')):
        (tmp_path / "m" / name / "1").mkdir(parents=True)
        (tmp_path / "m" / name / "config.pbtxt").write_text(config)
        (tmp_path / "m" / name / "1" / ("model.onnx" if name == "c" else "weights.bin")).touch()
    context = built(tmp_path / "m", wheel, tmp_path / "context", "--extra", "redis")
    assert "EXTRAS=onnx,grpc,otel,s3,redis,torch,trees,vllm" in (context / "Dockerfile").read_text()


def test_an_image_for_gpus_has_its_own_variant_of_onnx(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "churn.onnx").touch()
    context = built(tmp_path / "churn.onnx", wheel, tmp_path / "context", "--image", "cuda13")
    assert "EXTRAS=gpu,grpc,otel,s3" in (context / "Dockerfile").read_text()


def test_further_files_are_included(project: Path, wheel: Path, tmp_path: Path) -> None:
    (project / "data" / "deep").mkdir(parents=True)
    (project / "data" / "deep" / "labels.txt").touch()
    more = ["--include", str(project / "data"), "--include", str(project / "notebook.py")]
    context = built(project / "app.py", wheel, tmp_path / "context", *more)
    assert {"data/deep/labels.txt", "notebook.py"} <= files(context / "models" / "app")


def test_platforms_find_the_model_where_they_look_for_it(project: Path, wheel: Path, tmp_path: Path) -> None:
    places = {
        "sagemaker": "/opt/ml/model",
        "azureml": "/models/app/1",
        "lambda": "/models/app",
        "cuda13": "/models/app",
    }
    for image, place in places.items():
        context = built(project / "app.py", wheel, tmp_path / "context", "--image", image)
        assert f"\nCOPY models/app {place}\n" in (context / "Dockerfile").read_text()
    assert variables(context)["NVIDIA_VISIBLE_DEVICES"] == "${DEVICES}"


def test_a_trusted_pickle_is_trusted_in_the_image_too(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "iris.joblib").touch()
    (tmp_path / "requirements.txt").write_text("scikit-learn\n")
    context = built(tmp_path / "iris.joblib", wheel, tmp_path / "context", "--trust-pickle")
    assert (context / "Dockerfile").read_text().endswith('CMD ["--trust-pickle"]\n')
    assert "requirements.txt" in files(context / "models" / "iris")


@pytest.mark.parametrize(
    ("source", "flags", "reason"),
    [
        ("gone.py", [], "no such file or folder"),
        ("broken.py", [], "is not valid Python"),
        ("iris.joblib", [], "start with --trust-pickle"),
        ("iris.skops", [], "name the library, such as scikit-learn or transformers, in a requirements.txt"),
        ("app.py:a", ["--image", "sagemaker"], "serves all functions of an app.py"),
        ("app.py", ["--include", "/etc/hostname"], "it must be below"),
        ("app.py", ["--include", "gone.txt"], "it must be below"),
        ("app.py", ["--name", "my app"], "is not a name for an image"),
        ("links", [], "requirements.txt:2: './one.whl' names no package: write NAME @ URL"),
        ("outside", [], "outside the model's folder"),
        ("empty", [], "has no files"),
        ("links", ["--include", "links"], "a folder is copied whole"),
        ("app.py", ["--trust-pickle", "--image", "lambda"], "takes its settings from the platform"),
        ("app.py", ["--extra", "torch;sh"], "expected the name of an extra"),
    ],
)
def test_what_no_image_could_serve_is_refused(
    source: str, flags: list[str], reason: str, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "app.py").write_text("import remora\n")
    (tmp_path / "broken.py").write_text("def")
    for name in ("iris.joblib", "iris.skops", "more.txt"):
        (tmp_path / name).touch()
    for folder, lines in (("links", "numpy\n./one.whl\n"), ("outside", "-r ../more.txt\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "requirements.txt").write_text(lines)
    (tmp_path / "empty").mkdir()
    words = ["build", str(tmp_path / source), "--wheel", str(wheel), "--output", str(tmp_path / "context"), *flags]
    assert main(words) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "context").exists()


def test_an_engine_builds_the_context(
    project: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "bin" / "podman"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/calls.txt\n[ $3 != bad ]\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    context = built(project / "app.py", wheel, tmp_path / "context", "--run", "podman", "--tag", "r/app:1")
    assert (tmp_path / "calls.txt").read_text() == f"build --tag r/app:1 {context}\n"
    words = ["build", str(project / "app.py"), "--wheel", str(wheel), "--output", str(context), "--run", "podman"]
    assert main([*words, "--tag", "bad"]) == 1
    assert "failed: podman build --tag bad" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(words) == 2
    assert "podman is not on PATH" in capsys.readouterr().err


# -- the steps of the Dockerfile, without an engine --------------------------------------------------------------------


def wheels_of(name: str, folder: Path, extras: frozenset[str] = frozenset()) -> None:
    """Write the wheels of what a distribution of this environment requires, with those of its extras."""
    pending, seen = [(name, extras)], set[tuple[str, str]]()
    while pending:
        current, chosen = pending.pop()
        found = distribution(current)
        for extra in ("", *chosen):
            if (found.name, extra) in seen:
                continue
            seen.add((found.name, extra))
            for text in found.requires or ():
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    pending.append((needed.name, frozenset(needed.extras)))
        if current != name:
            repack(found, folder)


def run_steps(context: Path, root: Path, arguments: dict[str, str]) -> dict[str, Any]:
    """Perform the instructions of a Dockerfile below a folder and return the image's configuration.

    The folder stands for the root of the file system, and this interpreter for that of the base image.
    """
    lines = instructions((context / "Dockerfile").read_text())
    image: dict[str, Any] = {"Env": {}, "Entrypoint": [], "Cmd": []}
    workdir = root / "build"
    for word, rest in lines:
        if word == "ARG" and "=" in rest:
            name, value = rest.split("=", 1)
            arguments[name] = arguments.get(name) or value
        elif word == "COPY" and not rest.startswith("--from"):
            source, target = rest.split()
            place = root / target.lstrip("/") if target.startswith("/") else workdir / target
            if (context / source).is_dir():
                shutil.copytree(context / source, place, dirs_exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(context / source, place)
        elif word == "RUN":
            environ = {**os.environ, **arguments, "PREFIX": str(root / "opt" / "remora")}
            environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
            done = subprocess.run(["sh", "-c", rest], cwd=workdir, env=environ, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        elif word == "ENV":
            image["Env"] |= dict(pair.split("=", 1) for pair in rest.split())
        elif word in ("ENTRYPOINT", "CMD"):
            image["Entrypoint" if word == "ENTRYPOINT" else "Cmd"] = json.loads(rest)
    return image


@pytest.mark.timeout(900)
def test_the_steps_of_a_context_make_a_server_of_the_function_without_an_index(project: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheels_of("remora", wheels, frozenset({"grpc"}))
    write_wheel(wheels, "remora-probe", "1.2", "ANSWER = 42\n")
    words = ["build", str(project / "app.py"), "--wheels", str(wheels), "--output", str(tmp_path / "context")]
    assert main(words) == 0
    root = tmp_path / "root"
    image = run_steps(tmp_path / "context", root, {"EXTRAS": "grpc"})
    prefix = root / "opt" / "remora"
    assert not list(prefix.glob("lib/*/site-packages/pip"))
    shutil.rmtree(project)  # the image alone must be enough
    shutil.rmtree(tmp_path / "context")
    (http,) = free_ports(1)
    environ = {name: re.sub(r"^/models", f"{root}/models", value) for name, value in image["Env"].items()}
    environ |= {"PATH": f"{prefix}/bin", "HOME": str(tmp_path / "home")}
    flags = [f"--http-port={http}", "--http-address=127.0.0.1", "--allow-grpc=false", "--allow-metrics=false"]
    command = [str(prefix / "bin" / "python"), *image["Entrypoint"][1:], *image["Cmd"], *flags]
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT)
    try:
        until(http, "/v2/health/ready", server)
        with client(http) as connection:
            connection.request("POST", "/models/answer", '{"x": 4}')
            assert json.loads(connection.getresponse().read()) == {"output": 50}
    finally:
        server.terminate()
        server.wait(60)
    assert server.returncode == 0, log.read_text()
    assert "making an environment" not in log.read_text()
    assert not (tmp_path / "home").exists()
