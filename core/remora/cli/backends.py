"""Command `remora backends`, which lists the backends and runtimes without importing them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from remora import plugins
from remora.backends.registry import installed_backends
from remora.cli.output import columns
from remora.system.gpus import Gpus
from remora.system.install_advice import install_command


def backends(options: argparse.Namespace) -> int:
    """Print the table of backends."""
    print(
        columns(
            table(
                _installed_version, len(Gpus().visible()), installed_backends(), _backends_in(options.backend_directory)
            )
        )
    )
    return 0


def table(
    version: Callable[[str], str | None], gpus: int, offered: Sequence[tuple[str, str]], folders: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return one row per backend.

    The cells are name, runtime and version, devices, files, and the install command of a missing runtime.

    Args:
        version: returns the installed version of a distribution, or None.
        gpus: number of GPUs that the process may use.
        offered: name and distribution of the backends in other packages.
        folders: names of the backends in ``--backend-directory``.
    """
    rows: list[tuple[str, ...]] = [("BACKEND", "RUNTIME", "DEVICES", "FILES")]
    for name, runtime in plugins.BACKENDS.items():
        installed = [(each, found) for each in runtime.distributions if (found := version(each)) is not None]
        if runtime.distributions and not installed:
            rows.append((name, "not installed", "", runtime.files, install_command(runtime.extra)))
            continue
        shown = ", ".join(f"{each} {found}" for each, found in installed) or "built in"
        rows.append((name, shown, _devices(runtime, installed, gpus), runtime.files))
    rows += [(name, distribution, "", "") for name, distribution in offered if name not in plugins.BACKENDS]
    rows += [(name, "in the backend directory", "", "") for name in folders]
    return rows


def _devices(runtime: plugins.Runtime, installed: Sequence[tuple[str, str]], gpus: int) -> str:
    """Return the usable devices, GPUs only if both machine and installed build have them."""
    able = any(each in runtime.on_gpu and not found.endswith("+cpu") for each, found in installed)
    if not (able and gpus):
        return "CPU"
    return f"CPU, {gpus} GPU{'s' if gpus > 1 else ''}"


def _installed_version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _backends_in(directory: str) -> list[str]:
    if not directory:
        return []
    found = []
    for folder in sorted(path for path in Path(directory).iterdir() if path.is_dir()):
        files = ("backend.py", "model.py", f"libremora_{folder.name}.so")
        if folder.name not in plugins.BACKENDS and any((folder / file).is_file() for file in files):
            found.append(folder.name)
    return found
