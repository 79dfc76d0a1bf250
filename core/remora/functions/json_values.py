"""Values of type hints from JSON documents, and JSON values of Python objects.

Invariant: a built value has the type of its hint at every depth. Nothing is converted that JSON can express: an integer
is not a text, and true is not an integer. A whole number is accepted as a float.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np

from remora.functions.errors import BadRequestError, HintError, InvalidFieldError

_MOST_SHOWN = 40
_LONGEST_KEY = 20
"""Digits of a key that becomes an integer: more than any integer of 64 bits has."""


class Checked(NamedTuple):
    """Description of a hint's values for errors, and the function that builds one.

    The function takes the JSON value and its path. It raises InvalidFieldError.
    """

    expected: str
    build: Callable[[Any, str], Any]


def reader_of(hint: Any) -> Callable[[bytes], Any]:
    """Return a function that reads a JSON document as a value of the hint's type.

    Raises HintError for a hint that JSON cannot express. The function raises BadRequestError.
    """
    build = _checked(hint, {}).build

    def read(data: bytes) -> Any:
        try:
            return build(json.loads(data), "")
        except RecursionError:
            raise BadRequestError("the JSON document is nested too deeply") from None
        except BadRequestError:
            raise
        except ValueError as error:
            raise BadRequestError(f"the text is not JSON: {error}") from None

    return read


def json_text(value: Any) -> bytes:
    """Return a value as a JSON document. Raises TypeError and ValueError."""
    return json.dumps(value, default=_plain, ensure_ascii=False).encode()


def _plain(value: Any) -> Any:
    """Return a JSON value for an object that ``json`` does not know."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"{type(value).__name__} is not a JSON value")


# -- hints ------------------------------------------------------------------------------------------------------------

_Known = dict[Any, Checked]
"""Checks by hint, among them those that are still being made: a dataclass may contain itself."""


def _checked(hint: Any, known: _Known) -> Checked:
    """Return the check of a hint. Raises HintError."""
    hint = unwrapped(hint)
    if hint in (Any, object):
        return Checked("a value", lambda value, path: value)
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union([_checked(each, known) for each in _floats_last(arguments)])
    if origin is Literal:
        return _choice({_key(each): each for each in arguments})
    if (origin or hint) in (list, Sequence, Iterable):
        return _list(_checked(arguments[0] if arguments else Any, known))
    if (origin or hint) is tuple:
        return _tuple(arguments, known)
    if (origin or hint) in (dict, Mapping):
        key, member = arguments or (Any, Any)
        return _mapping(key, member, known)
    if isinstance(hint, type):
        if issubclass(hint, enum.Enum):
            return _choice({_key(each.value): each for each in hint})
        found = _of_class(hint, known)
        if found is not None:
            return found
    raise HintError(
        f"{getattr(hint, '__name__', hint)} is not a tensor: use int, float, bool, str, bytes, lists of them, "
        "Array[np.float32, 28, 28], PIL.Image.Image, or dict, a dataclass or a pydantic model for JSON"
    )


def unwrapped(hint: Any) -> Any:
    """Return the type that an annotation, alias or ``NewType`` stands for."""
    while True:
        if get_origin(hint) in (Final, Required, NotRequired) or _is_described(hint):
            hint = get_args(hint)[0]
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # ``type X = ...`` of Python 3.12
            hint = hint.__value__
        else:
            return type(None) if hint is None else hint


def _is_described(hint: Any) -> bool:
    """Return True for a type with texts as its only annotations.

    Others may be constraints, which would not be checked.
    """
    return get_origin(hint) is Annotated and all(isinstance(each, str) for each in hint.__metadata__)


def _of_class(hint: Any, known: _Known) -> Checked | None:
    """Return the check of a class with fields, or None for other classes."""
    if hasattr(hint, "model_validate"):
        return Checked("a JSON object", lambda value, path: _validated(hint.model_validate, value, path))
    validator = getattr(hint, "__pydantic_validator__", None)
    if validator is not None:  # a dataclass of pydantic
        return Checked("a JSON object", lambda value, path: _validated(validator.validate_python, value, path))
    if not (dataclasses.is_dataclass(hint) or is_typeddict(hint)):
        return None
    if hint not in known:
        fields: dict[str, Callable[[Any, str], Any]] = {}
        required: set[str] = set()
        known[hint] = Checked("a JSON object", lambda value, path: _object(hint, fields, required, value, path))
        members = members_of(hint)
        required.update(each.name for each in members if each.required)
        for name, member, _ in members:
            try:
                fields[name] = _checked(member, known).build
            except HintError as error:
                raise HintError(f"{hint.__name__}.{name}: {error}") from None
    return known[hint]


