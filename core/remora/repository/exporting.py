"""Export of the models of a Python file as a Triton repository.

``python -m remora.repository.exporting DIRECTORY SOURCE NAME`` runs in a separate process, because it imports the
user's file; `remora.repository.functions` starts it for `remora serve app.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import shutil
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from remora.functions import runtime
from remora.functions.definition import (
    NOTHING,
    InputField,
    Model,
    ModelDefinitionError,
    OutputField,
    Pipeline,
    model,
    tensor_config,
)
from remora.functions.examples import NoExampleError, hint_text, image_example, json_example
from remora.functions.hints import is_image
from remora.functions.runtime import register_live
from remora.model_files import FUNCTION, GOLDEN_TESTS, JSON_TENSORS, MODULE_PATH, SOURCE_FILES

_LONGEST_DOC = 2000
_LONGEST_DEFAULT = 200
_RUNTIME = (
    "__init__.py",
    "definition.py",
    "errors.py",
    "hints.py",
    "images.py",
    "json_values.py",
    "runtime.py",
)

Definition = Model | Pipeline


class Source(NamedTuple):
    """A Python file or module, and the names of the models to serve; none for all."""

    module: str
    names: tuple[str, ...] = ()


def parse_source(text: str) -> Source:
    """Return the parts of ``app.py``, ``app.py:a,b`` or ``package.module:a``."""
    head, colon, tail = text.rpartition(":")
    if colon and re.fullmatch(r"\w+(,\w+)*", tail):
        return Source(head, tuple(tail.split(",")))
    return Source(text)


def load_source(source: Source) -> tuple[ModuleType, list[Definition]]:
    """Import a source and return its module and models, in the order of their definition.

    Raises ModelDefinitionError if it has none of the names or no model, and any exception of the file.
    """
    module = _imported(source.module)
    shown = Path(module.__file__ or source.module).name
    if source.names:
        found = {name: _named(module, name, shown) for name in source.names}
    else:
        found = {name: value for name, value in vars(module).items() if isinstance(value, Model | Pipeline)}
    if not found:
        functions = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        ]
        hint = f"; its functions are {', '.join(functions)}" if functions else ""
        if hasattr(module, "TritonPythonModel"):
            hint = "; name the file model.py to serve its class TritonPythonModel"
        raise ModelDefinitionError(f"{shown} defines no model: put @remora.model above a function or a class{hint}")
    return module, _with_steps(found)


def _named(module: ModuleType, name: str, shown: str) -> Definition:
    value = getattr(module, name, None)
    if isinstance(value, Model | Pipeline):
        return value
    if callable(value):
        return model(name=name)(value)
    from difflib import get_close_matches

    names = [each for each, other in vars(module).items() if isinstance(other, Model | Pipeline)]
    near = get_close_matches(name, names, 1) or names[:1]
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise ModelDefinitionError(f"{shown} has no model '{name}'{hint}")


def _with_steps(found: dict[str, Definition]) -> list[Definition]:
    """Return the models with those of the pipelines' steps, each once.

    Raises ModelDefinitionError for equal names.
    """
    every: dict[int, Definition] = {}
    for variable, each in found.items():
        if isinstance(each, Pipeline):
            each.name = each.name or variable
            every |= {id(step): step for step in each.models()}
        every[id(each)] = each
    names: dict[str, Definition] = {}
    for each in every.values():
        if each.name in names:
            raise ModelDefinitionError(f"two models are called '{each.name}': give one of them another name=")
        names[each.name] = each
    return list(names.values())


def _imported(name: str) -> ModuleType:
    if not name.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if f"{name}.".startswith(f"{error.name}."):  # else a module that this one imports
                raise ModelDefinitionError(f"no such module: '{name}': expected app.py or package.module") from error
            raise
    path = Path(name).resolve()
    if not path.is_file():
        raise ModelDefinitionError(f"no such file: '{name}'")
    if path.stem in sys.stdlib_module_names or not path.stem.isidentifier():
        raise ModelDefinitionError(
            f"'{path.name}' cannot be imported under its name: use letters, digits and '_', and no name of Python's "
            "library"
        )
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path:
        raise ModelDefinitionError(
            f"'{name}' cannot be imported: '{module.__file__}' has the same module name '{path.stem}'; rename one of "
            "them"
        )
    return module


# -- writing --------------------------------------------------------------------------------------------------------


def export(directory: Path, sources: Iterable[Source], *, linked: bool, name: str = "") -> list[str]:
    """Write the models of the sources as a repository and return their names.

    A file ``NAME.tests.json`` beside a source becomes the golden tests of the model NAME.

    Args:
        directory: where the models' folders are created.
        sources: files or modules.
        linked: the models import the sources from where they are; otherwise each gets a copy of the file, of the
            modules beside it that it imports, and of the runtime, and the repository can be moved to another machine.
        name: the model's name, if a source has a single model.

    Raises ModelDefinitionError, and any exception of the sources.
    """
    written: list[str] = []
    for source in sources:
        module, definitions = load_source(source)
        if name and len(definitions) == 1:
            definitions[0].name = name
        file = Path(module.__file__ or "").resolve()
        root = _root_of(module, file)
        files = modules = _own_files(root)
        for each in definitions:
            if each.name in written:
                raise ModelDefinitionError(f"two models are called '{each.name}': give one of them another name=")
            written.append(each.name)
            folder = directory / each.name
            version = folder / "1"
            version.mkdir(parents=True)
            config = pipeline_config(each) if isinstance(each, Pipeline) else model_config(each)
            if linked and isinstance(each, Model):
                config["parameters"][MODULE_PATH] = _text(str(root))
            _write_config(folder, config, for_triton=not linked)
            tests = file.with_name(f"{each.name}.{GOLDEN_TESTS}")
            if tests.is_file():
                shutil.copyfile(tests, folder / GOLDEN_TESTS)
                files = sorted({*files, tests})
            if isinstance(each, Pipeline):
                continue
            (version / "model.py").write_text(_model_file(each, module), encoding="utf-8")
            if not linked:
                _copy(modules, root, version)
        if linked:
            with (directory / SOURCE_FILES).open("a", encoding="utf-8") as listing:
                listing.writelines(f"{path}\n" for path in files)
    return written


def export_objects(directory: Path, definitions: Iterable[Any]) -> list[str]:
    """Write a repository that serves model objects of this process in threads.

    Args:
        directory: where the models' folders are created.
        definitions: models and pipelines with names, or functions.

    Returns:
        The keys of the registered objects, for `remora.functions.runtime.forget_live`.

    Raises ModelDefinitionError.
    """
    chosen = [each if isinstance(each, Model | Pipeline) else model(each) for each in definitions]
    nameless = next((each for each in chosen if not each.name), None)
    if nameless is not None:
        raise ModelDefinitionError("a pipeline needs a name: Pipeline(..., name='NAME')")
    keys = []
    for each in _with_steps({definition.name: definition for definition in chosen}):
        folder = directory / each.name
        (folder / "1").mkdir(parents=True)
        if isinstance(each, Pipeline):
            _write_config(folder, pipeline_config(each))
            continue
        keys.append(register_live(each))
        _write_config(folder, model_config(each, isolation="thread"))
        (folder / "1" / "model.py").write_text(_live_model_file(keys[-1]), encoding="utf-8")
    return keys


def _root_of(module: ModuleType, file: Path) -> Path:
    """Return the folder from which the module is imported."""
    return file.parents[module.__name__.count(".") + (file.name == "__init__.py")]


def _own_files(root: Path) -> list[Path]:
    """Return the files under the root that the process has imported."""
    own = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and root in Path(file).resolve().parents and "site-packages" not in file and file.endswith(".py"):
            own.append(Path(file).resolve())
    package = Path(runtime.__file__).resolve().parents[1]
    return sorted({path for path in own if package not in path.parents})


def _copy(files: Sequence[Path], root: Path, version: Path) -> None:
    for path in files:
        copy = version / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    package = version / "remora" / "functions"
    package.mkdir(parents=True)
    own = Path(runtime.__file__).parent
    for name in _RUNTIME:
        shutil.copyfile(own / name, package / name)
    (version / "remora" / "__init__.py").write_text(
        '"""The part of remora that exported models need."""\n\nfrom remora.functions import *  # noqa: F403\n',
        encoding="utf-8",
    )


def _place_of(model: Model, source: ModuleType) -> tuple[ModuleType, str]:
    """Return the module that has the model as a variable, and the variable's name.

    Raises ModelDefinitionError.
    """
    for module in (source, sys.modules.get(getattr(model.target, "__module__", None) or "")):
        for name, value in vars(module).items() if module else ():
            if module and (value is model or value is model.target):
                return module, name
    raise ModelDefinitionError(
        f"{model.described()} is a step of a pipeline, but no variable of its module: assign it to one"
    )


def _model_file(model: Model, source: ModuleType) -> str:
    module, variable = _place_of(model, source)
    imported = f"from {module.__name__.rpartition('.')[0]} import" if "." in module.__name__ else "import"
    last = module.__name__.rpartition(".")[2]
    return (
        f'"""Model \'{model.name}\' of {Path(module.__file__ or "").name}, written by remora."""\n\n'
        f"{imported} {last} as source\nfrom remora.functions.runtime import FunctionModel\n\n\n"
        f"class TritonPythonModel(FunctionModel):\n    target = source.{variable}\n"
    )


