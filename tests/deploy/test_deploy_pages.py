"""docs/deploy: one template for all platforms, and every command run in the order of the page against stand-ins."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from conftest import ROOT, Digits
from remora.cli import build_parser, main
from remora.plugins import HOSTS
from remora_adapters.aws_lambda import Function, Settings
from remora_deploy.deploy import command as deploy_command
from remora_deploy.deploy import find_platform
from support.process.makefiles import make_text
from support.servers.hosting import write_scale

pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[deploy-sagemaker]'")

from deploy_clouds.aws import FakeAws
from deploy_clouds.azure import FakeAzure
from deploy_clouds.cluster import FakeCluster
from deploy_clouds.docker import FakeDocker
from deploy_clouds.google import FakeGoogle
from deploy_clouds.helm import FakeHelm
from deploy_clouds.tools import Tools

PAGES = sorted((ROOT / "docs" / "deploy").glob("*.md"))
SECTIONS = (
    "Before you start", "Try it locally", "Build and push", "Upload", "Deploy", "Ask", "Watch",
    "Update and roll back", "Remove", "Limits", "If it fails",
)  # fmt: skip
BLOCK = re.compile(r"^```(console|json)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^## (.+)\n((?:(?!^## ).*\n?)*)", re.MULTILINE)
PLACEHOLDER = re.compile(r"(?<![\w$_-])[A-Z]{3,}(?![\w_])")
DEPLOYED = {"container": "compose"}
"""Pages whose platform for `remora deploy` has another name."""
CLOUDS: dict[str, Callable[[], Any]] = {
    "sagemaker": FakeAws, "lambda": FakeAws, "azureml": FakeAzure, "vertex": FakeGoogle, "cloud-run": FakeGoogle,
    "knative": FakeCluster, "kserve": FakeCluster, "helm": FakeHelm, "container": FakeDocker,
}  # fmt: skip
PLACES = {
    FakeAws: {"ACCOUNT": "123456789012", "REGION": "eu-west-1", "BUCKET": "bucket"},
    FakeGoogle: {"PROJECT": "p", "REGION": "europe-west4", "BUCKET": "bucket"},
    FakeAzure: {"SUBSCRIPTION": "s", "GROUP": "g", "WORKSPACE": "w", "REGISTRY": "w"},
}
ANYWHERE = {"REGISTRY": "registry.example", "BUCKET": "bucket", "REGION": "eu-west-1", "KEY": "k", "SECRET": "s"}
NO_PLACEHOLDERS = {"AWS", "PWD", "TOKEN", "DIGEST"}
OF_AWS = {"sagemaker-runtime": "sagemaker", "service-quotas": "servicequotas"}
"""Services whose rights have another prefix in IAM."""
NAMED = {"lambda:Invoke": "lambda:InvokeFunction"}
"""Operations whose right has another name in IAM."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


class Step(NamedTuple):
    """A command of a page, with the JSON that follows its block, or ""."""

    section: str
    line: str
    expected: str


def sections_of(page: Path) -> dict[str, str]:
    return dict(SECTION.findall(page.read_text()))


def steps_of(page: Path, names: tuple[str, ...] = SECTIONS) -> Iterator[Step]:
    """Yield the commands of the template's sections in order, lines that go on joined."""
    for name, text in sections_of(page).items():
        if name not in names:
            continue
        found = BLOCK.findall(text)
        for at, (language, block) in enumerate(found):
            if language != "console":
                continue
            expected = found[at + 1][1] if at + 1 < len(found) and found[at + 1][0] == "json" else ""
            lines = re.sub(r"\\\n\s*", " ", block).splitlines()
            for line in lines:
                assert line.startswith("$ "), f"{page.name}: expected a command in {line!r}"
                yield Step(name, line.removeprefix("$ "), expected if line == lines[-1] else "")


