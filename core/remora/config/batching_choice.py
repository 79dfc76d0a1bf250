"""Choice of batching for a model whose configuration sets no batch size.

Pure. A wrong choice would mix the rows of several clients in one computation, so each doubt means no batching: the
model then runs every request alone, and its clients send the same shapes as before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

VARIABLE = -1

_BATCH_WORDS = frozenset(["batch", "batches", "batchsize", "nbatch", "minibatch", "b", "n", "bs", "bsz", "bsize"])
"""Words that name a batch axis; its name may contain `_FILLERS` beside them."""

_FILLERS = frozenset(
    ["size", "dim", "dimension", "axis", "num", "nb", "number", "of", "mini", "dyn", "dynamic", "sz", "max"]
)

_GENERATED = re.compile(
    r"unk__\d+|unknown\w*|none|\?|-1|sym\w*\d+|[su]\d+|dim_?\d+|\w*dynamic_axes_\d+|\w+_dim_\d+|DynamicDimension\.\d+",
    re.IGNORECASE,
)
"""Names that exporters (tf2onnx, torch, OpenVINO) generate for an axis without a name."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_]+")


class Tensor(Protocol):
    """A model's declaration of an input or output, with -1 for variable dims."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Trial(Enum):
    """Result of running two rows together and each alone."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNKNOWN = "unknown"
    """The model could not be run on generated values, or gives other outputs in each run."""


class BatchingChoice(NamedTuple):
    """Choice for one model; ``reason`` is a clause that follows "because"."""

    batched: bool
    reason: str

    def sentence(self, max_rows: int) -> str:
        """Return the choice and its reason for a log, an explanation or a comment."""
        if self.batched:
            return (
                f"requests are batched up to {max_rows} rows, although no max_batch_size is configured, because "
                f"{self.reason}"
            )
        return f"requests are not batched, because {self.reason}; set max_batch_size to batch them"


def has_batch_axis(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Return True if the first axis of every input and output varies."""
    return all(tensor.shape and tensor.shape[0] == VARIABLE for tensor in (*inputs, *outputs))


def choose_batching(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], axes: Mapping[str, str], trial: Callable[[], Trial]
) -> BatchingChoice:
    """Decide whether requests of several clients may share a run of the model.

    Args:
        inputs: the inputs that the configuration feeds.
        outputs: the outputs.
        axes: the names that the file gives to the first axes of tensors; unnamed ones are absent or empty.
        trial: runs the model; called only if the names allow batching.
    """
    tensors = {tensor.name: tensor for tensor in (*inputs, *outputs)}
    for tensor in tensors.values():
        if not tensor.shape or tensor.shape[0] != VARIABLE:
            size = f"has the size {tensor.shape[0]}" if tensor.shape else "does not exist"
            return BatchingChoice(False, f"the first axis of '{tensor.name}' {size}")
    named = {name: axis for name in tensors if (axis := axes.get(name, "")) and not _GENERATED.fullmatch(axis)}
    for name, axis in named.items():
        if not means_batch(axis):
            return BatchingChoice(False, f"the first axis of '{name}' is named '{axis}', which does not mean a batch")
    first = next(iter(named.items()), ("", ""))
    for name, axis in named.items():
        if axis != first[1]:
            return BatchingChoice(
                False, f"the first axis of '{first[0]}' is named '{first[1]}', and that of '{name}' '{axis}'"
            )
    result = trial()
    if result is Trial.DIFFERENT:
        return BatchingChoice(False, "two rows together give other results than each row alone")
    where = f"is named '{first[1]}'" if len(named) == len(tensors) else "varies"
    if result is Trial.EQUAL:
        return BatchingChoice(
            True, f"the first axis of every input and output {where} and two rows together give what each gives alone"
        )
    if len(named) == len(tensors):
        return BatchingChoice(True, f"the first axis of every input and output {where}")
    return BatchingChoice(
        False,
        "the file does not name the first axis of every input and output, and the model does not run on generated "
        "values that would show whether rows are independent",
    )


def means_batch(axis: str) -> bool:
    """Return True if the name of an axis means independent rows, such as "batch_size" or "N"."""
    words = [word.lower() for word in _WORD.findall(axis)]
    if re.search(r"[*+/]", axis) or not words:
        return False
    return any(word in _BATCH_WORDS for word in words) and all(word in _BATCH_WORDS | _FILLERS for word in words)
