"""Tuned settings in model configurations: reading, writing, and the stanza to print."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from remora.api.backends import OPENVINO_PROVIDER, TENSORRT_PROVIDER, concurrent_instances
from remora.api.storage import LocalRepository, function_source, is_archive, is_url, recognise
from remora.cli.output import write_whole
from remora.config import batch_policy, find_config, parse_config, placements, read_config, to_text
from remora.errors import ConfigError
from remora.model_files import parse_version
from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup
from remora_tools.tuning import Runtime, Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

THREADS = {
    "onnxruntime": "intra_op_thread_count",
    "openvino": "INFERENCE_NUM_THREADS",
    "pytorch": "INTRA_OP_THREAD_COUNT",
    "tensorflow": "TF_NUM_INTRA_THREADS",
}
"""The parameter of each backend for the threads of an operator."""

_ACCELERATORS = ((OPENVINO_PROVIDER, "openvino", False), (TENSORRT_PROVIDER, "tensorrt", True))


def read_settings(config: ModelConfig, cores: int) -> Settings:
    """Return the settings of a complete configuration."""
    policy = batch_policy(config)
    instances = max(len(placements(config)), 1)
    key = THREADS.get(config.backend, "")
    written = config.parameters[key].string_value if key in config.parameters else ""
    threads = int(written) if written.isdecimal() else 0
    preferred = () if policy.preferred == (policy.max_batch_size,) else policy.preferred  # that is the default
    accelerators = config.optimization.execution_accelerators
    names = [each.name for each in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator)]
    return Settings(
        policy.max_batch_size,
        policy.dynamic and policy.max_batch_size > 1,
        preferred if policy.max_batch_size > 1 else (),
        policy.max_delay_ns // 1000,
        instances,
        Runtime(threads or default_threads(config.backend, instances, cores), names[0] if names else ""),
    )


def default_threads(backend: str, instances: int, cores: int) -> int:
    """Return the threads of an operator without a parameter, 0 if the library decides."""
    return max(cores // instances, 1) if backend == "onnxruntime" else cores if backend == "openvino" else 0


def has_fixed_instances(config: ModelConfig) -> bool:
    """Return True if several groups or devices make up the instances."""
    groups = [group for group in config.instance_group if not group.passive]
    return len(groups) > 1 or any(len(group.gpus) > 1 for group in groups) or concurrent_instances(config) < 1


def providers_of(config: ModelConfig, available: Sequence[str]) -> list[str]:
    """Return the installed accelerators that fit the device of a model's instances."""
    if config.backend != "onnxruntime":
        return []
    on_gpu = any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    return [name for provider, name, gpu in _ACCELERATORS if provider in available and gpu == on_gpu]


def with_settings(
    config: ModelConfig, new: Settings, present: Settings | None, complete: ModelConfig, cores: int
) -> ModelConfig:
    """Return a copy of a configuration with tuned settings and all its other fields.

    Args:
        config: the configuration to change, complete or not.
        new: the settings.
        present: fields that are equal in these settings are not written; None writes all.
        complete: the complete configuration of the model, for backend and devices.
        cores: processors of the machine.
    """
    result = ModelConfig()
    result.CopyFrom(config)
    batching = ("limit", "dynamic", "preferred", "delay_us")
    if present is None or any(getattr(new, name) != getattr(present, name) for name in batching):
        _write_batching(result, new)
    if present is None or new.instances != present.instances:
        group = result.instance_group[0] if result.instance_group else result.instance_group.add()
        group.count = new.instances
        if complete.instance_group and not group.kind:
            group.kind = complete.instance_group[0].kind
    if present is None or new.runtime != present.runtime or new.instances != present.instances:
        _write_threads(result, new, complete.backend, cores)
    if new.runtime.provider != (present.runtime.provider if present is not None else ""):
        _write_accelerator(result, new.runtime.provider)
    return result


def _write_batching(config: ModelConfig, new: Settings) -> None:
    if not new.limit:
        return
    config.max_batch_size = new.limit
    if not new.dynamic:
        config.ClearField("dynamic_batching")
        return
    config.dynamic_batching.SetInParent()
    del config.dynamic_batching.preferred_batch_size[:]
    config.dynamic_batching.preferred_batch_size.extend(new.preferred)
    config.dynamic_batching.max_queue_delay_microseconds = new.delay_us


