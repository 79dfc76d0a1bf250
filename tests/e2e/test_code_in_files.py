"""Canaries: code beside model files, which the pages on security and files promise not to run."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from support.process.small_wheels import write_wheel

BERT = {
    "config.json": '{"architectures": ["BertForSequenceClassification"], "model_type": "bert"}',
    "model.safetensors": "\x02\0\0\0\0\0\0\0{}",
}


class Trap:
    """Code that writes a file, and the ways to put it into a folder."""

    def __init__(self, root: Path) -> None:
        self.seen = root / "the-code-ran"
        self.code = f"import pathlib; pathlib.Path({str(self.seen)!r}).touch()\n"

    def package(self, folder: Path) -> None:
        """Write a source package whose setup.py is the trap."""
        (folder / "evil").mkdir()
        (folder / "evil" / "setup.py").write_text(self.code + "from setuptools import setup\nsetup(name='evil')\n")

    def wheel(self, folder: Path) -> Path:
        """Write a wheel whose .pth file runs the trap in each interpreter that finds it."""
        wheel = write_wheel(folder, "evil", "1.0", self.code)
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr("evil.pth", self.code)
        return wheel


def _place(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def _source_package(root: Path, trap: Trap) -> Path:
    place = _place(root / "m", {**BERT, "requirements.txt": "./evil\n"})
    trap.package(place)
    return place


def _editable_package(root: Path, trap: Trap) -> Path:
    place = _place(root / "m", {"m.skops": "", "requirements.txt": "-e ./evil\n"})
    trap.package(place)
    return place


def _wheel_of_the_author(root: Path, trap: Trap) -> Path:
    place = _place(root / "m", {**BERT, "requirements.txt": "--no-index\n--find-links .\nevil\n"})
    trap.wheel(place)
    return place


def _url(root: Path, trap: Trap) -> Path:
    place = _place(root / "m", {"m.cbm": "CBM1"})
    (place / "requirements.txt").write_text(f"evil @ {trap.wheel(root).as_uri()}\n")
    return place


def _archive(root: Path, trap: Trap) -> Path:
    place = _source_package(root, trap)
    with tarfile.open(root / "m.tar.gz", "w:gz") as archive:
        archive.add(place, ".")
    return root / "m.tar.gz"


def _app_beside_weights(root: Path, trap: Trap) -> Path:
    return _place(root / "m", {**BERT, "app.py": f"import remora\n{trap.code}@remora.model\ndef f(): ...\n"})


def _modules_beside_weights(root: Path, trap: Trap) -> Path:
    auto = BERT["config.json"].replace("{", '{"auto_map": {"AutoModel": "modeling.Evil"}, ', 1)
    return _place(root / "m", {**BERT, "config.json": auto, "modeling.py": trap.code, "__init__.py": trap.code})


def _pickle(root: Path, trap: Trap) -> Path:
    code = f"c__builtin__\nexec\n(V{trap.code.strip()}\ntR."
    return _place(root / "m", {"m.joblib": code}) / "m.joblib"


ARRANGEMENTS: tuple[Callable[[Path, Trap], Path], ...] = (
    _source_package,
    _editable_package,
    _wheel_of_the_author,
    _url,
    _archive,
    _app_beside_weights,
    _modules_beside_weights,
    _pickle,
)


def _serve_once(place: Path, root: Path, *flags: str) -> str:
    """Load the model in another process, which may fail, and return what that wrote."""
    program = (
        "import logging, sys\nfrom remora import Engine\nlogging.basicConfig()\n"
        "cache = 'python,environment-cache-directory=' + sys.argv[2]\n"
        "with Engine(sys.argv[1], backend_config=(cache, 'python,isolation=process'),"
        " trust_pickle='--trust-pickle' in sys.argv): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(place), str(root / "cache"), *flags],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=[each.__name__.strip("_") for each in ARRANGEMENTS])
def test_code_beside_a_model_file_does_not_run(tmp_path: Path, arrangement: Callable[[Path, Trap], Path]) -> None:
    trap = Trap(tmp_path)
    place = arrangement(tmp_path, trap)
    said = _serve_once(place, tmp_path)
    assert not trap.seen.exists(), said


@pytest.mark.parametrize("arrangement", [_wheel_of_the_author, _app_beside_weights, _pickle])
def test_the_traps_work_with_trust(tmp_path: Path, arrangement: Callable[[Path, Trap], Path]) -> None:
    """The other tests could not fail if the code could not run at all."""
    trap = Trap(tmp_path)
    place = arrangement(tmp_path, trap)
    app = place / "app.py"
    said = _serve_once(app if app.is_file() else place, tmp_path, "--trust-pickle")
    assert trap.seen.exists(), said
