"""Warmup samples, run on every instance of a model before it serves [K06].

Each instance gets a separate scheduler for the warmup, so that batches are formed, run, answered and counted as later
ones are.

Invariant: a failed sample fails the load with Triton's text: the sample's name and the reason of each request, or only
the reason if the sample is not a valid request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np

from remora.backends import Execution, Instance, runs_user_code
from remora.config import BatchPolicy, dtype_name, read_data
from remora.errors import ConfigError, InvalidArgumentError, RemoraError, UnavailableError
from remora.messages import DTYPES, Array, Data, InferForm, InputSpec, Outcome, Streamed, Ticket
from remora.models.served_model import ServedModel
from remora.proto.model_config_pb2 import ModelConfig, ModelWarmup
from remora.scheduling.batching import BatchQueue, Plan
from remora.scheduling.pool import DispatchPolicy
from remora.scheduling.scheduler import Scheduler
from remora.statistics import ModelStatistics
from remora.statistics.recorder import StatisticsRecorder
from remora.system.clock import Clock

INPUT_LIMIT_BYTES = 1 << 30
"""Maximum size of one input of a sample in memory."""

DERIVED_LIMIT_BYTES = 16 << 20
"""Maximum size of all inputs of a derived sample, which must be cheap."""

DERIVED_ROUNDS = 3
"""The first run of a model is the slowest; the cost model needs two more to approach the usual time."""

_ELEMENT_BYTES = 8  # a reference, the minimum size of a BYTES element
_SEED = 0
_REQUEST_ID = "[request id: <id_unknown>]"  # Triton's text for a request without an id


class WarmupSample(NamedTuple):
    """A request to run ``rounds`` times before the model serves, ``batch_size`` copies at once.

    ``form`` and ``data`` are what a client would send. ``extra`` has arrays for inputs that clients cannot send, such
    as the controls of a sequence batcher, in the model's shape.
    """

    name: str
    batch_size: int
    rounds: int
    form: InferForm
    data: tuple[Data, ...]
    extra: dict[str, Array]


def samples_of(config: ModelConfig, read: Callable[[str], bytes]) -> list[WarmupSample]:
    """Return the samples of a complete and valid configuration.

    Args:
        config: its ``model_warmup`` is read.
        read: returns the content of a file named by ``input_data_file``.

    Raises:
        ConfigError: a batch the model cannot run, dims that are not fixed, an unknown datatype, an input too large, a
            file too short; with Triton's text where it has one. Errors of ``read`` are not caught.
    """
    return [_sample(config, warmup, read) for warmup in config.model_warmup if warmup.batch_size]


def derived_sample(config: ModelConfig) -> WarmupSample | None:
    """Return a sample of one row of zeros, or None.

    Only models with fixed dims and numeric inputs have one. Sequences would begin with it, a decoupled model may never
    end, the meaning of empty text is unknown, and more than DERIVED_LIMIT_BYTES is not cheap: these get no sample.
    """
    if config.HasField("sequence_batching") or config.model_transaction_policy.decoupled:
        return None
    batch = (1,) if config.max_batch_size > 0 else ()
    specs: list[InputSpec] = []
    for row in config.input:
        if row.optional:
            continue
        datatype = dtype_name(row.data_type)
        if datatype == "BYTES" or any(dim < 0 for dim in row.dims):
            return None
        specs.append(InputSpec(row.name, datatype, (*batch, *row.dims)))
    if not specs or sum(math.prod(spec.shape) * DTYPES[spec.datatype].itemsize for spec in specs) > DERIVED_LIMIT_BYTES:
        return None
    data = tuple(np.zeros(spec.shape, DTYPES[spec.datatype]) for spec in specs)
    return WarmupSample("derived from the configuration", 1, DERIVED_ROUNDS, InferForm(tuple(specs)), data, {})


def _sample(config: ModelConfig, warmup: ModelWarmup, read: Callable[[str], bytes]) -> WarmupSample:
    most = max(config.max_batch_size, 1)
    if warmup.batch_size > most:
        raise ConfigError(
            f"warmup sample '{warmup.name}' has batch_size {warmup.batch_size}, but max_batch_size is "
            f"{config.max_batch_size}: give it at most {most}"
        )
    batch = (1,) if config.max_batch_size > 0 else ()
    declared = {row.name for row in config.input}
    specs: list[InputSpec] = []
    data: list[Data] = []
    extra: dict[str, Array] = {}
    for name, tensor in sorted(warmup.inputs.items()):  # sorted because a protobuf map has no order
        where = f"input '{name}' of warmup sample '{warmup.name}'"
        spec = _spec(name, tensor, batch, where)
        piece = _data(spec, tensor, read)
        if name in declared:
            specs.append(spec)
            data.append(piece)
        else:
            extra[name] = _array(spec, piece, where)
    return WarmupSample(
        warmup.name, warmup.batch_size, max(warmup.count, 1), InferForm(tuple(specs)), tuple(data), extra
    )


def _spec(name: str, tensor: ModelWarmup.Input, batch: tuple[int, ...], where: str) -> InputSpec:
    if not tensor.data_type:
        raise ConfigError(f"{where} has no data_type: name that of the model's input, such as TYPE_FP32")
    datatype = dtype_name(tensor.data_type)
    if any(dim < 0 for dim in tensor.dims):
        raise ConfigError(f"warmup setting expects all variable-size dimensions are specified for input '{name}'")
    size = math.prod(tensor.dims) * max(DTYPES[datatype].itemsize, _ELEMENT_BYTES if datatype == "BYTES" else 1)
    if size > INPUT_LIMIT_BYTES:
        raise ConfigError(f"{where} takes {size} bytes; the limit is {INPUT_LIMIT_BYTES}")
    return InputSpec(name, datatype, (*batch, *tensor.dims))


def _data(spec: InputSpec, tensor: ModelWarmup.Input, read: Callable[[str], bytes]) -> Data:
    kind = tensor.WhichOneof("input_data_type")
    if kind == "zero_data":
        return _zeros(spec)
    if kind == "random_data":
        return _random(spec)
    if kind != "input_data_file":
        raise ConfigError(f"{_REQUEST_ID} warmup setting expects input '{spec.name}' to have input_data_type set")
    content = read(tensor.input_data_file)
    if spec.datatype == "BYTES":
        return content  # in wire format; the request check counts its elements
    wanted = math.prod(spec.shape) * DTYPES[spec.datatype].itemsize
    if len(content) < wanted:
        raise ConfigError(  # the missing blank is Triton's
            f"{_REQUEST_ID} warmup setting expects {wanted} bytes, but the data provided from {tensor.input_data_file}"
            f"only has {len(content)} bytes"
        )
    return memoryview(content)[:wanted]


def _zeros(spec: InputSpec) -> Array:
    if spec.datatype == "BYTES":
        return np.full(spec.shape, b"", object)
    return np.zeros(spec.shape, DTYPES[spec.datatype])


def _random(spec: InputSpec) -> Array:
    """Return plausible values, the same each time.

    They are fractions of 1, small integers or short words.
    """
    random = np.random.default_rng(_SEED)
    datatype, dtype = spec.datatype, DTYPES[spec.datatype]
    if datatype == "BYTES":
        words = np.empty(math.prod(spec.shape), object)
        words[:] = [bytes(random.integers(97, 123, 8, np.uint8)) for _ in range(words.size)]
        return words.reshape(spec.shape)
    if datatype == "BOOL":
        return random.integers(0, 2, spec.shape, np.uint8).astype(np.bool_)
    if datatype == "BF16":  # the upper half of a float's bits
        return np.asarray(random.random(spec.shape, np.float32).view(np.uint32) >> 16).astype(dtype)
    if dtype.kind == "f":
        return random.random(spec.shape, np.float32).astype(dtype)
    return random.integers(0, 128, spec.shape, np.uint8).astype(dtype)


def _array(spec: InputSpec, piece: Data, where: str) -> Array:
    """Return the array of an input that the signature lacks."""
    if isinstance(piece, np.ndarray):
        return piece
    if spec.datatype == "BYTES":
        raise ConfigError(f"{where} is made by the server: BYTES from a file are for the model's own inputs")
    return np.ndarray(spec.shape, DTYPES[spec.datatype], piece)  # type: ignore[arg-type]  # bytes, cut to size


_log = logging.getLogger("remora.models")

WARMUP = "warmup"
"""The dispatch reason of these executions in the statistics."""

ANSWER_LIMIT_S = 600
"""Time limit of a sample, so that a model that never answers does not stay in LOADING for ever."""

_STOP_LIMIT_S = 5
_LONG_NS = 10**15


def warm_up(
    model: ServedModel, instances: Sequence[Instance], directory: Path, clock: Clock, *, derive: bool = False
) -> None:
    """Run the model's samples on each instance. Their files are in ``directory``/warmup.

    With ``derive``, a model without samples whose instances run no user code runs a derived sample; if that fails, a
    warning is logged and the model serves.

    Raises RemoraError if a sample cannot be made or fails.
    """

    def read(name: str) -> bytes:
        return read_data(directory / "warmup", name, "warmup input_data_file", INPUT_LIMIT_BYTES)

    for warmup in model.config.model_warmup:
        if not warmup.batch_size:
            _log.warning("warmup sample '%s' of model '%s' has no batch_size: it is not run", warmup.name, model.name)
    for sample in samples_of(model.config, read):
        for instance in instances:
            _run(model, instance, sample, clock)
    if derive and instances and not model.config.model_warmup and not any(map(runs_user_code, instances)):
        derived = derived_sample(model.config)
        if derived is not None:
            try:
                for instance in instances:
                    _run(model, instance, derived, clock)
            except RemoraError as error:
                _log.warning("model '%s' serves although its derived warmup failed: %s", model.name, error)


class _WarmupRecorder(StatisticsRecorder):
    """Recorder that counts executions under the reason WARMUP."""

    __slots__ = ("_ended",)

    def __init__(self, statistics: ModelStatistics, clock: Clock, ended: SimpleQueue[RemoraError | None]) -> None:
        super().__init__(statistics, clock)
        self._ended = ended

    def executed(
        self, plan: Plan, execution: Execution, outcomes: Sequence[Outcome | None], start_ns: int, end_ns: int
    ) -> None:
        super().executed(plan._replace(reason=WARMUP), execution, outcomes, start_ns, end_ns)
        for _ in execution.rescheduled:  # an iterative sequence would continue with another execution; warmup runs one
            self._ended.put(None)


def _run(model: ServedModel, instance: Instance, sample: WarmupSample, clock: Clock) -> None:
    """Run one sample on one instance.

    Raises InvalidArgumentError with the reasons of failed requests, or the error of an invalid request itself.
    """
    # Only a full batch is dispatched, so the requests of a round run together however slowly they are submitted.
    policy = BatchPolicy(max_batch_size=sample.batch_size, dynamic=True, max_delay_ns=_LONG_NS)
    ended: SimpleQueue[RemoraError | None] = SimpleQueue()
    scheduler = Scheduler(
        BatchQueue(policy),
        [instance],
        model.signature,
        _WarmupRecorder(model.statistics, clock, ended),
        clock,
        DispatchPolicy(may_wait=True, decoupled=model.decoupled),
    )
    try:
        for _ in range(sample.rounds):
            _run_round(model, scheduler, sample, ended)
    finally:
        scheduler.stop(_STOP_LIMIT_S)
    for rows, ns in scheduler.costs.curve().items():
        model.scheduler.costs.learn(rows, round(ns))


def _run_round(
    model: ServedModel, scheduler: Scheduler, sample: WarmupSample, ended: SimpleQueue[RemoraError | None]
) -> None:
    def reply(_ticket: Ticket, outcome: Outcome) -> None:
        streamed = outcome if isinstance(outcome, Streamed) else Streamed(outcome, final=True)
        if streamed.final:
            ended.put(streamed.outcome if isinstance(streamed.outcome, RemoraError) else None)

    requests = [model.signature.request(sample.form, sample.data) for _ in range(sample.batch_size)]
    for request in requests:
        request.inputs.update({**model.initial_states, **sample.extra})
    for request in requests:
        scheduler.submit(Ticket(request, reply))
    failures = [failure for failure in [_next(ended) for _ in requests] if failure is not None]
    if failures:
        reasons = "".join(f"{failure}; " for failure in failures)
        raise InvalidArgumentError(f"failed to run warmup sample '{sample.name}': {reasons}")


def _next(ended: SimpleQueue[RemoraError | None]) -> RemoraError | None:
    try:
        return ended.get(timeout=ANSWER_LIMIT_S)
    except Empty:
        return UnavailableError(f"there was no answer within {ANSWER_LIMIT_S} s")
