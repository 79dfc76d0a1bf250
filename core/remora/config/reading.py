"""Reading of ``config.pbtxt``, ``config.json`` and ``config.yaml``.

The three notations - protobuf text format, JSON and YAML - share one schema; each is parsed into a ``ModelConfig``
message, with errors that name the place [C01, C21]. Also reads the data files that a configuration names.
"""

from __future__ import annotations

from pathlib import Path

from remora.config.schema_errors import SchemaError, nearest_line
from remora.errors import ConfigError, InternalError
from remora.model_files import CONFIG_SYNTAX, Syntax
from remora.proto.model_config_pb2 import ModelConfig

MAX_CONFIG_BYTES = 1 << 20
"""Maximum size of a configuration in bytes. The largest known ones have some ten thousand."""


def find_config(model_dir: Path, config_name: str = "") -> Path | None:
    """Return the configuration file of a model, or None if it has none.

    Args:
        model_dir: the model's directory, which contains its versions.
        config_name: the operator's ``--model-config-name``; ``configs/<config_name>.pbtxt`` is then preferred [M16].

    Raises:
        ConfigError: the model has configurations in several notations, or the name is a path.
    """
    if config_name:
        if "/" in config_name or "\\" in config_name or config_name.startswith("."):
            raise ConfigError(f"the model configuration name '{config_name}' must be a plain name, not a path")
        custom = _only_one(model_dir / "configs", config_name)
        if custom is not None:
            return custom
    return _only_one(model_dir, "config")


def read_config(path: Path) -> ModelConfig:
    """Read a configuration file in the notation of its suffix.

    Raises:
        ConfigError: the file is unreadable, too large, not UTF-8, or does not match the schema.
    """
    syntax = CONFIG_SYNTAX.get(path.suffix)
    if syntax is None:
        raise ConfigError(f"{path}: a model configuration ends in {', '.join(CONFIG_SYNTAX)}")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8") from error
    return parse_config(text, path=str(path), syntax=syntax)


def parse_config(text: str, *, path: str, syntax: Syntax) -> ModelConfig:
    """Parse the configuration in ``text``. Fields that the text omits stay unset.

    JSON may have the form that the configuration endpoint returns (see `writing.to_json`).

    Args:
        text: the configuration.
        path: name of the text in errors: a file's path, or a description such as "config override".
        syntax: its notation.

    Raises:
        ConfigError: ``<path>:<line>: <key path>: <reason>``, with the closest valid key for a misspelt one.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: the model configuration is larger than {MAX_CONFIG_BYTES} bytes")
    config = ModelConfig()
    try:
        _READERS[syntax](config, text)
    except SchemaError as error:
        raise ConfigError(f"{path}:{error.line}: {error}" if error.line else f"{path}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: the model configuration is nested too deep") from None
    return config


def read_data(folder: Path, name: str, setting: str, limit_bytes: int) -> bytes:
    """Read a data file that a configuration names.

    Args:
        folder: the directory of such files, below the model's.
        name: the file's name.
        setting: the name of the setting, for errors.
        limit_bytes: maximum size.

    Raises:
        ConfigError: the file is outside of the folder or too large.
        InternalError: the file cannot be read; with Triton's text, except that the path is relative.
    """
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{setting} '{name}' leaves the model's folder '{folder.name}'")
        size = path.stat().st_size
        if size > limit_bytes:
            raise ConfigError(f"{setting} '{name}' has {size} bytes; the limit is {limit_bytes}")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = error.strerror if isinstance(error, OSError) else "not a file name"
        raise InternalError(f"failed to open text file for read {folder.name}/{name}: {reason}") from error


def _only_one(folder: Path, stem: str) -> Path | None:
    found = [path for suffix in CONFIG_SYNTAX if (path := folder / f"{stem}{suffix}").is_file()]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"{folder}: has more than one model configuration ({names}); keep one of them")
    return found[0] if found else None


def _fill_from_pbtxt(config: ModelConfig, text: str) -> None:
    from remora.config.pbtxt import fill_from_text

    fill_from_text(config, text)


def _fill_from_json(config: ModelConfig, text: str) -> None:
    from remora.config.documents import json_line, read_json
    from remora.config.filling import fill

    document = read_json(text)
    try:
        fill(config, document)
    except SchemaError as error:
        error.line = json_line(text, error.path)
        raise


def _fill_from_yaml(config: ModelConfig, text: str) -> None:
    from remora.config.documents import read_yaml
    from remora.config.filling import fill

    document, lines = read_yaml(text)
    try:
        fill(config, document)
    except SchemaError as error:
        error.line = nearest_line(lines, error.path)
        raise


# Each notation imports its reader on first use, so that a start loads only those it needs.
_READERS = {"pbtxt": _fill_from_pbtxt, "json": _fill_from_json, "yaml": _fill_from_yaml}
