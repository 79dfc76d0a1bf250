"""Finds, reads and parses model configurations; the law: one schema, three notations, errors that name the place.

``config.pbtxt``, ``config.json`` and ``config.yaml`` say the same things in protobuf text format, JSON and YAML; each
becomes a ``ModelConfig`` message [C01, C21]. The files of data that a configuration names are read here as well.
"""

from __future__ import annotations

from pathlib import Path

from remora.config.schema_errors import SchemaError, nearest_line
from remora.errors import ConfigError, InternalError
from remora.model_files import CONFIG_SYNTAX, Syntax
from remora.proto.model_config_pb2 import ModelConfig

MAX_CONFIG_BYTES = 1 << 20
"""How large a configuration may be, in bytes. The largest in the wild are some ten thousand."""


def find_config(model_dir: Path, config_name: str = "") -> Path | None:
    """The configuration file of a model, or None when it has none.

    Args:
        model_dir: the model's directory, the one that holds its versions.
        config_name: the operator's ``--model-config-name``; ``configs/<config_name>.pbtxt`` then comes first
            [M16].

    Raises:
        ConfigError: when the model has a configuration in more than one notation, or the name is a path.
    """
    if config_name:
        if "/" in config_name or "\\" in config_name or config_name.startswith("."):
            raise ConfigError(f"the model configuration name '{config_name}' must be a plain name, not a path")
        custom = _only_one(model_dir / "configs", config_name)
        if custom is not None:
            return custom
    return _only_one(model_dir, "config")


def read_config(path: Path) -> ModelConfig:
    """The configuration in a file, in the notation of its suffix.

    Raises:
        ConfigError: when the file cannot be read, is too large, is no UTF-8 or says what the schema does not know.
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
    """The configuration that ``text`` describes; what the text leaves out stays unset.

    JSON may have the form that the configuration endpoint prints (see `writing.to_json`).

    Args:
        path: what errors call the text: a file's path, or words such as "config override".

    Raises:
        ConfigError: ``<path>:<line>: <key path>: <reason>``, with the nearest valid key for a misspelt one.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: the model configuration is larger than {MAX_CONFIG_BYTES} bytes")
    config = ModelConfig()
    try:
        _READERS[syntax](config, text)
    except SchemaError as misfit:
        raise ConfigError(f"{path}:{misfit.line}: {misfit}" if misfit.line else f"{path}: {misfit}") from misfit
    except RecursionError:
        raise ConfigError(f"{path}: the model configuration is nested too deep") from None
    return config


def read_data(folder: Path, name: str, setting: str, limit_bytes: int) -> bytes:
    """The content of a file that a configuration names.

    Args:
        folder: where such files lie, in the model's directory.
        name: the file's.
        setting: what errors call that which names it.
        limit_bytes: how large it may be.

    Raises:
        ConfigError: it leaves the folder or is too large.
        InternalError: it cannot be read, in Triton's words but for the folders above.
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
        reason = error.strerror if isinstance(error, OSError) else "no name of a file"
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
    except SchemaError as misfit:
        misfit.line = json_line(text, misfit.path)
        raise


def _fill_from_yaml(config: ModelConfig, text: str) -> None:
    from remora.config.documents import read_yaml
    from remora.config.filling import fill

    document, lines = read_yaml(text)
    try:
        fill(config, document)
    except SchemaError as misfit:
        misfit.line = nearest_line(lines, misfit.path)
        raise


# Each notation loads its own reader, so that a start pays for the one it uses.
_READERS = {"pbtxt": _fill_from_pbtxt, "json": _fill_from_json, "yaml": _fill_from_yaml}
