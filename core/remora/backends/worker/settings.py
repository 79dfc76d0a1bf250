"""Settings of worker processes and the choice between process and thread.

They are read once; an invalid setting is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from remora.backends import Source
from remora.errors import ConfigError
from remora.model_files import REQUIREMENTS
from remora.proto.model_config_pb2 import ModelConfig

PROCESS, THREAD = "process", "thread"
_TRANSFER_BYTES = "transfer-limit-byte-size"
TRANSFER_LIMIT = f"--backend-config=python,{_TRANSFER_BYTES}=BYTES"
"""Setting that errors name."""
_LONGEST_POLL_US = 10_000


class WorkerSettings(NamedTuple):
    """Settings of the python backend (``--backend-config=python,KEY=VALUE``).

    Attributes:
        execute_timeout_s: ``execute-timeout``, seconds: a worker whose execution takes longer is killed and restarted.
            0: never.
        finalize_timeout_s: ``finalize-timeout``, seconds that a model's finalize may take.
        memory_limit: ``memory-limit``, bytes of address space that the model's process may use. 0: no limit.
        transfer_bytes: ``transfer-limit-byte-size``, bytes of tensors in flight in each direction.
        poll_ns: ``poll-us``, longest time that a worker and the server poll before they sleep.
            0: never.
        transport: ``transport``: ``memory`` if the system supports it, else ``pipe``; ``auto`` chooses.
    """

    execute_timeout_s: float = 0.0
    finalize_timeout_s: float = 30.0
    memory_limit: int = 0
    transfer_bytes: int = 1 << 30
    poll_ns: int = 1_000_000
    transport: str = "auto"

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> WorkerSettings:
        """Read the settings from ``--backend-config`` pairs. Raises ConfigError for invalid values."""
        return cls(
            _number(settings, "execute-timeout", 0.0),
            _number(settings, "finalize-timeout", 30.0),
            int(_number(settings, "memory-limit", 0)),
            int(_number(settings, _TRANSFER_BYTES, 1 << 30, least=1 << 16)) & -4096,
            min(int(_number(settings, "poll-us", 1000)), _LONGEST_POLL_US) * 1000,
            _choice(settings.get("transport", "auto"), "--backend-config=python,transport", ("auto", "memory", "pipe")),
        )


def isolation(config: ModelConfig, settings: Mapping[str, str]) -> str:
    """Return where a model runs, PROCESS or THREAD.

    The model's parameter ISOLATION takes precedence over the server's setting; the default is THREAD. Raises
    ConfigError for other values.
    """
    if "ISOLATION" in config.parameters:
        value = config.parameters["ISOLATION"].string_value.lower()
        return _choice(value, f"parameter ISOLATION of model '{config.name}'", (PROCESS, THREAD))
    return _choice(settings.get("isolation", THREAD).lower(), "--backend-config=python,isolation", (PROCESS, THREAD))


def asks_for_environment(source: Source, config: ModelConfig) -> bool:
    """Return True if a model needs additional packages.

    Most models do not, and this check avoids importing `environment` for them.
    """
    return "EXECUTION_ENV_PATH" in config.parameters or (source.model_dir / REQUIREMENTS).is_file()


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


def _choice(value: str, where: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"{where}: '{value}' must be one of {', '.join(known)}")

    return value
