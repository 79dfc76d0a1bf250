"""Contents of a folder with ``genai_config.json``, from onnxruntime-genai's exporter.

Invariant: a file name in the configuration never leads out of the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from remora.errors import ConfigError
from remora.system.json_text import read_json

CONFIG_FILENAME = "genai_config.json"
_SIZE_LIMIT = 64 << 20
_SEARCH_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class DecoderFolder:
    """A decoder-only language model on disk.

    Attributes:
        path: the ONNX file.
        context: maximum number of tokens.
        vocabulary: number of token ids in the logits.
        end_tokens: tokens by which the model ends an answer.
        layers, kv_heads, head_size: shape of the key-value cache.
        input_names: names of the graph's inputs by ``input_ids``, ``attention_mask``, ``position_ids``.
        past: names of the inputs with the cache, keys and values of each layer in turn.
        present: the same for outputs.
        logits: name of the output.
        defaults: recommended sampling parameters.
        template: chat template, empty if there is none.
    """

    path: Path
    context: int
    vocabulary: int
    end_tokens: frozenset[int]
    layers: int
    kv_heads: int
    head_size: int
    input_names: Mapping[str, str]
    past: tuple[str, ...]
    present: tuple[str, ...]
    logits: str
    defaults: Mapping[str, float]
    template: str


def read_folder(folder: Path, name: str) -> DecoderFolder:
    """Return what the folder's files describe.

    Raises:
        ConfigError: a file is missing, is not what it should be, or describes a model that is not a plain decoder.
    """
    document = read_object(folder / CONFIG_FILENAME, name)
    model = _part(document, "model", name)
    decoder = _part(model, "decoder", name)
    for other in ("encoder", "vision", "speech", "embedding"):
        if other in model:
            raise ConfigError(
                f"model '{name}': {CONFIG_FILENAME} has a part '{other}'; only decoders of text are supported"
            )
    if "pipeline" in decoder or "sliding_window" in decoder:
        raise ConfigError(
            f"model '{name}': {CONFIG_FILENAME} describes a decoder in several parts or with a sliding window, which "
            "is not supported: export the model as one graph with a full cache"
        )
    layers = _size(decoder, "num_hidden_layers", name)
    inputs, outputs = decoder.get("inputs", {}), decoder.get("outputs", {})
    past = _layer_names(inputs, "past_key_names", "past_value_names", "past_key_values.%d", layers)
    present = _layer_names(outputs, "present_key_names", "present_value_names", "present.%d", layers)
    ends = model.get("eos_token_id", [])
    search = document.get("search", {})
    defaults = {key: float(search[key]) for key in _SEARCH_NAMES if isinstance(search.get(key), int | float)}
    if not search.get("do_sample", False):
        defaults = {}
    return DecoderFolder(
        path=_inside(folder, decoder.get("filename", "model.onnx"), name),
        context=_size(model, "context_length", name),
        vocabulary=_size(model, "vocab_size", name),
        end_tokens=frozenset(int(each) for each in (ends if isinstance(ends, list) else [ends])),
        layers=layers,
        kv_heads=_size(decoder, "num_key_value_heads", name),
        head_size=_size(decoder, "head_size", name),
        input_names={key: inputs.get(key, key) for key in ("input_ids", "attention_mask", "position_ids")},
        past=past,
        present=present,
        logits=outputs.get("logits", "logits"),
        defaults=defaults,
        template=template_of(folder, name),
    )


def template_of(folder: Path, name: str) -> str:
    """Return the chat template of a file by itself, or of the tokenizer's configuration."""
    for own in ("chat_template.jinja", "chat_template.txt"):
        if (folder / own).is_file():
            return _read(folder / own, name)
    path = folder / "tokenizer_config.json"
    template = read_object(path, name).get("chat_template", "") if path.is_file() else ""
    if isinstance(template, list):  # several named templates
        named = {each.get("name"): each.get("template", "") for each in template if isinstance(each, dict)}
        template = named.get("default", "")
    return template if isinstance(template, str) else ""


def read_file(folder: Path, filename: str, name: str) -> str:
    """Return the text of a file of the folder. Raises ConfigError."""
    return _read(_inside(folder, filename, name), name)


def special_tokens(folder: Path, name: str) -> dict[str, str]:
    """Return the special tokens that chat templates refer to, such as ``bos_token``."""
    path = folder / "tokenizer_config.json"
    document = read_object(path, name) if path.is_file() else {}
    found = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token"):
        value = document.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[key] = value
    return found


def _layer_names(names: Mapping[str, str], keys: str, values: str, default: str, layers: int) -> tuple[str, ...]:
    key, value = names.get(keys, f"{default}.key"), names.get(values, f"{default}.value")
    return tuple(pattern.replace("%d", str(layer)) for layer in range(layers) for pattern in (str(key), str(value)))


def _inside(folder: Path, filename: str, name: str) -> Path:
    pure = PurePath(filename)
    if pure.is_absolute() or ".." in pure.parts or "\0" in filename or "\\" in filename:
        raise ConfigError(f"model '{name}': the file name '{filename}' in {CONFIG_FILENAME} leaves the folder")
    path = folder / pure
    if not path.is_file():
        raise ConfigError(f"model '{name}': {CONFIG_FILENAME} names '{filename}', which is not in the folder")
    return path


def _read(path: Path, name: str) -> str:
    try:
        if path.stat().st_size > _SIZE_LIMIT:
            raise ConfigError(f"model '{name}': {path.name} has more than {_SIZE_LIMIT} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model '{name}': {path.name} cannot be read: {error}") from error


def read_object(path: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ConfigError."""
    try:
        document = read_json(_read(path, name))
    except ValueError as error:
        raise ConfigError(f"model '{name}': {path.name} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"model '{name}': {path.name} must hold an object")
    return document


def _part(document: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    part = document.get(key)
    if not isinstance(part, dict):
        raise ConfigError(f"model '{name}': {CONFIG_FILENAME} has no object '{key}'")
    return part


def _size(part: Mapping[str, Any], key: str, name: str) -> int:
    value = part.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model '{name}': '{key}' in {CONFIG_FILENAME} is {value!r}; it must be a positive number")
    return value
