"""Python environments that find chosen folders and the installed packages, but not the project's own packages."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import end, free_ports, wait_until_ready


def make_environment(folder: Path, *places: Path) -> str:
    """Make an environment that imports from ``places``, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # The .pth files of this folder, with the project's packages, are not read for a path that a .pth file names.
    installed = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
    (site / "places.pth").write_text("".join(f"{place}\n" for place in dict.fromkeys((*places, *installed))))
    return str(folder / "bin" / "python")


def run(python: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run an interpreter with arguments, and return its output."""
    return subprocess.run([python, *words], capture_output=True, text=True, env=_environment(environ))


@contextmanager
def serving(python: str, models: Path, log: Path, *flags: str, **environ: str) -> Iterator[int]:
    """Serve models with an interpreter, and yield the port for HTTP."""
    (port,) = free_ports(1)
    flags = (f"--http-port={port}", "--allow-grpc=false", "--metrics-port=0", *flags)
    command = [python, "-m", "remora", "serve", str(models), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_environment(environ))
    try:
        wait_until_ready(process, port, log, "/readyz")
        yield port
    finally:
        status = end(process)
    assert status == 0, log.read_text()


def _environment(more: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
