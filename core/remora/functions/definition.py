"""Definitions of models (a function or class, signature, settings) and of pipelines.

``pipeline = tokenize >> classify`` connects tensors of equal names, or the only output with the only input. For other
graphs, ``Pipeline(tokenize.wire(text="text", output="ids"), classify.wire(x="ids"))`` names the pipeline's tensors.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints, is_typeddict, overload

from remora.functions.errors import HintError
from remora.functions.hints import Kind, kind_of, row_hint

Isolation = Literal["process", "thread"]
Device = Literal["auto", "cpu", "gpu"]

_STREAMS = (Iterator, Iterable, Generator, AsyncIterator, AsyncIterable, AsyncGenerator)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_METHODS = ("predict", "__call__")
_ONE_REQUEST = "a stream answers one request: remove batch= or the stream"


class ModelDefinitionError(TypeError):
    """Function, class or setting that cannot become a model."""


NOTHING: Any = inspect.Parameter.empty


class InputField(NamedTuple):
    """An argument of the function as an input tensor.

    ``hint`` is the type hint of one row, and ``default`` the value of an optional argument; NOTHING if unknown.
    """

    name: str
    kind: Kind
    optional: bool
    hint: Any = NOTHING
    default: Any = NOTHING


class OutputField(NamedTuple):
    """A result of the function as an output tensor."""

    name: str
    kind: Kind


def tensor_config(field: InputField | OutputField) -> dict[str, Any]:
    """Return the field as an input or output of a configuration."""
    datatype = "STRING" if field.kind.datatype == "BYTES" else field.kind.datatype
    tensor = {"name": field.name, "data_type": f"TYPE_{datatype}", "dims": list(field.kind.dims)}
    return tensor | {"optional": True} if isinstance(field, InputField) and field.optional else tensor


class Signature(NamedTuple):
    """Inputs and outputs of a model.

    ``pack`` converts the function's result to the values of the outputs, in their order. ``stream`` is True if the
    function returns an iterator of results.
    """

    inputs: tuple[InputField, ...]
    outputs: tuple[OutputField, ...]
    pack: Callable[[Any], tuple[Any, ...]]
    stream: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a model.

    Attributes:
        batch: number of rows that the function takes at once; 0 for a function that takes one request.
        max_delay_s: how long a request waits for others to share its batch, in seconds.
        instances: how many copies of the model run in parallel.
        isolation: ``process`` gives each instance a process, ``thread`` a thread of the server.
        stream: the function returns an iterator, and each of its values is one response.
        concurrency: how many calls of an ``async`` function run at once in one instance.
        device: where the model runs: ``auto`` for a GPU if the machine has one.
    """

    batch: int = 0
    max_delay_s: float = 0.0
    instances: int = 1
    isolation: Isolation = "process"
    stream: bool = False
    concurrency: int = 64
    device: Device = "auto"


