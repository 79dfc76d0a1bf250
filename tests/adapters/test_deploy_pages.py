"""docs/deploy: from a folder to an endpoint in five commands, each checked as far as it can be without the platform."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT, Digits
from hosting import write_scale
from remora.cli import _parser, main
from remora.server.host import PLATFORMS
from remora_adapters.sagemaker.deploying import plan_of

PAGES = sorted((ROOT / "docs" / "deploy").glob("*.md"))
BLOCK = re.compile(r"^```(console|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMAGE_FLAGS = ("--image", "--container-image-uri")
ANYWHERE = {"--region", "--endpoint-url", "--cli-binary-format"}
"""Flags of AWS's command line itself."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(page: Path) -> list[list[str]]:
    """The commands of each block, lines that go on joined."""
    found = []
    for language, text in BLOCK.findall(page.read_text()):
        joined = text.replace("\\\n", " ")
        lines = [line for line in joined.splitlines() if line.strip()]
        found.append([line.removeprefix("$ ") for line in lines if language == "bash" or line.startswith("$ ")])
    return found


def calls(page: Path) -> list[list[str]]:
    """Every command of the page's blocks, and those of ours in its text, as words; what follows && or | is another."""
    text = re.sub(BLOCK, "", page.read_text())
    spans = [" ".join(span.split()) for span in re.findall(r"`(remora [^`]+)`", text)]
    lines = [line for block in blocks(page) for line in block] + [
        span for span in spans if {"--model", "--image"} & {*span.split()}
    ]
    found = []
    for line in lines:
        words = shlex.split(line)
        cuts = [-1, *(at for at, word in enumerate(words) if word in ("&&", "|")), len(words)]
        found += [words[begin + 1 : end] for begin, end in pairwise(cuts)]
    return found


def named(words: list[str], flag: str) -> str | None:
    """What a flag of a command says."""
    inline = [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return inline[0] if inline else words[words.index(flag) + 1] if flag in words else None


def test_every_platform_has_its_page() -> None:
    assert {page.stem.replace("-", "_") for page in PAGES} == {*PLATFORMS, "lambda"}


@every_page
def test_a_page_leads_from_a_folder_to_an_answer_in_five_commands(page: Path) -> None:
    if page.stem == "sagemaker":  # which explains each
        steps = re.findall(r"^\*\*(\d)\.", page.read_text(), re.MULTILINE)
        assert steps == list("12345")
        assert [len(block) for block in blocks(page)[:5]] == [1] * 5
    else:
        assert len(blocks(page)[0]) == 5


@every_page
def test_an_image_is_built_under_the_name_that_is_pushed_and_deployed(page: Path) -> None:
    built, pushed, deployed = set(), set(), set()
    for words in calls(page):
        if words[:2] == ["make", "image"]:
            given = dict(word.split("=", 1) for word in words[2:])
            assert (ROOT / "containers" / given["IMAGE"] / "Dockerfile").is_file()
            built.add(given.get("TAG", f"remora:{given['IMAGE']}"))
        elif words[:2] == ["docker", "build"]:
            built.add(words[words.index("-t") + 1])
        elif words[:2] == ["docker", "push"]:
            pushed.add(words[2])
        deployed |= {named(words, flag) for flag in IMAGE_FLAGS} - {None}
        deployed |= {word.partition("=")[2] for word in words if word.startswith("ImageUri=")}
    assert built >= pushed
    assert pushed or page.stem == "container"
    assert deployed - {"URI"} <= pushed


def test_the_image_is_named_as_the_pages_say() -> None:
    text = (ROOT / "Makefile").read_text()
    assert re.search(r"^TAG +\?= remora:\$\(IMAGE\)$", text, re.MULTILINE)
    assert "--tag $(TAG)" in text


@every_page
def test_commands_of_ours_are_read_and_the_modules_that_they_start_are_there(page: Path) -> None:
    for words in calls(page):
        if words[0] == "remora":
            if words[1] == "deploy":
                plan_of([word for word in words[3:] if word != "--dry-run"])
            else:
                _parser().parse_args(words[1 : words.index(">") if ">" in words else None])
    for module in re.findall(r"-m[ ,]([\w.]+)", page.read_text()):
        assert module == "awslambdaric" or importlib.util.find_spec(module), module


@every_page
def test_make_has_the_targets_that_a_page_names(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z0-9-]+)", page.read_text())) <= targets


