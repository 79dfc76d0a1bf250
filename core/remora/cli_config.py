"""`remora config`: shows, derives and checks configurations without a server; the law: the loader's own steps decide.

What is shown is what serving the same path would show at the configuration endpoint.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, cast

from remora.cli_output import one_line, warnings_shown
from remora.config import (
    find_config,
    infer_backend,
    normalise,
    parse_config,
    read_config,
    to_dict,
    to_text,
    validate,
)
from remora.config.misfit import MisfitError
from remora.errors import ConfigError, NotFoundError, RemoraError
from remora.loading import LoadPlan, ModelLoader, PollError
from remora.model_files import CONFIG_FILENAMES, MODEL_FILENAMES, parse_version
from remora.options import EngineOptions
from remora.proto.model_config_pb2 import ModelConfig
from remora.repository import ModelFolder
from remora.repository.local import scan
from remora.system.clock import SystemClock

_SUFFIXES = frozenset(Path(name).suffix for name in CONFIG_FILENAMES)
_MAX_PROBLEMS = 100
"""How many problems of one file are told."""
_SUGGESTED = re.compile(r"did you mean '(\w+)'\?")
_REFUSED_VALUE = re.compile(r"'(\w+)' is no ")
_UNNAMED_BACKEND = "unnamed"


class _Target(NamedTuple):
    """What a path means: a model's folder, or a configuration ``file`` with no model around it, or both."""

    name: str
    folder: ModelFolder | None = None
    file: Path | None = None
    config_name: str = ""


# -- show and derive --------------------------------------------------------------------------------------------------


def show(options: argparse.Namespace) -> int:
    """Print the configuration of one path. Raises RemoraError."""
    target = _only_target(options.path)
    with warnings_shown("remora config show"):
        print(_printed(_shown_config(target, options), options.format))
    return 0


def derive(options: argparse.Namespace) -> int:
    """Print the configuration that follows from the model alone. Raises RemoraError."""
    target = _only_target(options.path)
    if target.folder is None or not target.folder.versions:
        raise NotFoundError(f"there is no model at '{options.path}' to derive a configuration from")
    loader = ModelLoader(EngineOptions(), SystemClock(), gpus=range(options.gpus))
    with warnings_shown("remora config derive"):
        # An empty configuration stands in for the one that may be written.
        plan = _planned(loader, target.folder, {"config": "{}"})
        print(_printed(_served(loader, plan), options.format))
    return 0


def _shown_config(target: _Target, options: argparse.Namespace) -> ModelConfig:
    if target.folder is None:
        assert target.file is not None  # a target has one or the other
        return _normalised(read_config(target.file), target.name, options.gpus)
    loader = ModelLoader(EngineOptions(model_config_name=target.config_name), SystemClock(), gpus=range(options.gpus))
    if not target.folder.versions and find_config(target.folder.path, target.config_name) is None:
        raise NotFoundError(f"'{target.folder.path}' has neither a configuration nor a version directory with a model")
    plan = _planned(loader, target.folder, {})
    if target.folder.versions and not options.as_written:
        return _served(loader, plan)
    return _normalised(plan.config, target.name, options.gpus)


def _planned(loader: ModelLoader, folder: ModelFolder, parameters: dict[str, str | bytes]) -> LoadPlan:
    try:
        return loader.plan(folder, parameters)
    except PollError as error:
        raise ConfigError(str(error)) from error


def _served(loader: ModelLoader, plan: LoadPlan) -> ModelConfig:
    """The configuration as the newest version of the plan would serve with it: opened, completed and checked."""
    if not plan.versions:
        raise NotFoundError(f"the version policy of model '{plan.folder.name}' picks none of its versions")
    model = loader.open(plan, plan.versions[-1])
    try:
        return model.config
    finally:
        model.close()


def _normalised(config: ModelConfig, name: str, gpus: int) -> ModelConfig:
    """A copy with the defaults that do not depend on the model."""
    filled = ModelConfig()
    filled.CopyFrom(config)
    with suppress(ConfigError):  # a configuration alone need not tell its backend: the model's file does
        infer_backend(filled, name, ())
    normalise(filled, name, gpus=range(gpus))
    return filled


def _printed(config: ModelConfig, notation: str) -> str:
    if notation == "json":
        return json.dumps(to_dict(config), indent=2, ensure_ascii=False)
    if notation == "yaml":
        import yaml

        text: str = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
        return text.rstrip("\n")
    return to_text(config).rstrip("\n")


# -- what a path means ------------------------------------------------------------------------------------------------


def _only_target(path: Path) -> _Target:
    targets = _targets(path)
    if len(targets) != 1:
        names = ", ".join(sorted({target.name for target in targets}))
        raise NotFoundError(
            f"'{path}' holds several models ({names}): give one of them" if names else f"'{path}' holds no model"
        )
    return targets[0]


def _targets(path: Path) -> list[_Target]:
    """The models under a path. Raises NotFoundError when there is nothing."""
    if path.is_file() and path.suffix in _SUFFIXES:
        return [_target_of_file(path)]
    home = path.resolve().parent
    number = parse_version(home.name)
    if number is not None and path.is_file() and path.name in MODEL_FILENAMES:
        # A model file in its version's directory: the model is called as the directory around that.
        return [
            _Target(home.parent.name, ModelFolder(home.parent.name, home.parent, home.parent.parent, {number: home}))
        ]
    return [_Target(name, folder) for name, folders in scan((path,)).items() for folder in folders]


def _target_of_file(path: Path) -> _Target:
    """A configuration file: of the model whose directory it lies in, if there is one, else on its own."""
    directory = path.resolve().parent
    custom = directory.name == "configs"
    home = directory.parent if custom else directory
    if custom or path.name in CONFIG_FILENAMES:
        for folder in scan((home,)).get(home.name, []):
            if folder.versions and folder.path.resolve() == home:
                return _Target(folder.name, folder, path, path.stem if custom else "")
    return _Target("", None, path)