def spans_of(page: Path) -> list[str]:
    """The code spans of a page's text, those of several lines joined."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def named(words: list[str], flag: str) -> str | None:
    """The value of a command's flag."""
    inline = [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return inline[0] if inline else words[words.index(flag) + 1] if flag in words else None


# -- the template -----------------------------------------------------------------------------------------------------


def test_every_platform_has_its_page() -> None:
    hosts = {page.stem.replace("-", "_") for page in PAGES}
    assert hosts == {*HOSTS, "lambda", "helm"}
    assert set(CLOUDS) == {page.stem for page in PAGES}


@every_page
def test_a_page_has_the_sections_of_the_template_in_order(page: Path) -> None:
    assert [name for name in sections_of(page) if name in SECTIONS] == list(SECTIONS)


@every_page
def test_a_page_says_first_what_it_was_tested_against(page: Path) -> None:
    introduction = page.read_text().partition("## ")[0]
    assert "stand-in" in introduction or page.stem == "container"


@every_page
def test_placeholders_of_commands_are_explained_before(page: Path) -> None:
    commands = " ".join(step.line for step in steps_of(page))
    used = set(PLACEHOLDER.findall(commands)) - NO_PLACEHOLDERS
    explained = set(re.findall(r"`([A-Z]+)`", sections_of(page)["Before you start"]))
    assert used <= explained


@every_page
def test_messages_of_failures_are_texts_of_remora_or_of_a_stand_in(page: Path) -> None:
    sources = "".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        for folder in ("adapters", "core", "tests/deploy_clouds")
        for path in (ROOT / folder).rglob("*.py")
    )
    rows = re.findall(r"^\| `([^`]+)` \|", sections_of(page)["If it fails"], re.MULTILINE)
    assert len(rows) >= 3
    for message in rows:
        words = message.split()
        for value in ("", words[-1]):  # a template may have a value at its end, which must be written elsewhere
            head = message.removesuffix(value) + ("{" if value else "")
            if head in sources and value in sources:
                break
        else:
            pytest.fail(f"no source has {message!r}")


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answer(digits: Digits) -> bytes:
    """The answer of the real model to the request of the pages."""

    class Context:
        def get_remaining_time_in_millis(self) -> int:
            return 60_000

    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
    settings = Settings.of({"REMORA_MODEL_REPOSITORY": str(digits.models)})
    from remora.engine import Engine

    function = Function(Engine(options=settings.engine).start(), settings)
    try:
        found = function(json.loads((digits.requests / "eight.json").read_text()), Context())
    finally:
        function.close()
    return json.dumps(found).encode()


