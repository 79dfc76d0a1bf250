"""Implicit sequence state, added to requests and updated from responses [S13].

Invariants:

1. A request gets the state that the previous request of its sequence left; the first gets the initial state.
2. A response without a state's output, an error, or an output that does not fit leaves the state unchanged.
3. A state array is never modified once it was given to a request, because a response may hold views of it.
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
    """Batching key for states of variable shape: the request's own key and the state shapes."""

    own: object
    states: tuple[tuple[int, ...], ...]


class States:
    """Implicit states of all sequences of one model.

    Each sequence has a separate dictionary.

    Args:
        states: as configured.
        initial: by the name of the model's input; read-only.
        declared: the outputs that clients may request; states not among them are never sent.
        batches: True if the model's tensors have a batch dimension.
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
        """Add the states to a request's inputs, and their outputs to its requested outputs."""
        states = {name: kept.get(name, begin) for name, begin in self._initial.items()}
        request.states = kept
        request.inputs.update(states)
        request.requested += tuple(name for name in self._by_output if name not in request.requested)
        if self._vary:
            key = request.shape_key
            own = key.own if isinstance(key, _ShapeKey) else key
            request.shape_key = _ShapeKey(own, tuple(array.shape for array in states.values()))

    def take(self, request: Request, outcome: Outcome) -> Outcome:
        """Update the sequence's states from an outcome and return the outcome for the client."""
        if isinstance(outcome, Streamed):
            if not isinstance(outcome.outcome, Response):
                return outcome
            seen = self.take(request, outcome.outcome)
            assert not isinstance(seen, Streamed)
            return outcome._replace(outcome=seen)
        if isinstance(outcome, RemoraError) or request.states is None:  # a null request has no states
            return outcome
        renewed: dict[str, Array] = {}
        shown: list[Tensor] = []
        wanted = {output.name for output in request.form.outputs} or self._declared
        for tensor in outcome.outputs:
            state = self._by_output.get(tensor.name)
            if state is not None:
                mismatch = self._mismatch(state, tensor)
                if mismatch:
                    return InternalError(mismatch, from_model=True)
                renewed[state.input_name] = _kept(tensor.data)
            if tensor.name in wanted:
                shown.append(tensor)
        request.states.update(renewed)
        outcome.outputs = shown
        return outcome

    def _mismatch(self, state: SequenceState, tensor: Tensor) -> str:
        """Return why an output cannot be the state, or "" if it can."""
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
            f"{' behind a batch dimension of 1' if self._skip else ''}: the state of the sequence is unchanged"
        )


def _kept(array: Array) -> Array:
    """Return a read-only copy.

    An output may be a row of a larger array, lie in shared memory, or be reused by its model.
    """
    copied = array.copy()
    copied.flags.writeable = False
    return copied


class StatefulInstance:
    """Instance wrapper that updates the states from all responses, streamed or not."""

    __slots__ = ("_inner", "_states", "name", "quick")

    def __init__(self, inner: Instance, states: States) -> None:
        self._inner = inner
        self._states = states
        self.name = inner.name
        self.quick = inner.quick

    def execute(self, execution: Execution) -> Sequence[Outcome | None]:
        requests = execution.requests
        execution.send = partial(self._send, execution.send, requests)
        execution.send_soon = partial(self._send, execution.send_soon, requests)
        outcomes = self._inner.execute(execution)
        if len(outcomes) != len(requests):
            return outcomes  # the scheduler reports the mismatch
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
        self._inner.close()
