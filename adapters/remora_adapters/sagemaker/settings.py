"""Settings from a SageMaker container's environment, checked at startup.

Only this module reads the environment, which has three families of variables: the platform's
(``SAGEMAKER_BIND_TO_PORT`` ...), those of Triton's start script (``SAGEMAKER_TRITON_...``, [N08]), and the toolkits'
(``SAGEMAKER_MODEL_SERVER_WORKERS`` ...).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INFERENCE_TYPES = ("infer", "generate", "generate_stream")
_PING_MODES = ("ready", "live")
_STRATEGIES = ("", "SINGLE_RECORD", "MULTI_RECORD")
_YES, _NO = ("true", "1"), ("false", "0", "")
_FOLDER = "/opt/ml"
_PORT = 8080
_HIGHEST_PORT = 65_535
_MOST_WORKERS = 1024
"""Limit of the worker processes, so that a typing error cannot overload the machine."""
_MIB = 1 << 20
_ASYNC_BYTES = 1 << 30
"""Limit of the body of an asynchronous invocation."""
_MOST_GPUS = 16
"""GPUs of the largest instance, because a limit for a missing GPU has no effect."""
_UNUSED = {
    "SAGEMAKER_TRITON_THREAD_COUNT": "one event loop serves all connections",
    "SAGEMAKER_TRITON_BUFFER_MANAGER_THREAD_COUNT": "tensors are views, not copies",
    "SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE": "Python models need no room in /dev/shm",
    "SAGEMAKER_TRITON_SHM_GROWTH_BYTE_SIZE": "Python models need no room in /dev/shm",
    "SAGEMAKER_TRITON_TENSORFLOW_VERSION": "the version is the installed one",
    "SAGEMAKER_TRITON_DISABLE_MODEL_NAMESPACING": "each hosted model has a separate engine and namespace",
}
"""Variables of Triton's start script without effect here, with the reason."""
_LEVELS = {"10": (1, True, True), "20": (0, True, True), "30": (0, False, True), "40": (0, False, False)}
"""The toolkits' levels, as Python's logging, with verbosity, information and warnings."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for the answers to requests.

    Attributes:
        model: model for /invocations; "" for the only one.
        kind: one of INFERENCE_TYPES.
        ping_live: True if /ping reports liveness instead of the models' readiness.
        as_triton: behave like Triton's front end beyond the platform's contract; see decision 0017.
        models_root: folder above all models of a multi-model endpoint.
        timeout_ms: time after which an invocation gets a 503; 0 for none.
        accept: default form of answers to bodies that are not V2; "" for the body's form.
        transforms: MaxConcurrentTransforms of batch jobs; 0 to compute it from the model.
        strategy: BatchStrategy of batch jobs; "" if unset.
        payload_mb: MaxPayloadInMB of batch jobs.
    """

    model: str = ""
    kind: str = "infer"
    ping_live: bool = False
    as_triton: bool = False
    models_root: Path = Path(_FOLDER, "models")
    timeout_ms: int = 0
    accept: str = ""
    transforms: int = 0
    strategy: str = ""
    payload_mb: int = 6


@dataclass(frozen=True, slots=True)
class SageMakerSettings:
    """Settings of the process with its `rules`.

    ``ports`` is the allowed range of gRPC and metrics, None for any. ``workers`` and ``script`` apply to an
    ``inference.py``. ``log`` is the verbosity, and True for information, warnings and errors to show. ``gpu_limits``
    are those of ``--model-load-gpu-limit``. ``unused`` are variables without effect, with the reason.
    """

    rules: Rules
    folder: Path
    multi_model: bool
    port: int
    ports: range | None
    max_body_bytes: int
    grpc_port: int
    metrics_port: int
    workers: int
    script: str
    log: tuple[int, bool, bool, bool]
    flags: tuple[str, ...]
    gpu_limits: tuple[str, ...]
    unused: tuple[tuple[str, str], ...]


def settings_of(environ: Mapping[str, str]) -> SageMakerSettings:
    """Return the settings of an environment. Raises ValueError with the variable's name."""
    read = _Reader(environ)
    folder = Path(environ.get("SAGEMAKER_BASE_DIR") or _FOLDER)
    multi_model = read.yes("SAGEMAKER_MULTI_MODEL")
    ports = read.ports("SAGEMAKER_SAFE_PORT_RANGE")
    payload_mb = read.number("SAGEMAKER_MAX_PAYLOAD_IN_MB", 0)
    first, second = (ports.start, ports.start + 1) if ports else (8001, 8002)
    full = read.fraction("SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT")
    grpc, metrics = read.yes("SAGEMAKER_TRITON_ALLOW_GRPC"), read.yes("SAGEMAKER_TRITON_ALLOW_METRICS")
    return SageMakerSettings(
        rules=rules_of(environ, folder, multi_model, payload_mb),
        folder=folder,
        multi_model=multi_model,
        port=read.port("SAGEMAKER_BIND_TO_PORT", _PORT),
        ports=ports,
        max_body_bytes=payload_mb * _MIB or _ASYNC_BYTES,
        grpc_port=read.port("SAGEMAKER_TRITON_GRPC_PORT", first) if grpc else 0,
        metrics_port=read.port("SAGEMAKER_TRITON_METRICS_PORT", second) if metrics else 0,
        workers=max(read.number("SAGEMAKER_MODEL_SERVER_WORKERS", 1, most=_MOST_WORKERS), 1),
        script=environ.get("SAGEMAKER_PROGRAM", ""),
        log=_log(read, environ),
        flags=read.words("SAGEMAKER_TRITON_ADDITIONAL_ARGS"),
        gpu_limits=() if full is None else tuple(f"{device}:{full}" for device in range(_MOST_GPUS)),
        unused=tuple((name, why) for name, why in _UNUSED.items() if environ.get(name)),
    )