def _live_model_file(key: str) -> str:
    return (
        '"""Model object of this process."""\n\nfrom remora.functions.runtime import FunctionModel, live\n\n\n'
        f"class TritonPythonModel(FunctionModel):\n    target = live({json.dumps(key)})\n"
    )


# -- configurations -------------------------------------------------------------------------------------------------


def model_config(model: Model, isolation: str = "") -> dict[str, Any]:
    """Return the configuration of a model as the object of a ``config.json``."""
    settings = model.settings
    kind = {"auto": "KIND_AUTO", "cpu": "KIND_CPU", "gpu": "KIND_GPU"}[settings.device]
    config: dict[str, Any] = {
        "name": model.name,
        "backend": "python",
        "max_batch_size": settings.batch,
        "input": [tensor_config(each) for each in model.signature.inputs],
        "output": [tensor_config(each) for each in model.signature.outputs],
        "instance_group": [{"count": settings.instances, "kind": kind}],
        "parameters": {"ISOLATION": _text(isolation or settings.isolation)},
    }
    if settings.batch:
        config["dynamic_batching"] = {"max_queue_delay_microseconds": round(settings.max_delay_s * 1e6)}
    if settings.stream:
        config["model_transaction_policy"] = {"decoupled": True}
    fields: list[InputField | OutputField] = [*model.signature.inputs, *model.signature.outputs]
    doc = inspect.getdoc(model.target) or ""
    return _described(config, doc, [(each.name, each) for each in fields])