class Member(NamedTuple):
    """A field of a dataclass or TypedDict."""

    name: str
    hint: Any
    required: bool


def members_of(hint: Any) -> list[Member]:
    """Return the fields of a dataclass or TypedDict.

    Raises HintError for a hint that cannot be resolved.
    """
    try:
        hints = get_type_hints(hint, include_extras=True)
    except NameError as error:
        raise HintError(f"a type hint of {hint.__name__} cannot be resolved: {error}") from None
    if is_typeddict(hint):
        return [Member(name, each, _is_required(hint, name, each)) for name, each in hints.items()]
    absent = dataclasses.MISSING
    return [
        Member(each.name, hints[each.name], each.default is each.default_factory is absent)
        for each in dataclasses.fields(hint)
        if each.init
    ]


def _is_required(hint: Any, name: str, member: Any) -> bool:
    """Return True for a required member of a TypedDict.

    Its own set is wrong where hints are texts (PEP 563).
    """
    origin = get_origin(member)
    return origin is Required or (origin is not NotRequired and name in hint.__required_keys__)


def _object(
    hint: Any, fields: Mapping[str, Callable[[Any, str], Any]], required: set[str], value: Any, path: str
) -> Any:
    """Build a dataclass or TypedDict."""
    if not isinstance(value, dict):
        raise InvalidFieldError(f"expected a JSON object, got {_shown(value)}", path)
    unknown = next((name for name in value if name not in fields), None)
    if unknown is not None:
        from difflib import get_close_matches  # imported here because only an error needs it

        close = get_close_matches(unknown, fields, 1)
        known = f"did you mean '{close[0]}'?" if close else f"there is {', '.join(fields) or 'none'}"
        raise InvalidFieldError(f"there is no field '{unknown[:_MOST_SHOWN]}'; {known}", path)
    missing = next((name for name in fields if name in required and name not in value), None)
    if missing is not None:
        raise InvalidFieldError(f"the field '{missing}' is missing", path)
    built = {name: fields[name](each, f"{path}.{name}" if path else name) for name, each in value.items()}
    return built if is_typeddict(hint) else _validated(lambda members: hint(**members), built, path)


def _validated(validate: Callable[[Any], Any], value: Any, path: str) -> Any:
    """Return ``validate(value)``, whose ValueError is the client's.

    Pydantic and ``__post_init__`` raise it.
    """
    try:
        return validate(value)
    except BadRequestError:
        raise
    except ValueError as error:
        raise InvalidFieldError(str(error), path) from None


def _list(item: Checked) -> Checked:
    def build(value: Any, path: str) -> Any:
        if not isinstance(value, list):
            raise InvalidFieldError(f"expected a list, got {_shown(value)}", path)
        return [item.build(each, f"{path}[{index}]") for index, each in enumerate(value)]

    return Checked("a list", build)


def _tuple(arguments: tuple[Any, ...], known: _Known) -> Checked:
    if not arguments or Ellipsis in arguments:
        members = _list(_checked(arguments[0] if arguments else Any, known))
        return Checked("a list", lambda value, path: tuple(members.build(value, path)))
    items = [_checked(each, known) for each in arguments]
    expected = f"a list of {len(items)} values"

    def build(value: Any, path: str) -> Any:
        if not isinstance(value, list) or len(value) != len(items):
            shown = f"{len(value)}" if isinstance(value, list) else _shown(value)
            raise InvalidFieldError(f"expected {expected}, got {shown}", path)
        return tuple(
            item.build(each, f"{path}[{index}]") for index, (item, each) in enumerate(zip(items, value, strict=True))
        )

    return Checked(expected, build)