@pytest.fixture
def folder(digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader: two versions of the models, and the requests."""
    shutil.copytree(digits.models, tmp_path / "models")
    shutil.copytree(digits.models, tmp_path / "models-2")
    (tmp_path / "models-2" / "digits" / "labels.txt").write_text("\n".join(map(str, range(10))))
    shutil.copy(digits.requests / "eight.json", tmp_path / "request.json")
    row = np.ravel(json.loads((tmp_path / "request.json").read_text())["inputs"][0]["data"]).tolist()
    (tmp_path / "predict.json").write_text(json.dumps({"instances": [row]}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


class Reader:
    """Runs the commands of a page; ``served`` is what served after each deployment."""

    def __init__(self, page: Path, cloud: Any, capsys: pytest.CaptureFixture[bytes]) -> None:
        self.page, self.cloud, self.capsys = page, cloud, capsys
        self.tools = Tools(cloud)
        self.served: list[dict[str, int]] = []
        self.places = {**ANYWHERE, **PLACES.get(type(cloud), {})}

    def follow(self, step: Step) -> None:
        line = PLACEHOLDER.sub(lambda word: self.places.get(word[0], word[0]), step.line)
        words = shlex.split(line)
        match words[:2]:
            case ["remora", "image"]:
                self.tools.build(words[1:])
            case ["remora", "deploy"]:
                self.deploy(words[2:], step)
            case ["remora", "manifests", *_]:
                *command, _, file = words[1:]
                self.capsys.readouterr()
                assert main(command) == 0
                Path(file).write_bytes(self.capsys.readouterr().out)
            case ["remora", *_]:
                build_parser().parse_args(words[1 : words.index(">")] if ">" in words else words[1:])
            case _:
                self.tools.run(line)

    def deploy(self, words: list[str], step: Step) -> None:
        _, action, options = deploy_command.parse(words)
        if not action:
            self.tools.before_deployment(options)
        self.capsys.readouterr()
        code = deploy_command.main(words)
        out, err = self.capsys.readouterr()
        assert code == 0, f"{step.line}\n{out!r}\n{err!r}"
        self.served.append(self.cloud.serving())
        if step.expected:
            got, shown = json.loads(out), json.loads(step.expected)
            for each in (got, shown):
                (output,) = each["outputs"]
                output["data"] = [value.partition(":")[2] for value in output["data"]]
            assert got == shown


@every_page
def test_every_command_of_a_page_works_in_its_order(
    page: Path, answer: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    cloud = CLOUDS[page.stem]()
    cloud.reply = lambda version: answer
    cloud.login, cloud.environ, cloud.close = (lambda host: None), dict, (lambda: None)
    module: Any = find_platform(DEPLOYED.get(page.stem, page.stem))
    monkeypatch.setattr(module, "connect", lambda options: cloud)
    monkeypatch.setattr(deploy_command, "with_local_calls", lambda connection: connection)
    monkeypatch.setattr(deploy_command, "time", Timeless())
    reader = Reader(page, cloud, capsysbinary)
    serving: dict[str, list[dict[str, int]]] = {}
    for step in steps_of(page):
        reader.served.clear()
        reader.follow(step)
        serving.setdefault(step.section, []).extend(reader.served)
    (first,) = serving["Deploy"]
    assert first
    assert all(each == first for each in (*serving["Ask"], *serving["Watch"]))
    *updates, last = serving["Update and roll back"]
    assert updates[-1] not in ({}, first), "the update serves"
    assert last == first, "the rollback returns to the first version"
    assert serving["Remove"] == [{}]
    if isinstance(cloud, FakeAws):
        assert_rights_are_listed(page, cloud)


class Timeless:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def assert_rights_are_listed(page: Path, cloud: FakeAws) -> None:
    """Fail for a call of AWS whose right "Before you start" does not name."""
    listed = re.findall(r"`([a-z0-9-]+:[\w*]+)`", sections_of(page)["Before you start"])
    for call in cloud.calls:
        if call.target in ("local", "storage", "registry"):
            continue
        name = "".join(part.capitalize() for part in call.operation.split("_"))
        right = f"{OF_AWS.get(call.target, call.target)}:{name}"
        right = NAMED.get(right, right)
        assert any(fnmatchcase(right, each) for each in listed), right


@every_page
def test_commands_in_the_text_are_read_too(page: Path) -> None:
    for span in spans_of(page):
        words = shlex.split(span) if span.startswith("remora ") else []
        if words[1:2] == ["deploy"] and len(words) > 4:
            deploy_command.parse(words[2:])
        elif {"--model", "--models"} & {*words}:
            build_parser().parse_args(words[1:])
    for module in re.findall(r"-m[ ,]([\w.]+)", page.read_text()):
        assert module == "awslambdaric" or importlib.util.find_spec(module), module


@every_page
def test_make_has_the_targets_that_a_page_names(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", make_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z0-9-]+)", page.read_text())) <= targets


@every_page
def test_terraforms_modules_have_the_variables_that_are_given(page: Path) -> None:
    for span in spans_of(page):
        words = span.split()
        if words[0] != "terraform":
            continue
        module = ROOT / (named(words, "-chdir") or "")
        declared = "".join(path.read_text() for path in module.glob("*.tf"))
        for at, word in enumerate(words):
            if word == "-var":
                assert f'variable "{words[at + 1].partition("=")[0]}"' in declared, span


def test_gclouds_own_parser_accepts_the_commands(tmp_path: Path) -> None:
    gcloud = shutil.which("gcloud")
    if gcloud is None:
        pytest.skip("gcloud is not installed: the Google Cloud SDK has its own check of commands")
    found = [step.line for page in PAGES for step in steps_of(page)]
    lines = [line for line in found if line.startswith("gcloud ")]
    lines += [inner for line in found for inner in re.findall(r"\$\((gcloud (?:[^()]|\([^()]*\))+)\)", line)]
    lines += [span for page in PAGES for span in spans_of(page) if re.match(r"gcloud \S+ \S+ \S+ \S+", span)]
    assert lines
    commands = [line.replace("PROJECT", "project-1") for line in dict.fromkeys(lines)]
    described = [{"command_string": line, "id": number} for number, line in enumerate(commands)]
    (tmp_path / "commands").write_text(json.dumps(described))
    words = [gcloud, "meta", "lint-gcloud-commands", f"--commands-file={tmp_path / 'commands'}"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.stdout.strip(), done.stderr
    verdicts = json.loads(done.stdout)
    assert len(verdicts) == len(commands)
    assert [each["error_message"] for each in verdicts if not each["success"]] == []


@pytest.mark.parametrize("platform", ["azureml", "knative", "kserve"])
def test_the_files_that_pages_print_name_their_image_and_model(
    platform: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
    write_scale(tmp_path / "models" / "digits")
    page = ROOT / "docs" / "deploy" / f"{platform}.md"
    (line,) = re.findall(r"^\$ (remora manifests .*)$", page.read_text(), re.MULTILINE)
    words = shlex.split(line)
    words = [str(tmp_path / "models") if word == "models" else word for word in words[1 : words.index(">")]]
    assert main(words) == 0
    assert str(named(words, "--image")) in capsys.readouterr().out


CHECKS = {
    "azureml": "scoring", "knative": "requests", "kserve": "one-for-one", "vertex": "predictions",
    "cloud-run": "requests", "sagemaker": "invocations", "helm": "requests", "lambda": "invocations",
}  # fmt: skip


@pytest.mark.parametrize(("platform", "check"), CHECKS.items())
def test_requests_that_the_emulator_sends_as_a_page_says_are_answered(
    platform: str, check: str, folder: Path, child_environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "deploy" / f"{platform}.md"
    (step,) = steps_of(page, ("Try it locally",))
    words = shlex.split(step.line)
    assert words[:2] == ["remora", "emulate"]
    if "awslambdaric" in words and importlib.util.find_spec("awslambdaric") is None:
        pytest.skip("awslambdaric is not installed: make test-lambda has it")
    found = [sys.executable if word == "python" else word for word in words[1:]]
    environment = ["--env", f"PYTHONPATH={child_environment['PYTHONPATH']}"]
    patience = ["--startup-timeout", "60", "--patience", "15"]
    code = main([*found[:2], "--only", check, *environment, *patience, *found[2:]])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "1 passed, 0 failed, 0 skipped" in said