def pipeline_config(pipeline: Pipeline) -> dict[str, Any]:
    """Return the configuration of a pipeline's ensemble (see `model_config`).

    Raises ModelDefinitionError.
    """
    steps = [
        {
            "model_name": step.model.name,
            "model_version": -1,
            "input_map": dict(step.inputs),
            "output_map": dict(step.outputs),
        }
        for step in pipeline.steps
    ]
    config: dict[str, Any] = {
        "name": pipeline.name,
        "platform": "ensemble",
        "max_batch_size": pipeline.batch(),
        "input": [tensor_config(each._replace(name=name)) for name, each in pipeline.inputs().items()],
        "output": [tensor_config(each._replace(name=name)) for name, each in pipeline.outputs().items()],
        "ensemble_scheduling": {"step": steps},
    }
    if pipeline.streams():
        config["model_transaction_policy"] = {"decoupled": True}
    return _described(config, "", [*pipeline.inputs().items(), *pipeline.outputs().items()])


def _described(
    config: dict[str, Any], doc: str, fields: Sequence[tuple[str, InputField | OutputField]]
) -> dict[str, Any]:
    """Return the configuration with the tensors that hold JSON and the words of the function."""
    documents = [name for name, field in fields if field.kind.is_json]
    parameters = config.setdefault("parameters", {})
    if documents:
        parameters[JSON_TENSORS] = _text(",".join(documents))
    inputs = {name: _argument(field) for name, field in fields if isinstance(field, InputField)}
    words = {"doc": doc[:_LONGEST_DOC], "inputs": inputs}
    parameters[FUNCTION] = _text(json.dumps(words, ensure_ascii=False))
    return config


def _argument(field: InputField) -> dict[str, Any]:
    """Return the hint, default and example of an argument.

    `remora.config.function_arguments` reads them.
    """
    row: dict[str, Any] = {"hint": hint_text(field.hint)}
    if field.default is not NOTHING:
        row["default"] = repr(field.default)[:_LONGEST_DEFAULT]
    if is_image(field.hint):
        row["example"] = {"b64": image_example()}
    elif field.kind.is_json:
        with suppress(NoExampleError):
            row["example"] = json_example(field.hint)
    return row


def _text(value: str) -> dict[str, str]:
    return {"string_value": value}


def _write_config(folder: Path, config: dict[str, Any], *, for_triton: bool = False) -> None:
    """Write a ``config.json``, or for Triton, which reads no JSON, a ``config.pbtxt``."""
    text, name = json.dumps(config, ensure_ascii=False), "config.json"
    if for_triton:
        from remora.config import parse_config, to_text  # imports protobuf, which linked repositories do not need

        text, name = to_text(parse_config(text, path=str(folder / name), syntax="json")), "config.pbtxt"
    (folder / name).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Write a linked repository of one source.

    The third argument names its only model, if it is not empty.

    On failure, print the reason as the last output on stderr.
    """
    directory, source, name = arguments
    try:
        export(Path(directory), [parse_source(source)], linked=True, name=name)
    except ModelDefinitionError as error:
        print(error, file=sys.stderr)
        return 1
    except BaseException as error:  # a file may also call sys.exit
        lines = traceback.format_exception(error)
        own = str(Path(__file__).parent)
        shown: list[Any] = [line for line in lines if own not in line and "importlib" not in line]
        print("".join(shown).rstrip(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