# -- check ------------------------------------------------------------------------------------------------------------


def check(options: argparse.Namespace) -> int:
    """Print every problem of every configuration; 1 if there is any. Raises RemoraError for paths that hold nothing."""
    targets = [target for path in options.paths for target in _targets(path)]
    problems: list[str] = []
    with warnings_shown("remora config check"):
        for target in targets:
            problems += _problems(target, options.gpus, open_models=options.open)
    problems += _repeated(targets)
    for problem in problems:
        print(one_line(problem))
    models = _counted(len(targets), "configuration")
    if problems:
        print(f"remora config check: {_counted(len(problems), 'problem')} in {models}", file=sys.stderr)
        return 1
    print(f"{models} checked: no problems")
    return 0


def _problems(target: _Target, gpus: int | None, *, open_models: bool) -> list[str]:
    """What is wrong with one model's configuration, each with its place."""
    file = target.file
    try:
        if target.folder is not None and file is None and not _is_bare(target.folder):
            file = find_config(target.folder.path)
    except ConfigError as error:
        return [str(error)]
    config = ModelConfig()
    if file is not None:
        problems, config = _read_all(file)
        if problems:
            return problems
    place = file or (target.folder.path if target.folder is not None else Path())
    try:
        _check_served(target, config, _gpus_named(config) if gpus is None else gpus, open_models=open_models)
    except RemoraError as error:
        return [f"{place}: {error}"]
    return []


def _check_served(target: _Target, config: ModelConfig, gpus: int, *, open_models: bool) -> None:
    """Raise RemoraError for the first reason why this could not be served."""
    folder = target.folder
    name = target.name or config.name or "model"
    if folder is None:
        _check_alone(config, name, gpus)
        return
    loader = ModelLoader(EngineOptions(model_config_name=target.config_name), SystemClock(), gpus=range(gpus))
    plan = _planned(loader, folder, {})
    if folder.versions and not plan.versions:
        raise ConfigError(
            f"version_policy picks none of the versions that are there ({', '.join(map(str, folder.versions))})"
        )
    if open_models and not plan.versions:
        raise NotFoundError("has no version directory with a model")
    if not plan.versions and not config.ByteSize():
        raise NotFoundError("has neither a configuration nor a version directory with a model")
    _check_alone(plan.config, name, gpus)  # the loader checks what is complete, this what is not yet
    if open_models:
        for number in plan.versions:
            loader.open(plan, number).close()


def _check_alone(config: ModelConfig, name: str, gpus: int) -> None:
    trial = _normalised(config, name, gpus)
    if not (trial.backend or trial.platform or trial.HasField("ensemble_scheduling")):
        trial.backend = _UNNAMED_BACKEND  # the model's file will tell; all other rules can be checked before
    validate(trial, name, gpus=range(gpus))


def _gpus_named(config: ModelConfig) -> int:
    """As many GPUs as the configuration needs: a check is about the file, not about the machine it runs on."""
    return max((gpu + 1 for group in config.instance_group for gpu in group.gpus), default=1)


def _repeated(targets: Iterable[_Target]) -> list[str]:
    """Two folders for one name are refused by every server (spec M15)."""
    places: dict[str, list[str]] = {}
    for target in targets:
        if target.folder is not None:
            places.setdefault(target.name, []).append(str(target.folder.path.resolve()))
    return [
        f"{found[0]}: model '{name}' is there more than once: also {', '.join(sorted(set(found) - {found[0]}))}"
        for name, found in sorted(places.items())
        if len(set(found)) > 1
    ]


def _is_bare(folder: ModelFolder) -> bool:
    return any(path.is_file() for path in folder.versions.values())


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# -- all problems of one file -----------------------------------------------------------------------------------------


def _read_all(file: Path) -> tuple[list[str], ModelConfig]:
    """The problems of a configuration file in order, and the configuration when there are none.

    A reader stops at the first problem. Where it names the word that was meant, a copy of the text is mended and read
    again, so that one run tells all misspelt words.
    """
    problems: list[str] = []
    try:
        return problems, read_config(file)
    except ConfigError as error:
        first = error
    problems.append(str(first))
    if not isinstance(first.__cause__, MisfitError):
        return problems, ModelConfig()
    syntax = cast(Literal["pbtxt", "json", "yaml"], "yaml" if file.suffix == ".yml" else file.suffix[1:])
    text, cause = file.read_text(encoding="utf-8-sig"), first.__cause__
    while len(problems) < _MAX_PROBLEMS:
        mended = _mended(text, cause)
        if mended is None:
            break
        text = mended
        try:
            parse_config(text, path=str(file), syntax=syntax)
            break
        except ConfigError as error:
            if not isinstance(error.__cause__, MisfitError):
                break
            problems.append(str(error))
            cause = error.__cause__
    return problems, ModelConfig()


def _mended(text: str, misfit: MisfitError) -> str | None:
    """The text with the misspelt word replaced by the one that was meant; None when that is not known."""
    suggested, value = _SUGGESTED.search(misfit.reason), _REFUSED_VALUE.match(misfit.reason)
    wrong = value[1] if value else misfit.path[-1] if misfit.path else ""
    lines = text.split("\n")
    if suggested is None or not isinstance(wrong, str) or not 0 < misfit.line <= len(lines):
        return None
    line = lines[misfit.line - 1]
    lines[misfit.line - 1] = re.sub(rf"(?<!\w){re.escape(wrong)}(?!\w)", suggested[1], line, count=1)
    return "\n".join(lines) if lines[misfit.line - 1] != line else None
