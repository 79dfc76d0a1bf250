"""The bill of materials: complete, well formed, and the same for the same packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from remora_deploy.images import sbom

SCRIPT = Path(sbom.__file__)


def written(*arguments: str) -> bytes:
    return subprocess.run([sys.executable, SCRIPT, *arguments], check=True, capture_output=True).stdout


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    if "remora" not in {each.name for each in distributions()}:
        pytest.skip("remora is not installed here")
    return dict(json.loads(written()))


def test_every_installed_package_is_listed_once_with_its_version(document: dict[str, Any]) -> None:
    listed = [(each["name"], each["version"]) for each in document["components"]]
    installed = {(re.sub(r"[-_.]+", "-", each.name).lower(), each.version) for each in distributions()}
    subject = document["metadata"]["component"]
    assert {*listed, (subject["name"], subject["version"])} == installed
    assert len(listed) == len(set(listed))


def test_it_is_cyclonedx(document: dict[str, Any]) -> None:
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["name"] == "remora"
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", each["purl"]) for each in document["components"])


def test_dependencies_name_only_what_is_listed(document: dict[str, Any]) -> None:
    references = {each["bom-ref"] for each in (*document["components"], document["metadata"]["component"])}
    assert {each["ref"] for each in document["dependencies"]} == references
    assert {need for each in document["dependencies"] for need in each["dependsOn"]} <= references
    remora = next(each for each in document["dependencies"] if each["ref"].startswith("pkg:pypi/remora@"))
    assert any(need.startswith("pkg:pypi/numpy@") for need in remora["dependsOn"])


def test_the_same_packages_give_the_same_bytes(document: dict[str, Any]) -> None:
    assert written() == written()


def test_an_environment_without_remora_is_refused() -> None:
    bare = [sys.executable, "-I", "-S", SCRIPT]
    done = subprocess.run(bare, capture_output=True, text=True)
    assert done.returncode == 1
    assert "remora is not installed" in done.stderr


def test_the_list_of_licences_has_each_package_with_its_licence(document: dict[str, Any]) -> None:
    lines = written("--licences").decode().splitlines()
    named = dict(line.split(": ", 1) for line in lines if not line.startswith(" "))
    expected = {f"{each['name']} {each['version']}" for each in document["components"]}
    assert expected < named.keys()
    assert named[next(key for key in named if key.startswith("remora "))] == "Apache-2.0"
    assert any("numpy" in line and "LICENSE" in line.upper() for line in lines if line.startswith(" "))
    assert written("--licences") == written("--licences")
