"""Commands `remora config show` and `derive`, which run the loader's steps without a server.

The result is the configuration that a server would return for the same path.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from remora import plugins
from remora.backends.registry import find_backend, kinds_of
from remora.cli.output import warnings_shown
from remora.config import (
    ANY_KIND,
    find_config,
    infer_backend,
    normalise,
    read_config,
    to_dict,
    to_text,
    validate,
)
from remora.config.inferring import ENSEMBLE
from remora.errors import ConfigError, NotFoundError, RemoraError
from remora.model_files import CONFIG_FILENAMES
from remora.models.ensembles import step_models
from remora.models.loader import LoadPlan, ModelLoader, PollError
from remora.options import EngineOptions
from remora.proto.model_config_pb2 import ModelConfig
from remora.repository import ModelFolder
from remora.repository.local import scan, scan_repository
from remora.server.startup import with_workers
from remora.system.clock import SystemClock

_SUFFIXES = frozenset(Path(name).suffix for name in CONFIG_FILENAMES)


class Target(NamedTuple):
    """Model folder of a path, or a configuration ``file`` without a model, or both."""

    name: str
    folder: ModelFolder | None = None
    file: Path | None = None
    config_name: str = ""


# -- show and derive --------------------------------------------------------------------------------------------------


def show(options: argparse.Namespace) -> int:
    """Print the configuration of one path. Raises RemoraError."""
    target = _only_target(options.path)
    with warnings_shown("remora config show"):
        config, note = _shown_config(target, options)
        _print(config, note, options.format)
    return 0


def derive(options: argparse.Namespace) -> int:
    """Print the configuration derived from the model alone. Raises RemoraError."""
    target = _only_target(options.path)
    if target.folder is None or not target.folder.versions:
        raise NotFoundError(f"there is no model at '{options.path}' to derive a configuration from")
    loader = _loader(options)
    with warnings_shown("remora config derive"):
        # An empty configuration overrides the configuration file.
        plan = planned(loader, target.folder, {"config": "{}"})
        config, note = _opened_config(loader, plan)
        _print(config, note, options.format)
    return 0


def _shown_config(target: Target, options: argparse.Namespace) -> tuple[ModelConfig, str]:
    """Return the configuration of a path, and what was chosen for it; "" if nothing was."""
    if target.folder is None:
        assert target.file is not None  # a target has one or the other
        return normalised(read_config(target.file), target.name, options.gpus), ""
    loader = _loader(options, target.config_name)
    if not target.folder.versions and find_config(target.folder.path, target.config_name) is None:
        raise NotFoundError(f"'{target.folder.path}' has neither a configuration nor a version directory with a model")
    plan = planned(loader, target.folder, {})
    if is_ensemble(plan.config):
        steps = _step_configs(loader, plan, (target.name,), opened=not options.as_written)
        return as_ensemble(plan, options.gpus, steps), ""
    if target.folder.versions and not options.as_written:
        return _opened_config(loader, plan)
    return normalised(plan.config, target.name, options.gpus), ""


def _loader(options: argparse.Namespace, config_name: str = "") -> ModelLoader:
    settings = with_workers(EngineOptions(model_config_name=config_name))
    return ModelLoader(settings, SystemClock(), gpus=range(options.gpus))


def planned(loader: ModelLoader, folder: ModelFolder, parameters: dict[str, str | bytes]) -> LoadPlan:
    try:
        return loader.plan(folder, parameters)
    except PollError as error:
        raise ConfigError(str(error)) from error


def _opened_config(loader: ModelLoader, plan: LoadPlan) -> tuple[ModelConfig, str]:
    """Return the completed, checked configuration of the newest version, and what was chosen."""
    if not plan.versions:
        raise NotFoundError(f"the version policy of model '{plan.folder.name}' selects none of its versions")
    model = loader.open(plan, plan.versions[-1])
    try:
        return model.config, model.batching
    finally:
        model.close()


def is_ensemble(config: ModelConfig) -> bool:
    """Return True for a model that runs other models instead of a backend."""
    return config.platform == ENSEMBLE or config.HasField("ensemble_scheduling")


def as_ensemble(plan: LoadPlan, gpus: int, models: Iterable[ModelConfig]) -> ModelConfig:
    """Return the served configuration of an ensemble whose steps run ``models``.

    Raises ConfigError.
    """
    config = normalised(plan.config, plan.folder.name, gpus)
    validate(config, plan.folder.name)
    config.model_transaction_policy.decoupled = any(model.model_transaction_policy.decoupled for model in models)
    return config


def _step_configs(loader: ModelLoader, plan: LoadPlan, chain: tuple[str, ...], *, opened: bool) -> list[ModelConfig]:
    """Return the configurations of the ensemble's models that its repository has.

    With ``opened`` the models complete them, so that a step that declares itself decoupled counts; a model that does
    not open counts as it is written.
    """
    found: list[ModelConfig] = []
    for name in step_models(plan.config):
        for folder in scan_repository(plan.folder.repository, name).get(name, ()) if name not in chain else ():
            with suppress(PollError):
                step = loader.plan(folder, {})
                config = step.config
                if opened and step.versions and not is_ensemble(config):
                    with suppress(RemoraError):
                        config, _ = _opened_config(loader, step)
                found += [config, *_step_configs(loader, step, (*chain, name), opened=opened)]
    return found


def normalised(config: ModelConfig, name: str, gpus: int) -> ModelConfig:
    """Return a copy with the defaults that do not depend on the model."""
    filled = ModelConfig()
    filled.CopyFrom(config)
    with suppress(ConfigError):  # without a backend entry only the model file determines it
        infer_backend(filled, name, ())
    kinds = kinds_of(find_backend(filled.backend)) if filled.backend in plugins.BACKENDS else ANY_KIND
    normalise(filled, name, gpus=range(gpus), kinds=kinds)
    return filled


def _print(config: ModelConfig, note: str, notation: str) -> None:
    """Print a configuration; the note is a comment, on stderr for JSON, which has none."""
    if note and notation == "json":
        print(f"note: {note}", file=sys.stderr)
    elif note:
        print("\n".join(textwrap.wrap(note, 110, initial_indent="# ", subsequent_indent="# ")))
    print(_format(config, notation))


def _format(config: ModelConfig, notation: str) -> str:
    if notation == "json":
        return json.dumps(to_dict(config), indent=2, ensure_ascii=False)
    if notation == "yaml":
        import yaml

        text: str = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
        return text.rstrip("\n")
    return to_text(config).rstrip("\n")


# -- targets of a path ------------------------------------------------------------------------------------------------


def _only_target(path: Path) -> Target:
    targets = targets_under(path)
    if len(targets) != 1:
        names = ", ".join(sorted({target.name for target in targets}))
        raise NotFoundError(
            f"'{path}' holds several models ({names}): pass one of them" if names else f"'{path}' holds no model"
        )
    return targets[0]


def targets_under(path: Path) -> list[Target]:
    """Return the models under a path. Raises NotFoundError if there are none."""
    if path.is_file() and path.suffix in _SUFFIXES:
        return [_target_of_file(path)]
    return [Target(name, folder) for name, folders in scan((path,)).items() for folder in folders]


def _target_of_file(path: Path) -> Target:
    """Return the target of a configuration file, with the model's folder if it lies in one."""
    directory = path.resolve().parent
    custom = directory.name == "configs"
    home = directory.parent if custom else directory
    if custom or path.name in CONFIG_FILENAMES:
        for folder in scan((home,)).get(home.name, []):
            if folder.versions and folder.path.resolve() == home:
                return Target(folder.name, folder, path, path.stem if custom else "")
    return Target("", None, path)


def is_bare(folder: ModelFolder) -> bool:
    """Return True for a model file without a model directory."""
    return any(path.is_file() for path in folder.versions.values())
