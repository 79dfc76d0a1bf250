"""Command `remora config check`, which prints every problem of configurations."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, cast

from remora import plugins
from remora.backends.registry import installed_backends
from remora.cli.config import Target, as_ensemble, is_bare, is_ensemble, normalised, planned, targets_under
from remora.cli.output import one_line, warnings_shown
from remora.cli.stderr import print_error
from remora.config import find_config, parse_config, read_config, validate
from remora.config.schema_errors import SchemaError
from remora.config.step_rules import check_batch_size
from remora.errors import ConfigError, NotFoundError, RemoraError
from remora.models.ensembles import circle, compose, no_version, not_there, step_models
from remora.models.loader import LoadPlan, ModelLoader
from remora.options import EngineOptions
from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup
from remora.repository import ModelFolder
from remora.repository.local import scan_repository
from remora.server.startup import with_workers
from remora.system.clock import SystemClock

_MAX_PROBLEMS = 100
"""Limit of the problems printed per file."""
_SUGGESTED = re.compile(r"did you mean '(\w+)'\?")
_REFUSED_VALUE = re.compile(r"'(\w+)' is not? ")
_UNNAMED_BACKEND = "unnamed"


def check(options: argparse.Namespace) -> int:
    """Print every problem and return 1 if there is any. Raises RemoraError for empty paths."""
    targets = [target for path in options.paths for target in targets_under(path)]
    checker = _Checker(targets, options.gpus, options.backend_directory, open_models=options.open)
    with warnings_shown("remora config check"):
        problems = [problem for target in targets for problem in checker.problems(target)]
    problems += _duplicates(targets)
    for problem in problems:
        print(one_line(problem))
    models = _count_of(len(targets), "configuration")
    if problems:
        print_error("remora config check", f"{_count_of(len(problems), 'problem')} in {models}")
        return 1
    unopened = "" if options.open else ", models not opened (--open does)"
    print(f"{models} checked{unopened}: no problems")
    return 0


class _Checker:
    """Checker of the models of one run and of the models that their ensembles use.

    Args:
        targets: targets that the paths of the command mean.
        gpus: GPUs of the serving machine; None for as many as a configuration uses.
        backend_directory: directory of the backends besides the built-in and installed ones.
        open_models: open each model and take its complete configuration.
    """

    def __init__(
        self, targets: Iterable[Target], gpus: int | None, backend_directory: str, *, open_models: bool
    ) -> None:
        self._gpus = gpus
        self._options = with_workers(EngineOptions(backend_directory=backend_directory))
        self._open_models = open_models
        self._targets = [target for target in targets if target.folder is not None]
        self._results: dict[tuple[Path, str, str], Mapping[int, ModelConfig] | RemoraError] = {}

    def problems(self, target: Target) -> list[str]:
        """Return the problems of one model's configuration, each with its place."""
        file = target.file
        try:
            if target.folder is not None and file is None and not is_bare(target.folder):
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
            if target.folder is None:
                self._check_alone(config, target.name or config.name or "model")
            else:
                self._configs(target, ())
        except RemoraError as error:
            return [f"{place}: {error}"]
        return []

    def _configs(self, target: Target, chain: tuple[str, ...]) -> Mapping[int, ModelConfig]:
        """Return the configurations of a model's versions, complete if models are opened.

        ``chain`` names the ensembles that run the model. Raises RemoraError for the first reason why the model cannot
        be served.
        """
        assert target.folder is not None
        key = (target.folder.path.resolve(), target.name, target.config_name)
        if key not in self._results:
            try:
                self._results[key] = self._check_model(target, target.folder, chain)
            except RemoraError as error:
                self._results[key] = error
        found = self._results[key]
        if isinstance(found, RemoraError):
            raise found
        return found

    def _check_model(self, target: Target, folder: ModelFolder, chain: tuple[str, ...]) -> Mapping[int, ModelConfig]:
        options = replace(self._options, model_config_name=target.config_name)
        written = planned(ModelLoader(options, SystemClock(), gpus=()), folder, {}).config
        gpus = self._gpus_for(written)
        loader = ModelLoader(options, SystemClock(), gpus=range(gpus))
        plan = planned(loader, folder, {})
        if folder.versions and not plan.versions:
            raise ConfigError(f"version_policy selects none of the versions ({', '.join(map(str, folder.versions))})")
        if is_ensemble(plan.config) and not plan.versions:
            raise NotFoundError("an ensemble needs a version although it has no files: create an empty folder 1/")
        if self._open_models and not plan.versions:
            raise NotFoundError("has no version directory with a model")
        if not plan.versions and find_config(folder.path, target.config_name) is None:
            raise NotFoundError("has neither a configuration nor a version directory with a model")
        self._check_alone(plan.config, target.name)  # the loader checks complete configurations only
        if is_ensemble(plan.config):
            config = self._check_steps(plan, gpus, (*chain, target.name))
            return dict.fromkeys(plan.versions or [1], config)
        if not self._open_models:
            return dict.fromkeys(plan.versions or [1], plan.config)
        opened = {}
        for number in plan.versions:
            model = loader.open(plan, number)
            opened[number] = model.config
            model.close()
        return opened

    def _check_alone(self, config: ModelConfig, name: str) -> None:
        """Check the rules that need no model. Raises ConfigError."""
        gpus = self._gpus_for(config)
        trial = normalised(config, name, gpus)
        if trial.backend:
            _check_backend(trial.backend, self._options.backend_directory)
        elif not (trial.platform or trial.HasField("ensemble_scheduling")):
            trial.backend = _UNNAMED_BACKEND  # the model file determines it; all other rules apply already
        validate(trial, name, gpus=range(gpus))

    def _gpus_for(self, config: ModelConfig) -> int:
        return _gpus_used(config) if self._gpus is None else self._gpus

    # -- ensembles ------------------------------------------------------------------------------------------------

    def _check_steps(self, plan: LoadPlan, gpus: int, chain: tuple[str, ...]) -> ModelConfig:
        """Return the configuration of an ensemble after checking its steps."""
        found: dict[str, Mapping[int, ModelConfig]] = {}
        failed: dict[str, RemoraError] = {}
        for model in step_models(plan.config):
            if model in chain:
                raise ConfigError(circle((*chain[chain.index(model) :], model)))
            target = self._find_model(model, plan.folder)
            try:
                found[model] = self._configs(target, chain)
            except RemoraError as error:
                failed[model] = error
                if target not in self._targets:  # because no other line would report the step's problem
                    raise ConfigError(no_version(plan.folder.name, model, str(error))) from error
        config = as_ensemble(plan, gpus, [each for versions in found.values() for each in versions.values()])
        if self._open_models:
            compose(config, lambda model: found.get(model, {}), lambda model: str(failed.get(model, "")))
            return config
        for model, versions in found.items():
            check_batch_size(config, model, versions[max(versions)])
        return config

    def _find_model(self, name: str, ensemble: ModelFolder) -> Target:
        """Return the model that an ensemble names.

        Raises ConfigError with the nearest name if it is missing.
        """
        home = ensemble.repository.resolve()
        near = [target for target in self._targets if target.folder and target.folder.repository.resolve() == home]
        for target in (*near, *self._targets):
            if target.name == name:
                return target
        for folder in scan_repository(ensemble.repository, name).get(name, ()):
            return Target(name, folder)
        beside = {entry.name for entry in ensemble.repository.iterdir() if entry.is_dir()}
        close = get_close_matches(name, beside | {target.name for target in self._targets}, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ConfigError(not_there(ensemble.name, name) + hint)


def _check_backend(name: str, directory: str) -> None:
    """Raise ConfigError with the nearest name for an unknown backend."""
    if name in plugins.BACKENDS or (directory and Path(directory, name).is_dir()):
        return
    names = [*plugins.BACKENDS, *(each for each, _ in installed_backends())]
    if name in names:
        return
    close = [each for each in names if each.startswith(name)] or get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(sorted(set(names)))}"
    raise ConfigError(f"backend: there is no backend '{name}'; {hint}")


