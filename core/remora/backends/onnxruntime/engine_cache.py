"""Cache of the engines that ONNX Runtime makes TensorRT build, and progress of a build.

An engine depends on the model's files, the versions of ONNX Runtime and TensorRT, the kind of GPU, and the options,
precision and profile shapes among them. All of these determine the folder's name. Invariant: a folder holds only what
one machine would build from one model with one set of options.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remora.errors import UnavailableError
from remora.system.environment import cache_directory, variables
from remora.system.gpus import Gpus

_log = logging.getLogger(__name__)

OFF = "off"
"""Setting that disables the cache."""

LOG_EVERY_S = 15.0
_NEEDED = re.compile(rb"libnvinfer\.so\.(\d+)")
_DEFAULT_MAJOR = 10
_LIBRARIES = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")
_WHEEL = "tensorrt_libs"


def engine_folder(setting: str) -> Path | None:
    """Return the folder of engines, or None for no cache.

    It is the operator's setting, else a folder beside the model cache.
    """
    if setting.lower() == OFF:
        return None
    if setting:
        return Path(setting)
    try:
        return cache_directory("engines", variables())
    except UnavailableError as error:
        _log.warning("TensorRT's engines are not cached: %s", error)
        return None


def engine_cache(folder: Path, model: Path, runtime: str, machine: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return TensorRT's options that cache a model's engines and timings in a dedicated folder.

    Args:
        folder: created if missing.
        model: the file; all files beside it count as well, because weights may be among them.
        runtime: ONNX Runtime's version.
        machine: from `gpu_and_tensorrt`.
        options: the provider's options; the device's number is ignored.
    """
    chosen = sorted((key, value) for key, value in options.items() if key != "device_id")
    digest = hashlib.sha256(f"{runtime}\0{machine}\0{chosen}\0".encode())
    for path in sorted(path for path in model.parent.iterdir() if path.is_file()):
        digest.update(f"{path.name}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    kept = folder / digest.hexdigest()
    kept.mkdir(parents=True, exist_ok=True)
    return {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(kept),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(kept),
    }


def needed_tensorrt(runtime: Any) -> int:
    """Return the major version of TensorRT that ONNX Runtime's provider is linked with.

    10 if its file cannot be read.
    """
    capi = Path(getattr(runtime, "__file__", None) or "").parent / "capi"
    try:
        match = _NEEDED.search((capi / "libonnxruntime_providers_tensorrt.so").read_bytes())
    except OSError:
        return _DEFAULT_MAJOR
    return int(match[1]) if match else _DEFAULT_MAJOR


def load_tensorrt(major: int, load: Callable[..., object] = ctypes.CDLL) -> None:
    """Load TensorRT's libraries of a major version from its wheels.

    The loader does not search there; ONNX Runtime then finds the loaded libraries by name. Nothing happens if the
    wheels are missing or of another version.
    """
    spec = importlib.util.find_spec(_WHEEL)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for name in _LIBRARIES:
            library = Path(place) / f"{name}.so.{major}"
            if library.is_file():
                try:
                    load(str(library), mode=ctypes.RTLD_GLOBAL)
                except OSError as error:
                    _log.warning("TensorRT's %s cannot be loaded: %s", library.name, error)


def gpu_and_tensorrt(
    device: int, major: int = _DEFAULT_MAJOR, gpus: Gpus | None = None, load: Callable[[str], object] = ctypes.CDLL
) -> str:
    """Return the kind of GPU and TensorRT's version, which engines depend on, as text."""
    visible = (gpus or Gpus()).visible()
    gpu = visible[device] if device < len(visible) else None
    kind = "unknown GPU" if gpu is None else f"{gpu.name} {gpu.capability[0]}.{gpu.capability[1]} {gpu.memory_bytes}"
    try:
        library = load(f"libnvinfer.so.{major}")
        return f"{kind}, TensorRT {library.getInferLibVersion()}"  # type: ignore[attr-defined]
    except (OSError, AttributeError):
        return f"{kind}, unknown TensorRT"


@contextmanager
def log_build_progress(model: str, every_s: float = LOG_EVERY_S) -> Iterator[None]:
    """Log at intervals that an engine is still being built, while the block runs."""
    done = threading.Event()

    def tell() -> None:
        seconds = 0.0
        while not done.wait(every_s):
            seconds += every_s
            _log.info("model '%s': TensorRT is still building its engine (%.0f s)", model, seconds)

    thread = threading.Thread(target=tell, name="remora engine build", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    _log.info("model '%s': TensorRT has built its engine", model)
