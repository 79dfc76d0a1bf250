"""The state that a model leaves to the server [S13]: given with a request, taken from its answer. Pure.

Laws:

1. A request gets the state as the one before it in its sequence left it; the first gets the initial one.
2. An answer without a state's output, an error, or an output that does not fit leaves the state as it was.
3. What was given once is never written to again: an answer may hold views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from remora.backends import Execution, Instance
from remora.config import SequenceState
from remora.errors import InternalError, RemoraError
from remora.messages import DTYPES, Array, Outcome, Request, Response, Streamed, Tensor


class _ShapeKey(NamedTuple):
    """What may share a batch, when states vary in shape: the request's own key, and the shapes of its states."""

    own: object
    states: tuple[tuple[int, ...], ...]


class States:
    """Gives and takes the states of all sequences of one model; each sequence's are kept in a dictionary of its own.

    Args:
        states: as configured.
        initial: by the name of the model's input; read-only.
        declared: the outputs that clients may ask for; states that are not among them are never shown.
        batches: whether the model's tensors have a batch dimension.
    """

    def __init__(
        self, states: Sequence[SequenceState], initial: Mapping[str, Array], declared: Sequence[str], *, batches: bool
    ) -> None:
        self._initial = {state.input_name: initial[state.input_name] for state in states}
        self._by_output = {state.output_name: state for state in states}
        self._declared = frozenset(declared)
        self._skip = 1 if batches else 0
        self._vary = any(dim < 0 for state in states for dim in state.dims)

    def give(self, request: Request, kept: dict[str, Array]) -> None:
        """Put the states into a request's inputs, and their outputs among those that it wants."""
        states = {name: kept.get(name, begin) for name, begin in self._initial.items()}
        request.states = kept
        request.inputs.update(states)
        request.requested += tuple(name for name in self._by_output if name not in request.requested)
        if self._vary:
            key = request.shape_key
            own = key.own if isinstance(key, _ShapeKey) else key
            request.shape_key = _ShapeKey(own, tuple(array.shape for array in states.values()))

    def take(self, request: Request, outcome: Outcome) -> Outcome:
        """The outcome as the client may see it; the sequence's states are renewed by it."""
        if isinstance(outcome, Streamed):
            if not isinstance(outcome.outcome, Response):
                return outcome
            seen = self.take(request, outcome.outcome)
            assert not isinstance(seen, Streamed)
            return outcome._replace(outcome=seen)
        if isinstance(outcome, RemoraError) or request.states is None:  # a null request has none
            return outcome
        renewed: dict[str, Array] = {}
        shown: list[Tensor] = []
        wanted = {output.name for output in request.form.outputs} or self._declared
        for tensor in outcome.outputs:
            state = self._by_output.get(tensor.name)
            if state is not None:
                misfit = self._misfit(state, tensor)
                if misfit:
                    return InternalError(misfit, from_model=True)
                renewed[state.input_name] = _kept(tensor.data)
            if tensor.name in wanted:
                shown.append(tensor)
        request.states.update(renewed)
        outcome.outputs = shown
        return outcome

    def _misfit(self, state: SequenceState, tensor: Tensor) -> str:
        """Why an output cannot be the state; empty when it can."""
        shape = tensor.data.shape
        own = shape[self._skip :]
        fits = (
            shape[: self._skip] == (1,) * self._skip
            and len(own) == len(state.dims)
            and all(dim in (-1, size) for dim, size in zip(state.dims, own, strict=True))
        )
        if fits and tensor.data.dtype == DTYPES[state.datatype]:
            return ""
        return (
            f"output state '{state.output_name}' is {tensor.datatype} of shape {list(shape)}, but its state has "
            f"data_type {state.datatype} and dims {list(state.dims)}"
            f"{' behind a batch dimension of 1' if self._skip else ''}: the state stays as it was before this request"
        )


def _kept(array: Array) -> Array:
    """A copy that lasts: an output may be a row of a larger one, lie in shared memory, or be its model's to change."""
    copied = array.copy()
    copied.flags.writeable = False
    return copied


class StatefulInstance:
    """An instance of a model with states: renews them from all that it answers, streamed or not."""

    __slots__ = ("_inner", "_states", "name", "quick")

    def __init__(self, inner: Instance, states: States) -> None:
        self._inner = inner
        self._states = states
        self.name = inner.name
        self.quick = inner.quick

    def execute(self, execution: Execution) -> Sequence[Outcome | None]:
        """Run the batch; see ``Instance.execute``."""
        requests = execution.requests
        execution.send = partial(self._send, execution.send, requests)
        execution.send_soon = partial(self._send, execution.send_soon, requests)
        outcomes = self._inner.execute(execution)
        if len(outcomes) != len(requests):
            return outcomes  # the scheduler refuses them
        return [
            outcome if outcome is None else self._states.take(request, outcome)
            for request, outcome in zip(requests, outcomes, strict=True)
        ]

    def _send(
        self, send: Callable[[int, Streamed], None], requests: Sequence[Request], index: int, streamed: Streamed
    ) -> None:
        shown = self._states.take(requests[index], streamed)
        assert isinstance(shown, Streamed)
        send(index, shown)

    def close(self) -> None:
        """Close the instance itself."""
        self._inner.close()
