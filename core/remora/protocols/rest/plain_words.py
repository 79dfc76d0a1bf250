"""Errors in words about the client's own values, for all routes that are not Triton's. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from remora.calls import TensorInfo
from remora.errors import FAILED_EXECUTION, ID_PREFIX, InvalidArgumentError, RemoraError, error_of
from remora.messages import DTYPES

_MOST_SHOWN = 40
_VALUES = {"b": ("true or false", "truth values"), "i": ("an integer", "integers"), "u": ("an integer", "integers")}
_NUMBERS = ("a number", "numbers")
_TEXTS = ("a text", "texts")


def value_words(datatype: str) -> str:
    """Return what one element of a tensor is, such as ``an integer``."""
    return _words(datatype)[0]


def values_words(datatype: str) -> str:
    """Return what several elements of a tensor are, such as ``integers``."""
    return _words(datatype)[1]


def _words(datatype: str) -> tuple[str, str]:
    if datatype == "BYTES":
        return _TEXTS
    return _NUMBERS if datatype == "BF16" else _VALUES.get(DTYPES[datatype].kind, _NUMBERS)


def check_type(row: TensorInfo, flat: list[Any], kinds: set[type], accepted: set[type]) -> None:
    """Raise InvalidArgumentError for the first JSON value of another type."""
    if kinds - accepted:
        wrong = next(value for value in flat if type(value) not in accepted)
        raise InvalidArgumentError(f"input '{row.name}': expected {value_words(row.datatype)}, got {shown(wrong)}")


def check_shape(row: TensorInfo, shape: tuple[int, ...]) -> None:
    """Raise InvalidArgumentError for values of another shape than the input has."""
    wanted = tuple(row.shape)
    if len(shape) == len(wanted) and all(want in (-1, size) for want, size in zip(wanted, shape, strict=True)):
        return
    values = values_words(row.datatype)
    if len(shape) != len(wanted):
        raise InvalidArgumentError(
            f"input '{row.name}': expected {values} of shape {_dims(wanted)}, got shape {list(shape)}"
        )
    if all(want in (-1, size) for want, size in zip(wanted[:-1], shape[:-1], strict=True)):
        whole, part = ("takes", "here are") if len(shape) == 1 else ("each row has", "this one has")
        one = values if wanted[-1] != 1 else values.removesuffix("s")
        raise InvalidArgumentError(f"input '{row.name}': {whole} {wanted[-1]} {one}, {part} {shape[-1]}")
    first = 1 if wanted[0] == -1 else 0
    raise InvalidArgumentError(
        f"input '{row.name}': expected {values} of shape {_dims(wanted[first:])}{' in each row' if first else ''}, got "
        f"{list(shape[first:])}"
    )


def _dims(shape: tuple[int, ...]) -> str:
    return f"[{', '.join('any' if size < 0 else str(size) for size in shape)}]"


def shown(value: Any) -> str:
    """Return a JSON value for an error: its text if that is short, else what it is."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_FAILED = re.compile(re.escape(FAILED_EXECUTION).replace(re.escape("{}"), "(.*?)"), re.DOTALL)
_TRACEBACK = re.compile(r"\n+At:\n.*", re.DOTALL)


def in_plain_words(error: RemoraError, model: str) -> RemoraError:
    """Return an error without the prefixes of Triton and the places in the model's code.

    It is the error itself if it has none of them.
    """
    text = ID_PREFIX.sub("", error.message, count=1)
    failed = _FAILED.fullmatch(text)
    if failed is not None:
        text = f"model '{model}' failed: {_TRACEBACK.sub('', failed[2])}"
    if text == error.message:
        return error
    plain = error_of(error.code, text, from_model=error.from_model, answered=error.answered)
    plain.retry_after_s = error.retry_after_s
    return plain


def names_code(error: RemoraError) -> bool:
    """Return True if the error's text has places in the model's code.

    The log alone should show them.
    """
    return _TRACEBACK.search(error.message) is not None
