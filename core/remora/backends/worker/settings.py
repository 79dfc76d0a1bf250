"""What an operator, or a model, can say about where code runs; the law: read once, what is wrong is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from remora.backends import Source
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig

PROCESS, THREAD = "process", "thread"


class WorkerSettings(NamedTuple):
    """Settings of the python backend: ``--backend-config=python,KEY=VALUE``.

    Attributes:
        execute_timeout_s: ``execute-timeout``, seconds: a worker that runs longer is ended and started again. 0: never.
        finalize_timeout_s: ``finalize-timeout``, seconds that a model's finalize may take.
        memory_limit: ``memory-limit``, bytes of address space that the model's process may use. 0: no limit.
        transfer_bytes: ``transfer-limit-byte-size``, bytes of tensors that may be on their way in each direction.
        transport: ``transport``: ``memory`` where the system has it, else ``pipe``; ``auto`` chooses.
    """

    execute_timeout_s: float = 0.0
    finalize_timeout_s: float = 30.0
    memory_limit: int = 0
    transfer_bytes: int = 1 << 30
    transport: str = "auto"

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> WorkerSettings:
        """From ``--backend-config`` pairs. Raises ConfigError for values that are none."""
        return cls(
            _number(settings, "execute-timeout", 0.0),
            _number(settings, "finalize-timeout", 30.0),
            int(_number(settings, "memory-limit", 0)),
            int(_number(settings, "transfer-limit-byte-size", 1 << 30, least=1 << 16)) & -4096,
            _choice(settings.get("transport", "auto"), "--backend-config=python,transport", ("auto", "memory", "pipe")),
        )


def isolation(config: ModelConfig, settings: Mapping[str, str]) -> str:
    """Where a model runs: what it says itself by the parameter ISOLATION, else what the server says; a thread when
    neither says anything. Raises ConfigError for anything but PROCESS and THREAD."""
    if "ISOLATION" in config.parameters:
        said = config.parameters["ISOLATION"].string_value.lower()
        return _choice(said, f"parameter ISOLATION of model '{config.name}'", (PROCESS, THREAD))
    return _choice(settings.get("isolation", THREAD).lower(), "--backend-config=python,isolation", (PROCESS, THREAD))


def asks_for_environment(source: Source, config: ModelConfig) -> bool:
    """Whether a model asks for packages of its own. Most ask for nothing, and never import what would see to it."""
    return "EXECUTION_ENV_PATH" in config.parameters or (source.model_dir / "requirements.txt").is_file()


def _number(settings: Mapping[str, str], key: str, default: float, least: float = 0) -> float:
    text = settings.get(key)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < 1 << 62:
        raise ConfigError(f"--backend-config=python,{key}={text}: expected a number of at least {least:g}")
    return value


def _choice(said: str, where: str, known: tuple[str, ...]) -> str:
    if said not in known:
        raise ConfigError(f"{where}: '{said}' is none of {', '.join(known)}")
    return said
