"""Ragged batches, whose inputs of unequal lengths are concatenated as flat arrays.

Pure but for `RaggedInstance`. A ragged input reaches the model as one flat array of all its elements, even for a single
request, because a model is built for one rank. The tensors of ``batch_input`` are computed from the shapes of the
source inputs; a ``batch_output`` is cut by them [K07].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from remora.backends import Execution, Instance
from remora.backends.arrays import ArrayInstance, Run, gather, scatter
from remora.config import dtype_name
from remora.errors import InternalError
from remora.messages import DTYPES, Array, Outcome, Request, Response, Tensor
from remora.proto.model_config_pb2 import BatchInput, ModelConfig
from remora.tensors.device import DeviceId

Shape = tuple[int, ...]


class MadeInput(NamedTuple):
    """Tensor computed from the shapes of ``source`` in a batch.

    The model receives it under each of ``names``.
    """

    kind: int
    names: tuple[str, ...]
    dtype: np.dtype[Any]
    source: str


class CutOutput(NamedTuple):
    """Output that is cut by the shapes of ``source``.

    ``dims`` are its configured ones; -1 is taken from the source.
    """

    source: str
    dims: Shape


class RaggedPlan(NamedTuple):
    """Ragged parts of a configuration.

    ``plain`` inputs are joined by rows, ``ragged`` ones flat.
    """

    plain: tuple[str, ...]
    ragged: tuple[str, ...]
    made: tuple[MadeInput, ...]
    cut: Mapping[str, CutOutput]
    batches: bool


def ragged_plan(config: ModelConfig) -> RaggedPlan | None:
    """Return the plan of a complete and valid configuration, or None if nothing in it is ragged."""
    ragged = tuple(row.name for row in config.input if row.allow_ragged_batch)
    if not (ragged or config.batch_input or config.batch_output):
        return None
    dims = {row.name: tuple(row.reshape.shape if row.HasField("reshape") else row.dims) for row in config.output}
    made = tuple(
        MadeInput(row.kind, tuple(row.target_name), DTYPES[dtype_name(row.data_type)], row.source_input[0])
        for row in config.batch_input
    )
    cut = {
        name: CutOutput(row.source_input[0], dims.get(name, ()))
        for row in config.batch_output
        for name in row.target_name
    }
    plain = [row.name for row in config.input if not row.allow_ragged_batch]
    plain += [row.name for row in config.sequence_batching.control_input]
    plain += [row.input_name for row in config.sequence_batching.state]
    return RaggedPlan(tuple(dict.fromkeys(plain)), ragged, made, cut, config.max_batch_size > 0)


def batch_tensor(kind: int, shapes: Sequence[Shape], dtype: np.dtype[Any], *, batches: bool) -> Array:
    """Return the tensor of a ``batch_input`` for requests whose source inputs have ``shapes``.

    With ``batches`` the first dimension of each shape is its rows: it counts among the elements, and the two kinds of
    item shapes omit it and repeat the rest for each row.
    """
    counts = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    if kind == BatchInput.BATCH_ELEMENT_COUNT:
        return np.array(counts, dtype)
    if kind == BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT:
        return np.array(list(accumulate(counts)), dtype)
    if kind == BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
        return np.array(list(accumulate(counts, initial=0)), dtype)
    if kind == BatchInput.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE:
        return np.zeros(max(counts, default=0), dtype)  # only its length matters
    items = [shape[1:] for shape in shapes for _ in range(shape[0])] if batches else list(shapes)
    table = np.array(items, dtype).reshape(len(items), -1)
    return table.ravel() if kind == BatchInput.BATCH_ITEM_SHAPE_FLATTEN else table


def gather_ragged(plan: RaggedPlan, requests: Sequence[Request]) -> dict[str, Array]:
    """Return the inputs of a batch.

    Ragged inputs are flat, the others are joined by rows, and the tensors made of shapes are added.

    Raises:
        InternalError: a request lacks the optional source input of a ``batch_input``.
    """
    inputs = {name: array for name, array in gather(requests, plan.plain).items() if name not in plan.ragged}
    for name in plan.ragged:
        if name in requests[0].inputs:
            inputs[name] = np.concatenate([request.inputs[name].reshape(-1) for request in requests])
    for made in plan.made:
        tensor = batch_tensor(made.kind, _shapes(requests, made.source), made.dtype, batches=plan.batches)
        for name in made.names:
            inputs[name] = tensor
    return inputs


def scatter_ragged(plan: RaggedPlan, outputs: Sequence[Tensor], requests: Sequence[Request]) -> list[Response]:
    """Return one response for each request.

    Outputs of ``batch_output`` are cut by the shape of their source input, the others by rows.

    Raises:
        InternalError: an output has more or fewer elements than the batch's shapes require.
    """
    whole = [tensor for tensor in outputs if tensor.name not in plan.cut]
    shares = [{tensor.name: tensor for tensor in response.outputs} for response in _scattered(plan, whole, requests)]
    for tensor in outputs:
        if tensor.name in plan.cut:
            pieces = cut_by_shape(tensor, plan.cut[tensor.name], requests, batches=plan.batches)
            for share, piece in zip(shares, pieces, strict=True):
                share[tensor.name] = piece
    return [
        Response([share[tensor.name] for tensor in outputs if tensor.name in request.requested])
        for share, request in zip(shares, requests, strict=True)
    ]


def _scattered(plan: RaggedPlan, whole: Sequence[Tensor], requests: Sequence[Request]) -> list[Response]:
    if not whole:
        return [Response([]) for _ in requests]
    return scatter(whole, requests, batches=plan.batches)


def cut_by_shape(tensor: Tensor, cut: CutOutput, requests: Sequence[Request], *, batches: bool) -> list[Tensor]:
    """Return one output's elements for each request, as views shaped by its source input."""
    shapes = [_cut_shape(cut.dims, shape, batches=batches) for shape in _shapes(requests, cut.source)]
    ends = list(accumulate(int(np.prod(shape, dtype=np.int64)) for shape in shapes))
    flat = tensor.data.reshape(-1)
    if ends[-1] != flat.size:
        raise InternalError(
            f"output '{tensor.name}' has {flat.size} elements, but the shapes of input '{cut.source}' in this batch of "
            f"{len(requests)} require {ends[-1]}: see batch_output in the model's configuration",
            from_model=True,
        )
    return [
        Tensor(tensor.name, tensor.datatype, flat[begin:end].reshape(shape))
        for begin, end, shape in zip([0, *ends], ends, shapes, strict=False)
    ]