def _gpus_used(config: ModelConfig) -> int:
    """Return the number of GPUs that the configuration uses, whatever GPUs this machine has."""
    uses_gpu = any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    return max((gpu + 1 for group in config.instance_group for gpu in group.gpus), default=int(uses_gpu))


def _duplicates(targets: Iterable[Target]) -> list[str]:
    """Return the models with several folders, which every server refuses [M15]."""
    places: dict[str, list[str]] = {}
    for target in targets:
        if target.folder is not None:
            places.setdefault(target.name, []).append(str(target.folder.path.resolve()))
    return [
        f"{found[0]}: model '{name}' is there more than once: also {', '.join(sorted(set(found) - {found[0]}))}"
        for name, found in sorted(places.items())
        if len(set(found)) > 1
    ]


def _count_of(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# -- all problems of one file -----------------------------------------------------------------------------------------


def _read_all(file: Path) -> tuple[list[str], ModelConfig]:
    """Return the problems of a file in order, and its configuration if there are none.

    The reader stops at the first problem. If its error suggests a word, that word is replaced in a copy of the text and
    the copy is read again, so that one run reports all misspelled words.
    """
    problems: list[str] = []
    try:
        return problems, read_config(file)
    except ConfigError as error:
        first = error
    problems.append(str(first))
    if not isinstance(first.__cause__, SchemaError):
        return problems, ModelConfig()
    syntax = cast(Literal["pbtxt", "json", "yaml"], "yaml" if file.suffix == ".yml" else file.suffix[1:])
    text, cause = file.read_text(encoding="utf-8-sig"), first.__cause__
    while len(problems) < _MAX_PROBLEMS:
        corrected = _corrected(text, cause)
        if corrected is None:
            break
        text = corrected
        try:
            parse_config(text, path=str(file), syntax=syntax)
            break
        except ConfigError as error:
            if not isinstance(error.__cause__, SchemaError):
                break
            problems.append(str(error))
            cause = error.__cause__
    return problems, ModelConfig()


def _corrected(text: str, problem: SchemaError) -> str | None:
    """Return the text with the misspelled word replaced, or None without a suggestion."""
    suggested, value = _SUGGESTED.search(problem.reason), _REFUSED_VALUE.match(problem.reason)
    wrong = value[1] if value else problem.path[-1] if problem.path else ""
    lines = text.split("\n")
    if suggested is None or not isinstance(wrong, str) or not 0 < problem.line <= len(lines):
        return None
    line = lines[problem.line - 1]
    lines[problem.line - 1] = re.sub(rf"(?<!\w){re.escape(wrong)}(?!\w)", suggested[1], line, count=1)
    return "\n".join(lines) if lines[problem.line - 1] != line else None
