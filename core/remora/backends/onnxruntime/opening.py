"""Opening of ONNX Runtime's sessions, for every backend that runs on it.

Invariant: no other module makes a session or its options. So each session is opened after CUDA's libraries are loaded
and the file's external data is checked, has the providers that its model requires, and never falls back to the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from remora.backends import Source
from remora.backends.external_data import check_external_data
from remora.backends.model_files import import_framework, load_failure
from remora.backends.onnxruntime.plan import CUDA_PROVIDER, SessionPlan
from remora.errors import ConfigError, InternalError, RemoraError
from remora.system.environment import keep_runtimes_quiet
from remora.system.install_advice import install_command

_NO_ENTRIES: Mapping[str, str] = {}
_REASON = r"(?s)\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)"
_BOUND_REASON = "Error in execution: "
_THROWN = r"\.(?:h|hpp|cc|cpp|cu|cuh):\d+"
"""Place in ONNX Runtime's source, which only texts of thrown exceptions contain.

Texts of returned statuses do not.
"""
_HINTS = (
    # Patterns of ONNX Runtime's errors, and what to do about each.
    (r"opset|IR version", "upgrade onnxruntime (this is {version}) or export the model for an older opset"),
    (r"[Ee]xternal data", "keep the files with the model's weights beside it, under the names they were exported with"),
    (r"not a registered function/op|is not registered", "it needs custom operators or a newer onnxruntime ({version})"),
)


class GpuUnusableError(ConfigError):
    """Error when ONNX Runtime cannot use the GPU.

    Models that do not require a GPU may then run on the CPU.
    """

    def __init__(self, model: str, why: object) -> None:
        super().__init__(
            f"model '{model}' asks for a GPU, but ONNX Runtime's {CUDA_PROVIDER} is not there: {why}; "
            f"{install_command('gpu')} and check the driver, or set the instance group's kind to KIND_CPU"
        )


def import_onnxruntime(model: str) -> Any:
    """Return the module ``onnxruntime``.

    Raises ConfigError with the install commands if it cannot be imported.
    """
    keep_runtimes_quiet()
    try:
        return import_framework("onnxruntime", model, "ONNX Runtime", "onnx")
    except ConfigError as error:
        raise ConfigError(f"{error}; for CUDA: {install_command('gpu')}") from error


def usable_providers(runtime: Any, *, on_gpu: bool) -> set[str]:
    """Return the names of ONNX Runtime's execution providers.

    For a GPU CUDA's libraries are loaded from pip's directories first, because a provider may register only with them.
    That has no effect once they are loaded.
    """
    preload = getattr(runtime, "preload_dlls", None)
    if on_gpu and preload is not None:
        preload()
    return set(runtime.get_available_providers())


def require_cuda(runtime: Any, model: str, available: Collection[str]) -> None:
    """Raise GpuUnusableError if CUDA is not among the ``available`` providers."""
    if CUDA_PROVIDER not in available:
        raise GpuUnusableError(model, f"onnxruntime {runtime.__version__} is built without it")


def open_session(
    runtime: Any,
    source: Source,
    path: Path,
    plan: SessionPlan,
    chain: Sequence[tuple[str, Mapping[str, str]]],
    **changes: Any,
) -> Any:
    """Open a session without ONNX Runtime's fallback to the CPU.

    The fallback would print to stdout and run on the CPU instead of the GPU.

    Args:
        runtime: the module.
        source: of the model.
        path: the file.
        plan: options of the session.
        chain: execution providers with their options, from `usable_providers`. A session that lacks CUDA though the
            chain has it is refused; other providers are optional.
        changes: attributes of the session's options that differ from the plan.

    Raises:
        GpuUnusableError: the session has no CUDA.
        InvalidArgumentError: a tensor's values lie outside of the file's folder.
        InternalError: ONNX Runtime cannot load the file; the text has its reason in one line.
    """
    try:
        check_external_data(path)
        options = _session_options(runtime, plan, changes)
        session = runtime.InferenceSession(str(path), options, providers=list(chain), enable_fallback=0)
    except RemoraError:
        raise
    except Exception as error:  # ONNX Runtime's classes have no common parent but Exception
        raise opening_failure(runtime, source, path, error) from error
    session.disable_fallback()
    if any(name == CUDA_PROVIDER for name, _ in chain) and CUDA_PROVIDER not in session.get_providers():
        raise GpuUnusableError(source.name, "its libraries or the GPU cannot be used")
    return session


def _session_options(runtime: Any, plan: SessionPlan, changes: Mapping[str, Any]) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = plan.intra_op_threads
    options.inter_op_num_threads = plan.inter_op_threads
    modes = runtime.ExecutionMode
    options.execution_mode = modes.ORT_PARALLEL if plan.parallel else modes.ORT_SEQUENTIAL
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, plan.graph_level)
    options.enable_cpu_mem_arena = plan.mem_arena
    options.enable_mem_pattern = plan.mem_pattern
    for key, value in plan.entries.items():
        options.add_session_config_entry(key, value)
    for key, value in changes.items():
        setattr(options, key, value)
    return options


def run_options(runtime: Any, entries: Mapping[str, str], more: Mapping[str, str] = _NO_ENTRIES) -> Any:
    """Return the options of a run with the entries of its session's plan, and more."""
    options = runtime.RunOptions()
    for key, value in {**entries, **more}.items():
        options.add_run_config_entry(key, value)
    return options


def opening_failure(runtime: Any, source: Source, path: Path, error: Exception) -> InternalError:
    """Return the error for a model that cannot be opened, with what to do about a known reason."""
    reason = reason_of(error)
    hints = [hint.format(version=runtime.__version__) for mark, hint in _HINTS if re.search(mark, reason)]
    return load_failure(source, path, reason, hint=hints[0] if hints else "")


def reason_of(error: Exception) -> str:
    """Return ONNX Runtime's reason in one line, with Triton's error number.

    A run with bound inputs raises the text without the number. The number is then derived from the text: 1 (failure)
    for an exception inside ONNX Runtime, 2 (invalid argument) for all other errors of such a run.
    """
    message = str(error)
    match = re.search(_REASON, message)
    if match:
        code, text = f" {match[1]}", match[2]
    elif message.startswith(_BOUND_REASON):
        text = message.removeprefix(_BOUND_REASON)
        code = " 1" if re.search(_THROWN, text) else " 2"
    else:
        code, text = "", f"{type(error).__name__}: {error}"
    return f"onnx runtime error{code}: {' '.join(text.split())}"
