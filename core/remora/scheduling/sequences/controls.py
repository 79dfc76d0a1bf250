"""Control tensors that describe a request's position in its sequence [S09, S10].

Clients never send them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from remora.config import SequenceControl
from remora.errors import InvalidArgumentError, about
from remora.messages import DTYPES, Array, Request, Ticket


class Controls:
    """Source of the control tensors of one model.

    Args:
        controls: as configured.
        batches: True if the model's tensors have a batch dimension; controls are then ``[1, 1]``, else ``[1]``.
        model: its name, for error texts.
    """

    def __init__(self, controls: Sequence[SequenceControl], batches: bool, model: str) -> None:
        self._shape = (1, 1) if batches else (1,)
        self._model = model
        self._flags = [
            (control.name, control.kind, tuple(self._full(control.datatype, value) for value in control.false_true))
            for control in controls
            if control.kind != "CORRID"
        ]
        self._ids = [control for control in controls if control.kind == "CORRID"]

    def check(self, request: Request) -> None:
        """Raise InvalidArgumentError if the id's type is not the one that the model takes [S10]."""
        sequence_id = request.form.sequence_id
        if not sequence_id:
            return  # `SequenceTable` refuses requests without an id
        for control in self._ids:
            if isinstance(sequence_id, str) != (control.datatype == "BYTES"):
                given = "BYTES" if isinstance(sequence_id, str) else "UINT64"
                raise InvalidArgumentError(
                    about(
                        request.form.id,
                        f"sequence batching control '{control.name}' data-type is '{given}', but model "
                        f"'{self._model}' expects '{control.datatype}'",
                    )
                )

    def add(self, request: Request, *, start: bool, end: bool, ready: bool = True) -> None:
        """Add the controls to a request's inputs, replacing inputs of the same names."""
        given = {"START": start, "END": end, "READY": ready}
        for name, kind, arrays in self._flags:
            request.inputs[name] = arrays[given[kind]]
        for control in self._ids:
            request.inputs[control.name] = self._id(control.datatype, request.form.sequence_id)

    def null(self, like: Request) -> Ticket:
        """Return the ticket that fills an empty slot [S07].

        Its inputs have the shapes of ``like``, all zero and not ready.
        """
        inputs = {name: _zeros(array) for name, array in like.inputs.items()}
        text = any(control.datatype == "BYTES" for control in self._ids)
        form = replace(like.form, id="", sequence_id="" if text else 0, sequence_start=False, sequence_end=False)
        request = Request(form, inputs, like.requested, like.rows, like.shape_key)
        self.add(request, start=False, end=False, ready=False)
        return Ticket(request, _ignore_answer, context=NULL)

    def _id(self, datatype: str, sequence_id: int | str) -> Array:
        if datatype == "BYTES":
            return self._full(datatype, str(sequence_id).encode("utf-8", "surrogateescape"))
        dtype = DTYPES[datatype]
        number = sequence_id if isinstance(sequence_id, int) else 0
        cut = (number & ((1 << 8 * dtype.itemsize) - 1)).to_bytes(dtype.itemsize, "little")
        return np.frombuffer(cut, dtype).reshape(self._shape)

    def _full(self, datatype: str, value: object) -> Array:
        array = np.empty(self._shape, DTYPES[datatype])
        array.fill(value)
        array.flags.writeable = False  # because all requests share the array
        return array


def _zeros(array: Array) -> Array:
    zeros = np.zeros(array.shape, array.dtype)
    if zeros.dtype == object:
        zeros.fill(b"")
    return zeros


def _ignore_answer(_ticket: object, _outcome: object) -> None:
    """Reply of null requests."""


NULL = object()
"""Context that identifies null tickets."""
