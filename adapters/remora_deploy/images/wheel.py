"""Wheel of remora for an image, from the installed package or from a checkout.

An image installs remora from a wheel, and a user who installed remora has none. The wheel is packed again from the
installed files by their record; the same files give the same bytes.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from remora.system.json_text import read_json

_NAME = "remora"
_OF_INSTALLER = frozenset(("INSTALLER", "REQUESTED", "RECORD", "direct_url.json"))
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Oldest time that a zip archive can hold."""


class WheelError(Exception):
    """Raised when no wheel can be made; the text names the remedy."""


def make_wheel(folder: Path, checkout: Path) -> Path:
    """Write the wheel of this installation into ``folder``. Raises WheelError, OSError."""
    try:
        installed = distribution(_NAME)
    except PackageNotFoundError:
        installed = None
    if installed is None or _is_editable(installed):
        return _build(folder, checkout)
    return repack(installed, folder)


def repack(installed: Distribution, folder: Path) -> Path:
    """Write the wheel of an installed distribution.

    Raises WheelError if its files have changed since.
    """
    contents: dict[str, bytes] = {}
    for file in installed.files or ():
        path = PurePosixPath(file)
        if ".." in path.parts or path.is_absolute() or "__pycache__" in path.parts or path.suffix == ".pyc":
            continue  # scripts and bytecode, which an installer writes
        if path.parent.suffix == ".dist-info" and path.name in _OF_INSTALLER:
            continue
        data = Path(str(installed.locate_file(file))).read_bytes()
        if file.hash is not None and _digest(data) != (file.hash.mode, file.hash.value):
            raise WheelError(f"{path} has changed since its installation: install remora again, or pass --wheel")
        contents[str(path)] = data
    info = next((str(PurePosixPath(name).parent) for name in contents if name.endswith(".dist-info/WHEEL")), "")
    if not info:
        raise WheelError("this installation of remora has no record of a wheel: pass --wheel")
    contents[f"{info}/RECORD"] = _record(contents, f"{info}/RECORD")
    tag = next(
        line.partition(":")[2].strip()
        for line in contents[f"{info}/WHEEL"].decode().splitlines()
        if line.startswith("Tag:")
    )
    target = folder / f"{info.removesuffix('.dist-info')}-{tag}.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in sorted(contents.items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return target


def _build(folder: Path, checkout: Path) -> Path:
    """Build the wheel of a checkout. Raises WheelError."""
    if not (checkout / "pyproject.toml").is_file():
        raise WheelError("remora is neither installed from a wheel nor run from a checkout: pass --wheel")
    if find_spec("hatchling") is None:
        raise WheelError("the wheel of this checkout needs hatchling: pip install hatchling, or pass --wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder.resolve())]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"the wheel of {checkout} cannot be built: {done.stderr.strip()[-500:]}")
    return next(folder.glob(f"{_NAME}-*.whl"))


def _is_editable(installed: Distribution) -> bool:
    text = installed.read_text("direct_url.json")
    return bool(text and read_json(text).get("dir_info", {}).get("editable"))


def _record(contents: dict[str, bytes], own: str) -> bytes:
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for name, data in sorted(contents.items()):
        mode, value = _digest(data)
        writer.writerow((name, f"{mode}={value}", len(data)))
    writer.writerow((own, "", ""))
    return lines.getvalue().encode()


def _digest(data: bytes) -> tuple[str, str]:
    return "sha256", base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
