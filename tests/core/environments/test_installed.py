"""Requirements files against installed distributions, without pip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from remora.environments.installed import Installed, files_of, find_installed, is_met

HERE = {
    "one": Installed("1.5", ("two>=2", "gone; sys_platform == 'win32'", "three; extra == 'more'")),
    "two": Installed("2.1"),
    "old": Installed("1.0", ("two>=3",)),
    "circle": Installed("1", ("circle[more]",)),
    "linked": Installed("1", (), "https://example.invalid/linked.whl"),
    "cloned": Installed("1", (), "git+https://example.invalid/cloned@main"),
    "broken": Installed("1", ("not a requirement",)),
}


def met(folder: Path, text: str) -> bool:
    file = folder / "requirements.txt"
    file.write_text(text)
    return is_met(file, HERE.get)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("one", True),
        ("one>=1,<2  # a comment", True),
        ("one>=2", False),
        ("two --hash=sha256:00", True),
        ("gone", False),
        ("gone; sys_platform == 'win32'", True),
        ("one[more]", False),
        ("old", False),
        ("circle", True),
        ("--index-url https://example.invalid/simple\none", True),
        ("./one.whl", False),
        ("https://example.invalid/one.whl", False),
        ("-e .", False),
        ("--editable .", False),
        ("linked @ https://example.invalid/linked.whl", True),
        ("linked @ https://example.invalid/newer.whl", False),
        ("cloned @ git+https://example.invalid/cloned@main", True),
        ("cloned @ git+https://example.invalid/cloned@next", False),
        ("broken", False),
        ("-r gone.txt", False),
    ],
)
def test_a_file_is_met_if_its_packages_and_theirs_are_installed(text: str, expected: bool, tmp_path: Path) -> None:
    assert met(tmp_path, text) is expected


@pytest.mark.parametrize("option", ["-r more.txt", "-rmore.txt", "--requirement more.txt", "--requirement=more.txt"])
@pytest.mark.parametrize(("more", "expected"), [("two", True), ("gone", False), ("-r requirements.txt\ntwo", True)])
def test_included_files_count(option: str, more: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text(more)
    assert met(tmp_path, f"one\n{option}\n") is expected
    assert list(files_of(tmp_path / "requirements.txt").values()) == [f"one\n{option}\n", more]


@pytest.mark.parametrize("option", ["-c limits.txt", "--constraint=limits.txt"])
@pytest.mark.parametrize(("limits", "expected"), [("gone==9\ntwo<3", True), ("two<2", False)])
def test_constraints_limit_the_versions_of_what_is_needed(
    option: str, limits: str, expected: bool, tmp_path: Path
) -> None:
    (tmp_path / "limits.txt").write_text(limits)
    assert met(tmp_path, f"{option}\none\n") is expected


def test_a_missing_file_is_not_met(tmp_path: Path) -> None:
    assert not is_met(tmp_path / "gone.txt")
    assert files_of(tmp_path / "gone.txt") == {}


def test_the_installed_distributions_are_found_with_their_requirements() -> None:
    found = find_installed("pytest")
    assert found is not None
    assert any(each.startswith("pluggy") for each in found.requires)
    assert find_installed("remora-probe-that-is-nowhere") is None
    assert find_installed("") is None


def test_no_pip_is_needed(tmp_path: Path) -> None:
    """An interpreter that cannot import pip finds that numpy is there."""
    (tmp_path / "requirements.txt").write_text("numpy>=1\n")
    code = (
        "import sys; sys.modules['pip'] = None; from pathlib import Path; "
        "from remora.environments.installed import is_met; print(is_met(Path('requirements.txt')))"
    )
    paths = ":".join([str(Path(__file__).parents[3] / "core"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": paths, "PATH": "/nowhere"}, capture_output=True
    )
    assert (done.stdout, done.stderr) == (b"True\n", b"")