def rules_of(environ: Mapping[str, str], folder: Path, multi_model: bool, payload_mb: int = 0) -> Rules:
    """Return the rules of an environment. Raises ValueError."""
    read = _Reader(environ)
    ping = "SAGEMAKER_TRITON_OVERRIDE_PING_MODE"
    if ping not in environ:
        ping = "SAGEMAKER_TRITON_PING_MODE"
    timeout_s = read.number("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", read.number("SAGEMAKER_MODEL_SERVER_TIMEOUT", 0))
    return Rules(
        model=environ.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", ""),
        kind=read.choice("SAGEMAKER_TRITON_INFERENCE_TYPE", INFERENCE_TYPES),
        ping_live=read.choice(ping, _PING_MODES, "live" if multi_model else "ready") == "live",
        models_root=folder / "models",
        timeout_ms=timeout_s * 1000,
        accept=environ.get("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", ""),
        transforms=read.number("SAGEMAKER_MAX_CONCURRENT_TRANSFORMS", 0),
        strategy=read.choice("SAGEMAKER_BATCH_STRATEGY", _STRATEGIES),
        payload_mb=payload_mb or 6,
    )


class _Reader:
    """Reader of typed variables."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def number(self, name: str, default: int, *, least: int = 0, most: int = 1 << 31) -> int:
        text = self._environ.get(name, "")
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 11 and least <= int(text) <= most):
            raise ValueError(f"{name}={text[:40]}: expected a whole number from {least} to {most}")
        return int(text)

    def port(self, name: str, default: int) -> int:
        return self.number(name, default, least=1, most=_HIGHEST_PORT)

    def fraction(self, name: str) -> float | None:
        text = self._environ.get(name, "")
        try:
            share = float(text or "1")
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise ValueError(f"{name}={text[:40]}: expected a fraction between 0 and 1")
        return share if text else None

    def words(self, name: str) -> tuple[str, ...]:
        text = self._environ.get(name, "")
        try:
            return tuple(shlex.split(text))
        except ValueError as error:
            raise ValueError(f"{name}={text[:40]}: {error}") from error

    def yes(self, name: str) -> bool:
        text = self._environ.get(name, "").lower()
        if text not in (*_YES, *_NO):
            raise ValueError(f"{name}={text[:40]}: expected true or false")
        return text in _YES

    def choice(self, name: str, choices: tuple[str, ...], default: str = "") -> str:
        text = self._environ.get(name, "") or default or choices[0]
        if text not in choices:
            raise ValueError(f"{name}={text[:40]}: expected one of {', '.join(filter(None, choices))}")
        return text

    def ports(self, name: str) -> range | None:
        text = self._environ.get(name, "")
        return safe_ports(name, text) if text else None


def safe_ports(name: str, text: str) -> range:
    """Parse a port range ``LOW-HIGH``. Raises ValueError with ``name``."""
    low, dash, high = text.partition("-")
    digits = all(end.isascii() and end.isdigit() and len(end) < 6 for end in (low, high))
    if not (dash and digits and 0 < int(low) <= int(high) <= _HIGHEST_PORT):
        raise ValueError(f"{name}={text[:40]}: expected LOW-HIGH, such as 18000-18999")
    return range(int(low), int(high) + 1)


def _log(read: _Reader, environ: Mapping[str, str]) -> tuple[int, bool, bool, bool]:
    """Return verbosity, information, warnings and errors.

    Triton's variables override the toolkits' level.
    """
    verbose, info, warning = _LEVELS.get(environ.get("SAGEMAKER_CONTAINER_LOG_LEVEL", ""), (0, True, True))
    error = "SAGEMAKER_TRITON_LOG_ERROR" not in environ or read.yes("SAGEMAKER_TRITON_LOG_ERROR")
    if "SAGEMAKER_TRITON_LOG_INFO" in environ:
        info = read.yes("SAGEMAKER_TRITON_LOG_INFO")
    if "SAGEMAKER_TRITON_LOG_WARNING" in environ:
        warning = read.yes("SAGEMAKER_TRITON_LOG_WARNING")
    if environ.get("SAGEMAKER_TRITON_LOG_VERBOSE"):
        text = environ["SAGEMAKER_TRITON_LOG_VERBOSE"]
        verbose = int(text) if text.isdecimal() and len(text) < 4 else int(read.yes("SAGEMAKER_TRITON_LOG_VERBOSE"))
    return verbose, info, warning, error