def _cut_shape(dims: Shape, source: Shape, *, batches: bool) -> Shape:
    """Return ``dims`` with each variable dim taken from the same position of the source's shape."""
    batch, own = (source[:1], source[1:]) if batches else ((), source)
    return (*batch, *(own[at] if dim < 0 and at < len(own) else max(dim, 1) for at, dim in enumerate(dims)))


def _shapes(requests: Sequence[Request], name: str) -> list[Shape]:
    try:
        return [request.inputs[name].shape for request in requests]
    except KeyError:
        raise InternalError(
            f"the batch needs the shape of input '{name}', which a request left out: it is the source_input of a "
            "batch_input or batch_output, so it must not be optional",
            from_model=True,
        ) from None


def array_instance(
    name: str,
    config: ModelConfig,
    run: Run,
    *,
    quick: bool = False,
    staying: Run | None = None,
    devices: frozenset[DeviceId] = frozenset(),
    close: Callable[[], None] | None = None,
    gpu: int | None = None,
) -> Instance:
    """Return the instance over ``run`` that a complete configuration requires.

    Ragged batches are assembled in main memory. ``gpu`` is the number of the GPU that the instance runs on.
    """
    if gpu is not None:
        from remora.backends.gpu_health import GpuInstance, health_of  # imported only on machines with a GPU

        health = health_of(gpu)
        run, staying = health.guarded(run), None if staying is None else health.guarded(staying)
        inner = array_instance(name, config, run, staying=staying, devices=devices, close=close)
        return GpuInstance(inner, health)
    plan = ragged_plan(config)
    if plan is None:
        return ArrayInstance(name, config, run, quick=quick, staying=staying, devices=devices, close=close)
    return RaggedInstance(name, config, plan, run, quick=quick, close=close)


class RaggedInstance(ArrayInstance):
    """``Instance`` over a function from arrays to arrays, with ragged inputs or batch tensors.

    Args:
        name: as for `ArrayInstance`; so are the others.
        config: complete.
        plan: from `ragged_plan`.
        run: as ``arrays.Run``.
        quick: as in ``Instance``.
        close: as for `ArrayInstance`.
    """

    __slots__ = ("_plan",)

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        plan: RaggedPlan,
        run: Run,
        *,
        quick: bool = False,
        close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(name, config, run, quick=quick, close=close)
        self._plan = plan

    def execute(self, execution: Execution) -> list[Outcome]:
        """Run the requests (``Instance.execute``)."""
        requests = execution.requests
        if len(requests) > 1 and not self._plan.batches:
            return [self._alone(execution, request) for request in requests]
        try:
            return list(self._answers(execution, requests))
        except Exception:  # any failure: the single runs below show which requests cause it
            if len(requests) == 1:
                raise
        return [self._alone(execution, request) for request in requests]

    def _answer(self, execution: Execution, request: Request) -> Response:
        return self._answers(execution, (request,))[0]

    def _answers(self, execution: Execution, requests: Sequence[Request]) -> list[Response]:
        inputs = gather_ragged(self._plan, requests)
        execution.input_end_ns = execution.input_end_ns or self._clock()
        outputs = self._run(inputs, self._wanted(requests))
        execution.output_start_ns = self._clock()
        return scatter_ragged(self._plan, outputs, requests)