def _write_threads(config: ModelConfig, new: Settings, backend: str, cores: int) -> None:
    key = THREADS.get(backend, "")
    if not key or not new.runtime.threads:
        return
    if new.runtime.threads == default_threads(backend, new.instances, cores):
        config.parameters.pop(key, None)
    else:
        config.parameters[key].string_value = str(new.runtime.threads)


def _write_accelerator(config: ModelConfig, name: str) -> None:
    accelerators = config.optimization.execution_accelerators
    del accelerators.cpu_execution_accelerator[:]
    del accelerators.gpu_execution_accelerator[:]
    if not name:
        return
    on_gpu = any(own == name and gpu for _, own, gpu in _ACCELERATORS)
    several = accelerators.gpu_execution_accelerator if on_gpu else accelerators.cpu_execution_accelerator
    several.add(name=name)


def stanza(new: Settings, complete: ModelConfig, cores: int) -> str:
    """Return the tuned fields alone, as in a ``config.pbtxt``."""
    return to_text(with_settings(ModelConfig(), new, None, complete, cores))


def app_of(place: str) -> str:
    """Return the source of a place's decorated functions, "" if it has none."""
    return "" if is_url(place) or is_archive(place) else function_source(place)


# -- writing ----------------------------------------------------------------------------------------------------------


def find_folders(place: str) -> dict[str, Path]:
    """Return the folder of each model at a place that ``--apply`` can write to.

    Raises ConfigError, with what to do instead, for models without such a folder.
    """
    if app := app_of(place):
        raise ConfigError(
            f"the models of {app} have no config.pbtxt: write batch=, max_delay= and instances= in their decorator, "
            "@remora.model(...)"
        )
    if is_url(place) or is_archive(place):
        raise ConfigError(f"{place} is not a local folder: write the configuration where the models come from")
    if recognise(Path(place)) is not None:
        raise ConfigError(
            f"{place} has no config.pbtxt, because another library wrote it: put it into a model repository with this "
            "configuration (docs/model-repository.md)"
        )
    found = {}
    for name, folders in LocalRepository(Path(place), any_layout=True).models().items():
        for folder in folders:
            if any(path.is_file() for path in folder.versions.values()):
                file = next(iter(folder.versions.values()))
                raise ConfigError(
                    f"{file} is a model file without a folder: move it to {name}/1/{file.name} and write this "
                    f"configuration to {name}/config.pbtxt"
                )
            if folder.path.name and parse_version(folder.path.name) is None:
                found[name] = folder.path
    return found


def apply_settings(
    folder: Path, new: Settings, present: Settings, complete: ModelConfig, cores: int
) -> tuple[Path, Path | None]:
    """Write tuned settings into a model's ``config.pbtxt``.

    The write is atomic and keeps all other fields. A model without a configuration gets one. Comments cannot be kept,
    so that a file with comments is copied first.

    Returns:
        The file, and its copy or None.

    Raises ConfigError for a configuration in another notation or one that cannot be read, OSError.
    """
    file = find_config(folder)
    if file is not None and file.suffix != ".pbtxt":
        raise ConfigError(f"{file}: only a config.pbtxt is written; copy the fields above into this file")
    target = file or folder / "config.pbtxt"
    written = read_config(file) if file is not None else ModelConfig()
    text = to_text(with_settings(written, new, present, complete, cores))
    parse_config(text, path=str(target), syntax="pbtxt")
    copy = None
    if file is not None and "#" in file.read_text(encoding="utf-8-sig"):
        copy = file.with_name(f"{file.name}.before-tune")
        shutil.copy2(file, copy)
    write_whole(target, lambda out: out.write(text.encode()))
    return target, copy


def decorator_of(new: Settings) -> str:
    """Return the arguments of ``@remora.model`` for these settings."""
    words = [f"batch={new.batch}"] if new.batch > 1 else []
    words += [f'max_delay="{new.delay_us / 1000:g}ms"'] if new.delay_us else []
    return f"@remora.model({', '.join([*words, f'instances={new.instances}'])})"
