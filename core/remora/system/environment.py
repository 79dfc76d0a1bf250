"""Environment of the process: variables, import paths, cache directory and boot id."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from remora.errors import UnavailableError


def variables() -> Mapping[str, str]:
    """Return the environment variables, for code that takes them as an argument."""
    return os.environ


def keep_runtimes_quiet(environ: MutableMapping[str, str] = os.environ) -> None:
    """Disable the telemetry of the model runtimes. Call this before they are imported.

    ONNX Runtime's wheels send telemetry from import on, and write an id and a database below the home directory for
    it. The two variables belong to different releases. Variables that are already set are left alone.
    """
    for name in ("ORT_DISABLE_TELEMETRY", "ORT_TELEMETRY_DISABLED"):
        environ.setdefault(name, "1")


def start_vllm_processes_afresh(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let vLLM start its processes without a copy of this one, which has threads.

    Variables that are already set are left alone. Call this before vLLM is imported.
    """
    environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def server_paths() -> list[str]:
    """Return the import paths of the server and its dependencies, for another interpreter."""
    import sysconfig  # imported here because every start imports this module and few need the paths

    here = str(Path(__file__).resolve().parents[2])
    return list(dict.fromkeys((here, sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))))


def cache_directory(name: str, environ: Mapping[str, str]) -> Path:
    """Return a writable cache folder.

    It is below XDG's cache directory or else the temporary directory. The folder is created if missing. Containers
    often have a read-only root and no home directory, so only /tmp is reliable. Raises UnavailableError when neither
    can be written.
    """
    import tempfile  # imported here because every start imports this module and few need the folder

    base = environ.get("XDG_CACHE_HOME") or (environ["HOME"] + "/.cache" if environ.get("HOME") else "")
    fallback = Path(tempfile.gettempdir()) / f"remora-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"
    for folder in ([Path(base) / "remora" / name] if base.startswith("/") else []) + [fallback / name]:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if _is_ours(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise UnavailableError(f"no writable cache folder: tried '{base}' and '{fallback}'; configure another one")


def _is_ours(folder: Path) -> bool:
    """Return True if this user owns the folder.

    In the temporary directory another user may have made it.
    """
    return not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()


def boot_id(proc: Path = Path("/proc")) -> str:
    """Return the kernel's boot id, which changes with each boot, or "" where it cannot be read."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
