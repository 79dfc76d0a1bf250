"""Classification extension, which returns class strings in place of output values [X06]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from remora.errors import InvalidArgumentError, RemoraError
from remora.messages import Array, Outcome, OutputSpec, Reply, Response, Streamed, Tensor, Ticket

_CLASS_LIMIT = 1_000_000
"""Maximum number of results of an output, each of which is a text."""
_UNSUPPORTED = frozenset({"BYTES", "BOOL", "FP16", "BF16"})


def classify_replies(reply: Reply, labels_of: Callable[[str], Sequence[str]], *, batches: bool) -> Reply:
    """Return a reply that classifies the outputs of each response before it calls ``reply``.

    ``labels_of`` returns the lines of an output's label file; ``batches`` as for `classify`.
    """

    def classified(ticket: Ticket, response: Response) -> Response | RemoraError:
        wanted = ticket.request.form.outputs
        labels = {output.name: labels_of(output.name) for output in wanted if output.classes}
        return classify(response, wanted, labels, batches=batches)

    def reply_classified(ticket: Ticket, outcome: Outcome) -> None:
        if isinstance(outcome, Streamed):
            if isinstance(outcome.outcome, Response):
                outcome = Streamed(classified(ticket, outcome.outcome), outcome.final)
        elif isinstance(outcome, Response):
            outcome = classified(ticket, outcome)
        reply(ticket, outcome)

    return reply_classified


def classify(
    response: Response, wanted: Sequence[OutputSpec], labels: Mapping[str, Sequence[str]], *, batches: bool
) -> Response | RemoraError:
    """Return the response with each output that requested classes replaced by its top classes.

    ``labels`` holds the lines of each output's label file; ``batches`` is True if the first dimension is the batch.
    Returns InvalidArgumentError for an output without values, of a type without an order, or with too many results.
    """
    classes = {output.name: output.classes for output in wanted if output.classes > 0}
    outputs: list[Tensor] = []
    for tensor in response.outputs:
        count = classes.get(tensor.name, 0)
        if not count:
            outputs.append(tensor)
            continue
        if tensor.datatype in _UNSUPPORTED:
            return InvalidArgumentError(
                f"class result not available for output due to unsupported type '{tensor.datatype}'", from_model=True
            )
        if not tensor.data.size:
            return InvalidArgumentError(f"class result not available for output '{tensor.name}': it has no values")
        rows = len(tensor.data) if batches and tensor.data.ndim else 1
        results = min(count * rows, tensor.data.size)
        if results > _CLASS_LIMIT:
            return InvalidArgumentError(
                f"classification of output '{tensor.name}' has {results} results; the limit is {_CLASS_LIMIT}: request "
                "fewer classes"
            )
        outputs.append(_classified(tensor, count, labels.get(tensor.name, ()), batches))
    return Response(outputs, response.parameters)


def _classified(tensor: Tensor, count: int, labels: Sequence[str], batches: bool) -> Tensor:
    data = tensor.data
    rows = data.reshape(data.shape[0], -1) if batches and data.ndim else data.reshape(1, -1)
    count = min(count, rows.shape[1])
    best = np.argsort(-rows.astype(np.longdouble), axis=1, kind="stable")[:, :count]
    texts = np.empty((len(rows), count), object)
    for row, indices in enumerate(best):
        for place, index in enumerate(indices):
            texts[row, place] = _class_text(rows[row, index], int(index), labels)
    return Tensor(tensor.name, "BYTES", texts if batches and data.ndim else texts.reshape(-1))


def _class_text(value: Array, index: int, labels: Sequence[str]) -> bytes:
    """Return ``<value>:<index>[:<label>]``.

    Floats have six decimals, as std::to_string prints them.
    """
    number = f"{float(value):f}" if value.dtype.kind == "f" else str(int(value))
    label = labels[index] if index < len(labels) else ""
    return f"{number}:{index}{':' + label if label else ''}".encode()