def _mapping(key: Any, member: Any, known: _Known) -> Checked:
    keys, members = _checked_key(key, known), _checked(member, known)

    def build(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise InvalidFieldError(f"expected a JSON object, got {_shown(value)}", path)
        return {
            keys(name, path): members.build(each, f"{path}.{name[:_MOST_SHOWN]}" if path else name[:_MOST_SHOWN])
            for name, each in value.items()
        }

    return Checked("a JSON object", build)


def _checked_key(hint: Any, known: _Known) -> Callable[[str, str], Any]:
    """Return the check of the names of an object.

    Raises HintError for keys that no name stands for.
    """
    hint = unwrapped(hint)
    if hint is int:
        return _integer_key
    if hint in (Any, object, str) or get_origin(hint) is Literal or (isinstance(hint, type) and issubclass(hint, str)):
        return _checked(hint, known).build
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _checked(hint, known).build
    raise HintError(f"a dict with keys of {getattr(hint, '__name__', hint)} is not JSON: use str or int")


def _integer_key(name: str, path: str) -> int:
    digits = name.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _LONGEST_KEY):
        raise InvalidFieldError(f"expected an integer as key, got {_shown(name)}", path)
    return int(name)


def _choice(choices: Mapping[Any, Any]) -> Checked:
    """Return the check of a Literal or Enum by its values and their keys."""
    values = ", ".join(_shown(value) for _, value in choices)
    expected = f"one of {values}" if len(choices) > 1 else values

    def build(value: Any, path: str) -> Any:
        if isinstance(value, list | dict) or _key(value) not in choices:
            raise InvalidFieldError(f"expected {expected}, got {_shown(value)}", path)
        return choices[_key(value)]

    return Checked(expected, build)


def _key(value: Any) -> tuple[type, Any]:
    """Return a key that differs for 1, 1.0 and true, which are equal in Python."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is not None and not isinstance(value, str | int | float):
        raise HintError(f"{value!r} is not a choice that JSON can express: use texts and numbers")
    return type(value), value


def _floats_last(hints: Iterable[Any]) -> list[Any]:
    """Return the members of a union with float last, because it also accepts whole numbers."""
    return sorted(hints, key=lambda hint: unwrapped(hint) is float)


def _union(members: Sequence[Checked]) -> Checked:
    expected = " or ".join(dict.fromkeys(each.expected for each in members))

    def build(value: Any, path: str) -> Any:
        deepest: InvalidFieldError | None = None
        for member in members:
            try:
                return member.build(value, path)
            except InvalidFieldError as error:
                if not _is_mismatch(error, path, member) and (deepest is None or len(error.path) > len(deepest.path)):
                    deepest = error
        raise deepest or InvalidFieldError(f"expected {expected}, got {_shown(value)}", path)

    return Checked(expected, build)


def _is_mismatch(error: InvalidFieldError, path: str, member: Checked) -> bool:
    """Return True if the value itself is of another type, False if a part of it is wrong."""
    return error.path == path and error.reason.startswith(f"expected {member.expected}, got ")


# -- scalars ----------------------------------------------------------------------------------------------------------


def _integer(value: Any, path: str) -> int:
    if type(value) is not int:
        raise InvalidFieldError(f"expected an integer, got {_shown(value)}", path)
    return value


def _number(value: Any, path: str) -> float:
    if type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if math.isinf(value):
            raise InvalidFieldError("expected a number, got an integer that is too large", path)
    if type(value) is not float:
        raise InvalidFieldError(f"expected a number, got {_shown(value)}", path)
    return value


def _truth(value: Any, path: str) -> bool:
    if type(value) is not bool:
        raise InvalidFieldError(f"expected true or false, got {_shown(value)}", path)
    return value


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidFieldError(f"expected a text, got {_shown(value)}", path)
    return value


def _null(value: Any, path: str) -> None:
    if value is not None:
        raise InvalidFieldError(f"expected null, got {_shown(value)}", path)


_SCALARS: Mapping[Any, Checked] = {
    int: Checked("an integer", _integer),
    float: Checked("a number", _number),
    bool: Checked("true or false", _truth),
    str: Checked("a text", _text),
    type(None): Checked("null", _null),
}


def _shown(value: Any) -> str:
    """Return a value for an error: its JSON if that is short, else what it is."""
    if isinstance(value, list):
        return (
            json.dumps(value)
            if len(value) < 3 and not any(isinstance(each, list | dict) for each in value)
            else (f"a list of {len(value)} values")
        )
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a large integer"  # Python refuses to print integers of more than 4,300 digits
    if isinstance(value, str) and len(value) > _MOST_SHOWN:
        value = value[:_MOST_SHOWN] + "..."
    return json.dumps(value, ensure_ascii=False)
