"""What the process was given to work with: its variables, the folder for what it may keep, the machine's start."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from remora.errors import UnavailableError


def variables() -> Mapping[str, str]:
    """The environment, for those that are given it instead of reading it."""
    return os.environ


def keep_runtimes_quiet(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have runtimes send nothing that the operator did not ask for; to be called before they are imported.

    ONNX Runtime's wheels report to their maker from the moment they are imported, and write an id and a database below
    the home directory for that. The two names are of different releases. Variables that are set stay as they are.
    """
    for name in ("ORT_DISABLE_TELEMETRY", "ORT_TELEMETRY_DISABLED"):
        environ.setdefault(name, "1")


def cache_directory(name: str, environ: Mapping[str, str]) -> Path:
    """A folder of ours that can be written, made if need be: XDG's cache directory, else the temporary one.

    Containers often run with a root that is read-only and a home that is not there; only /tmp can be counted on.
    Raises UnavailableError when neither can be written.
    """
    import tempfile  # here, because every start looks at this module and few need a folder

    base = environ.get("XDG_CACHE_HOME") or (environ["HOME"] + "/.cache" if environ.get("HOME") else "")
    fallback = Path(tempfile.gettempdir()) / f"remora-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"
    for folder in ([Path(base) / "remora" / name] if base.startswith("/") else []) + [fallback / name]:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if _is_ours(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise UnavailableError(f"no folder for a cache can be written: neither '{base}' nor '{fallback}'. Name one")


def _is_ours(folder: Path) -> bool:
    """Whatever somebody else put into the temporary directory under our name is not used."""
    return not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()


def boot_id(proc: Path = Path("/proc")) -> str:
    """Another one after each start of the machine; "" where that cannot be told."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
