"""The wheel for an image: as installed, the same twice, and never of files that were changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

from remora_deploy.images.wheel import WheelError, make_wheel, repack

ROOT = Path(__file__).resolve().parents[3]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install '.[dev]'")
    return make_wheel(tmp_path_factory.mktemp("built"), ROOT)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder into which pip has installed the wheel."""
    target = tmp_path_factory.mktemp("site")
    subprocess.run([*PIP, "--target", str(target), str(wheel)], check=True)
    return target


@pytest.fixture
def installed(site: Path, tmp_path: Path) -> Distribution:
    """The installed wheel, in a folder that a test may change."""
    target = shutil.copytree(site, tmp_path / "site")
    return PathDistribution(next(target.glob("remora-*.dist-info")))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_the_wheel_of_an_installation_is_the_one_that_was_installed(
    wheel: Path, installed: Distribution, tmp_path: Path
) -> None:
    again = repack(installed, tmp_path)
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


def test_the_same_installation_gives_the_same_bytes_and_pip_installs_them(
    installed: Distribution, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = repack(installed, tmp_path / "a")
    assert first.read_bytes() == repack(installed, tmp_path / "b").read_bytes()
    subprocess.run([*PIP, "--target", str(tmp_path / "c"), str(first)], check=True)
    assert (tmp_path / "c" / "remora_deploy" / "images" / "context" / "containers" / "install.sh").is_file()


def test_a_file_that_was_changed_after_the_installation_is_refused(installed: Distribution, tmp_path: Path) -> None:
    Path(str(installed.locate_file("remora/errors.py"))).write_text("# changed\n")
    with pytest.raises(WheelError, match=r"remora/errors\.py has changed since its installation"):
        repack(installed, tmp_path)


def test_an_installation_without_a_record_is_refused(installed: Distribution, tmp_path: Path) -> None:
    Path(str(installed.locate_file("remora-0.1.0.dist-info/RECORD"))).unlink()
    with pytest.raises(WheelError, match="pass --wheel"):
        repack(PathDistribution(Path(str(installed.locate_file("remora-0.1.0.dist-info")))), tmp_path)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Distribution:
        from importlib.metadata import PackageNotFoundError

        raise PackageNotFoundError(name)

    monkeypatch.setattr("remora_deploy.images.wheel.distribution", missing)
    with pytest.raises(WheelError, match="neither installed from a wheel nor run from a checkout"):
        make_wheel(tmp_path, tmp_path)