@every_page
def test_terraforms_modules_have_the_variables_that_are_given(page: Path) -> None:
    for command in re.findall(r"`(terraform [^`]+)`", page.read_text()):
        words = command.split()
        module = ROOT / (named(words, "-chdir") or "")
        declared = "".join(path.read_text() for path in module.glob("*.tf"))
        for at, word in enumerate(words):
            if word == "-var":
                assert f'variable "{words[at + 1].partition("=")[0]}"' in declared, command


@every_page
def test_calls_of_aws_are_those_of_its_services(page: Path) -> None:
    session = pytest.importorskip("botocore.session", reason="botocore is not installed: pip install '.[dev]'")
    from botocore import xform_name

    loaded = session.get_session()
    for words in calls(page):
        if words[0] != "aws" or words[1] == "s3":  # which has commands of its own
            continue
        service, operation = words[1:3]
        flags = {word.partition("=")[0] for word in words[3:] if word.startswith("--")} - ANYWHERE
        if operation == "wait":
            waiters = loaded.get_waiter_model(service)
            name = next(name for name in waiters.waiter_names if xform_name(name, "-") == words[3])
            called = waiters.get_waiter(name).operation
        else:
            called = operation
        model = loaded.get_service_model(service)
        shape = next(
            model.operation_model(name).input_shape
            for name in model.operation_names
            if called in (name, xform_name(name, "-"))
        )
        members = {xform_name(name, "-"): name for name in shape.members}
        assert {flag.removeprefix("--") for flag in flags} <= set(members), words
        needed = {name for name in shape.required_members if f"--{xform_name(name, '-')}" not in flags}
        assert not needed, words


@pytest.mark.parametrize("platform", ["azureml", "knative", "kserve"])
def test_the_files_that_pages_print_name_their_image_and_model(
    platform: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
    write_scale(tmp_path / "models" / "digits")
    page = ROOT / "docs" / "deploy" / f"{platform}.md"
    words = next(words for words in calls(page) if words[:2] == ["remora", "manifests"])
    words = [str(tmp_path / "models") if word == "models" else word for word in words[1 : words.index(">")]]
    assert main(words) == 0
    assert named(words, "--image") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("platform", "check"),
    [("azureml", "scoring"), ("knative", "requests"), ("kserve", "one-for-one"), ("vertex", "predictions")],
)
def test_requests_that_the_emulator_sends_as_a_page_says_are_answered(
    platform: str,
    check: str,
    digits: Digits,
    child_environment: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request = digits.requests / "eight.json"
    row = np.ravel(json.loads(request.read_text())["inputs"][0]["data"]).tolist()
    (tmp_path / "predict.json").write_text(json.dumps({"instances": [row]}))
    page = ROOT / "docs" / "deploy" / f"{platform}.md"
    (words,) = (words for words in calls(page) if words[:2] == ["remora", "emulate"])
    here = {
        "models": str(digits.models),
        "request.json": str(request),
        "predict.json": str(tmp_path / "predict.json"),
        "python": sys.executable,
    }
    found = [here.get(word, word) for word in words[1:]]
    environment = [
        "--env",
        f"PYTHONPATH={child_environment['PYTHONPATH']}",
        "--startup-timeout",
        "60",
        "--patience",
        "15",
    ]
    code = main([*found[:2], "--only", check, *environment, *found[2:]])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "1 passed, 0 failed, 0 skipped" in said