class Model:
    """A function or class as a model.

    Calling it calls the function, or creates an object of the class.

    Attributes:
        name: the model's name.
        target: the function or class.
        settings: see `Settings`.
        signature: inputs and outputs; by default those of the type hints.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        name: str,
        settings: Settings,
        setup: Callable[[], Any] | None = None,
        signature: Signature | None = None,
    ) -> None:
        self.target = target
        self.name = name
        self._setup = setup
        self._method = _method_of(target, name) if isinstance(target, type) else ""
        function = self._function()
        self.is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        self.settings = settings
        _check(self)
        try:
            skipped = 1 if self._method or setup else 0
            self.signature = signature or signature_of(
                function, skipped, batched=settings.batch > 0, stream=settings.stream
            )
        except HintError as error:
            raise ModelDefinitionError(f"{self.described()}: {error}") from None
        self.settings = dataclasses.replace(settings, stream=self.signature.stream)
        if self.settings.stream and settings.batch:
            raise ModelDefinitionError(f"{self.described()}: {_ONE_REQUEST}")
        self.__doc__ = target.__doc__
        self.__name__ = getattr(target, "__name__", name)
        self.__wrapped__ = target

    def _function(self) -> Callable[..., Any]:
        return getattr(self.target, self._method) if self._method else self.target

    def described(self) -> str:
        """Return the model's name with the file and line of its code, for errors."""
        code = getattr(self._function(), "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        return f"model '{self.name}'{place}"

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.target(*arguments, **named)

    def __rshift__(self, other: Any) -> Pipeline:
        return Pipeline(self).__rshift__(other)

    def wire(self, **tensors: str) -> Step:
        """Return this model as a step of a `Pipeline`, with the pipeline's names of its tensors."""
        return _wire(self, tensors)

    def __repr__(self) -> str:
        return f"<remora.Model {self.name}>"

    def open(self, device: str) -> Callable[..., Any]:
        """Load the model and return the function that runs it.

        A class is created, and its ``setup(device)`` is called if it has one. A function with ``setup`` gets its
        result as the first argument.

        Args:
            device: ``cpu`` or ``cuda:N``.
        """
        if self._method:
            instance = self.target()
            setup = getattr(instance, "setup", None)
            if setup is not None:
                setup(device)
            bound: Callable[..., Any] = getattr(instance, self._method)
            return bound
        if self._setup is None:
            return self.target
        state, target = self._setup(), self.target
        return lambda **arguments: target(state, **arguments)


@overload
def model(target: Callable[..., Any], /) -> Model: ...
@overload
def model(
    *,
    name: str = ...,
    batch: int = ...,
    max_delay: float | str = ...,
    instances: int = ...,
    isolation: Isolation = ...,
    stream: bool = ...,
    concurrency: int = ...,
    device: Device = ...,
    setup: Callable[[], Any] | None = ...,
) -> Callable[[Callable[..., Any]], Model]: ...
def model(
    target: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    batch: int = 0,
    max_delay: float | str = 0.0,
    instances: int = 1,
    isolation: Isolation = "process",
    stream: bool = False,
    concurrency: int = 64,
    device: Device = "auto",
    setup: Callable[[], Any] | None = None,
    **unknown: Any,
) -> Any:
    """Make a model of a function or class, as a decorator with or without settings.

    Args:
        target: the function, or a class with a method ``predict`` or ``__call__``.
        name: the model's name; by default that of the function or class.
        batch: if positive, requests are batched dynamically, and the function takes up to this number of rows at once:
            arrays with a leading batch dimension, or lists.
        max_delay: how long a request waits for others to share its batch, in seconds or as text such as "2ms".
        instances: how many copies of the model run in parallel.
        isolation: ``process`` gives each instance a process, ``thread`` a thread of the server.
        stream: the function returns an iterator of responses. Generator functions need no flag.
        concurrency: how many calls of an ``async`` function run at once in one instance.
        device: ``auto``, ``cpu`` or ``gpu``.
        setup: called once for each instance; its result is the function's first argument.
        unknown: refused with the nearest setting.

    Raises:
        ModelDefinitionError: the function or a setting cannot become a model.
    """
    if unknown:
        raise ModelDefinitionError(_unknown_setting(next(iter(unknown))))
    settings = Settings(batch, seconds(max_delay), instances, isolation, stream, concurrency, device)

    def decorate(function: Callable[..., Any]) -> Model:
        if not callable(function):
            raise ModelDefinitionError(f"@remora.model needs a function or a class, got {type(function).__name__}")
        return Model(function, name or getattr(function, "__name__", ""), settings, setup)

    return decorate if target is None else decorate(target)


def _unknown_setting(name: str) -> str:
    from difflib import get_close_matches  # imported here because only an error needs it

    known = ("name", *(each.name.removesuffix("_s") for each in dataclasses.fields(Settings)), "setup")
    close = get_close_matches(name, known, 1)
    return f"@remora.model has no setting '{name}'; " + (
        f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    )


def seconds(duration: float | str) -> float:
    """Return a duration in seconds; a text needs a unit (us, ms or s).

    Raises ModelDefinitionError.
    """
    if isinstance(duration, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(us|ms|s)\s*", duration)
        if match is None:
            raise ModelDefinitionError(f"max_delay={duration!r}: expected seconds, or a text such as '2ms' or '500us'")
        return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]
    return duration


def _method_of(target: type, name: str) -> str:
    own = {name for kind in target.__mro__ for name in vars(kind)}  # every class also has its metaclass's __call__
    method = next((each for each in _METHODS if each in own), "")
    if not method:
        raise ModelDefinitionError(f"class '{target.__name__}' of model '{name}' has no method predict or __call__")
    return method


def _check(model: Model) -> None:
    """Raise ModelDefinitionError for invalid settings."""
    settings = model.settings
    wrong = [
        (not _NAME.fullmatch(model.name), f"'{model.name}' is not a model name: use letters, digits, '_', '.' and '-'"),
        (not 0 <= settings.batch < 1 << 31, f"batch={settings.batch}: expected a number of rows, 0 for no batching"),
        ((settings.stream or _is_generator(model._function())) and settings.batch > 0, _ONE_REQUEST),
        (settings.instances < 1, f"instances={settings.instances}: expected 1 or more"),
        (settings.concurrency < 1, f"concurrency={settings.concurrency}: expected 1 or more"),
        (not 0 <= settings.max_delay_s < 3600, f"max_delay={settings.max_delay_s}: expected 0 to 3600 seconds"),
        (bool(settings.max_delay_s) and not settings.batch, "max_delay needs batch=N"),
        (
            settings.isolation not in get_args(Isolation),
            f"isolation={settings.isolation!r}: expected process or thread",
        ),
        (settings.device not in get_args(Device), f"device={settings.device!r}: expected auto, cpu or gpu"),
    ]
    for is_wrong, text in wrong:
        if is_wrong:
            raise ModelDefinitionError(f"{model.described()}: {text}")


def _is_generator(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def signature_of(function: Callable[..., Any], skipped: int, *, batched: bool, stream: bool) -> Signature:
    """Return the tensors of a function.

    Args:
        function: the function; ``skipped`` of its first parameters are not inputs.
        batched: hints describe a batch.
        stream: the function returns an iterator of results, also without such a hint.

    Raises HintError, also for parameters without a name (``*args``).
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise HintError(f"a type hint cannot be resolved: {error}; import the name at the top of the file") from None
    parameters = list(inspect.signature(function).parameters.values())[skipped:]
    inputs = tuple(_input(each, hints, batched) for each in parameters)
    result = hints.get("return", Any)
    iterates = get_origin(result) in _STREAMS or result in _STREAMS
    stream = stream or iterates or _is_generator(function)
    if stream:
        result = get_args(result)[0] if iterates and get_args(result) else Any
    outputs, pack = _outputs(result, batched and not stream)
    return Signature(inputs, outputs, pack, stream)


def _input(parameter: inspect.Parameter, hints: Mapping[str, Any], batched: bool) -> InputField:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise HintError(f"parameter '{parameter.name}' has no fixed name; name each input, or take one dict")
    try:
        kind = _kind(hints.get(parameter.name, Any), batched)
    except HintError as error:
        raise HintError(f"parameter '{parameter.name}': {error}") from None
    hint = row_hint(hints.get(parameter.name, Any), batched=batched)
    return InputField(parameter.name, kind, parameter.default is not NOTHING, hint, parameter.default)


def _kind(hint: Any, batched: bool) -> Kind:
    return kind_of(list if batched and hint is Any else hint, batched=batched)


def _outputs(hint: Any, batched: bool) -> tuple[tuple[OutputField, ...], Callable[[Any], tuple[Any, ...]]]:
    """Return the outputs of a return hint, and the conversion of a result to their values."""
    if hint is type(None):
        raise HintError("the function returns None: annotate what it answers")
    named = _named_fields(hint)
    try:
        if named:
            outputs = tuple(OutputField(name, _kind(each, batched)) for name, each in named.items())
            names = tuple(named)
            return outputs, lambda result: _by_name(result, names)
        if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
            kinds = [_kind(each, batched) for each in get_args(hint)]
            outputs = tuple(OutputField(f"output{index}", kind) for index, kind in enumerate(kinds))
            return outputs, lambda result: _exactly(result, len(outputs))
        return (OutputField("output", _kind(hint, batched)),), lambda result: (result,)
    except HintError as error:
        raise HintError(f"result: {error}") from None


def _named_fields(hint: Any) -> dict[str, Any]:
    """Return the fields of a NamedTuple or TypedDict, each of which is an output."""
    if isinstance(hint, type) and (is_typeddict(hint) or (issubclass(hint, tuple) and hasattr(hint, "_fields"))):
        return get_type_hints(hint, include_extras=True)
    return {}


def _by_name(result: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    if isinstance(result, Mapping):
        missing = [name for name in names if name not in result]
        if missing:
            raise ValueError(f"the result has no '{missing[0]}'")
        return tuple(result[name] for name in names)
    return _exactly(result, len(names))


def _exactly(result: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(result, tuple | list) or len(result) != count:
        shown = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise ValueError(f"expected a tuple of {count} values, got {shown}")
    return tuple(result)


# -- pipelines -------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A model in a pipeline, and the pipeline's tensor of each of its inputs and outputs."""

    model: Model
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


class Pipeline:
    """Graph of models that is served as one model.

    Args:
        steps: models, or steps made by `Model.wire`.
        name: the name of the model; by default that of the variable that holds the pipeline.
    """

    def __init__(self, *steps: Model | Step, name: str = "") -> None:
        self.name = name
        self.steps = tuple(step if isinstance(step, Step) else _wire(step, {}) for step in steps)

    def __rshift__(self, other: Any) -> Pipeline:
        if isinstance(other, Pipeline):
            result = self
            for step in other.steps:
                result = result >> step.model
            return result
        if not isinstance(other, Model):
            return NotImplemented
        last = self.steps[-1]
        number = len(self.steps)
        names = _connections(last.model, other)
        # Tensors between two steps get a prefix, so that they never equal an input of the pipeline.
        joined = last._replace(outputs={name: f"{number}.{name}" for name in last.outputs})
        inputs = {each.name: f"{number}.{names[each.name]}" for each in other.signature.inputs if each.name in names}
        outputs = {each.name: each.name for each in other.signature.outputs}
        return Pipeline(*self.steps[:-1], joined, Step(other, inputs, outputs), name=self.name)

    def models(self) -> tuple[Model, ...]:
        """Return the models of the steps, each once."""
        return tuple(dict.fromkeys(step.model for step in self.steps))

    def batch(self) -> int:
        """Return the largest batch that all steps take, 0 if they take none.

        Raises ModelDefinitionError if only some of the steps batch, because the shapes of their tensors then differ.
        """
        sizes = [step.model.settings.batch for step in self.steps]
        if any(sizes) and not all(sizes):
            without = next(step.model.name for step in self.steps if not step.model.settings.batch)
            raise ModelDefinitionError(f"pipeline '{self.name}': its other models batch; give '{without}' batch= too")
        return min(sizes)

    def streams(self) -> bool:
        """Return True if a step answers with a stream."""
        return any(step.model.settings.stream for step in self.steps)

    def inputs(self) -> dict[str, InputField]:
        """Return the tensors that no step produces, by name."""
        made = {tensor for step in self.steps for tensor in step.outputs.values()}
        found: dict[str, InputField] = {}
        for step in self.steps:
            fields = {each.name: each for each in step.model.signature.inputs}
            for name, tensor in step.inputs.items():
                if tensor not in made:
                    found.setdefault(tensor, fields[name])
        return found

    def outputs(self) -> dict[str, OutputField]:
        """Return the tensors that no step consumes, by name."""
        used = {tensor for step in self.steps for tensor in step.inputs.values()}
        found: dict[str, OutputField] = {}
        for step in self.steps:
            fields = {each.name: each for each in step.model.signature.outputs}
            found |= {tensor: fields[name] for name, tensor in step.outputs.items() if tensor not in used}
        return found


def _wire(model: Model, tensors: Mapping[str, str]) -> Step:
    """Return a step with the pipeline's tensors as inputs and outputs; others keep their names.

    Raises ModelDefinitionError for a name that the model does not have.
    """
    inputs = {each.name: tensors.get(each.name, each.name) for each in model.signature.inputs}
    outputs = {each.name: tensors.get(each.name, each.name) for each in model.signature.outputs}
    unknown = sorted(tensors.keys() - inputs.keys() - outputs.keys())
    if unknown:
        known = ", ".join([*inputs, *outputs])
        raise ModelDefinitionError(f"model '{model.name}' has no input or output '{unknown[0]}'; it has {known}")
    return Step(model, inputs, outputs)


def _connections(first: Model, second: Model) -> dict[str, str]:
    """Return the output of the first model for each input of the second.

    Raises ModelDefinitionError.
    """
    outputs = [each.name for each in first.signature.outputs]
    required = [each.name for each in second.signature.inputs if not each.optional]
    inputs = [each.name for each in second.signature.inputs]
    if set(required) <= set(outputs):
        return {name: name for name in inputs if name in outputs}
    if len(outputs) == 1 and len(required) == 1:
        return {required[0]: outputs[0]}
    raise ModelDefinitionError(
        f"cannot connect '{first.name}' with '{second.name}': {', '.join(outputs)} -> {', '.join(inputs)}; use "
        "Pipeline(first.wire(...), second.wire(...)) to name the tensors between them"
    )


__all__ = [
    "InputField",
    "Model",
    "ModelDefinitionError",
    "OutputField",
    "Pipeline",
    "Settings",
    "Signature",
    "Step",
    "model",
    "seconds",
    "signature_of",
    "tensor_config",
]
