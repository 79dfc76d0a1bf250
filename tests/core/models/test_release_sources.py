"""Releases outside of a server: states, declarations and texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.errors import InternalError, InvalidArgumentError
from remora.models.release_sources import find_release, parse_release
from remora.models.release_store import ReleaseStore
from remora.traffic.releases import Arm, Release, Shadow


def test_a_text_is_a_release() -> None:
    found = parse_release("stable=2, canary=3:10%,b=5:2.5,shadow=4:20%")
    assert (found.stable, found.arms) == (2, (Arm("canary", 3, 1000), Arm("b", 5, 250)))
    assert found.shadow == Shadow(4, 2000)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("canary=3:10%", "expected stable=VERSION"),
        ("stable=2:90%,canary=3", "expected stable=VERSION"),
        ("stable=2,canary=two", "expected the number of a version"),
        ("stable=2,canary=3:60%,b=4:60%", "the weights exceed 100 percent"),
        ("stable=2,canary=3,canary=4", "'canary' occurs twice"),
        ("stable=2,shadow=2:10%", "version 2 is stable"),
        ("stable=2,shadow=3", "above 0 to 100 percent"),
        ("stable=2,1=3:10%", "'1' is not an alias"),
    ],
)
def test_a_text_that_is_no_release_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        find_release(text, [])


def _store(folder: Path, **rows: Release) -> None:
    ReleaseStore(folder / ".remora" / "releases.json").write(rows)


def test_the_state_of_a_server_comes_before_the_declaration(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "release.yaml").write_text("stable: 1\ncanary: 2\nweight: 10%\n")
    assert find_release("", [str(tmp_path)]) == find_release("m", [str(tmp_path)])
    running = parse_release("stable=1,canary=2:50%")
    _store(tmp_path, m=running)
    assert find_release("", [str(tmp_path), "s3://bucket/models"]) == running
    assert find_release(str(tmp_path / ".remora" / "releases.json"), []) == running


def test_one_of_several_releases_is_named(tmp_path: Path) -> None:
    first, second = parse_release("stable=1,canary=2:50%"), parse_release("stable=1,shadow=2:50%")
    _store(tmp_path, a=first, b=second, settled=Release(1))
    with pytest.raises(InvalidArgumentError, match="running: a, b"):
        find_release("", [str(tmp_path)])
    assert find_release("b", [str(tmp_path)]) == second
    with pytest.raises(InvalidArgumentError, match="a running release of 'settled'"):
        find_release("settled", [str(tmp_path)])


def test_a_damaged_state_is_reported(tmp_path: Path) -> None:
    (tmp_path / "releases.json").write_text("{")
    with pytest.raises(InternalError, match="cannot be read"):
        find_release(str(tmp_path / "releases.json"), [])
