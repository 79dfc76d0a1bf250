"""Conformance kit for backends, usable from any test runner.

    from remora.testing.backend import Example, check_backend

    check_backend(MyBackend(), Example(model_dir, inputs={"x": rows}, outputs={"y": expected}))

Each check is a function of a backend and an example, and raises AssertionError with a sentence that names the fault.
``CHECKS`` lists them, for runners that want one test for each. docs/backends.md explains the contract.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from remora.backends import API_VERSION, Backend, BackendModel, Execution, Instance, Source
from remora.config import Placement, find_config, infer_backend, normalise, placements, read_config, validate
from remora.errors import RemoraError
from remora.messages import DTYPES, Array, InferForm, InputSpec, Outcome, Request, Response, Streamed
from remora.proto.model_config_pb2 import ModelConfig

_CYCLES = 8
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Example:
    """A model, a request and the expected response.

    Args:
        model_dir: the model's directory: ``1/`` with its files, and ``config.pbtxt`` unless the model implies
            everything.
        inputs: the arrays of one request, batch dimension first if the model batches. It then needs at least two rows,
            because a check splits the batch.
        outputs: the expected outputs. BYTES are object arrays of ``bytes``.
        bad_inputs: an optional request with the same number of rows that fits the configuration and that the model
            refuses.
        rtol: relative tolerance for floating point outputs; with 0 and ``atol`` 0 they must be equal.
        atol: absolute tolerance.
        settings: the backend's ``--backend-config`` pairs.
        cpus: number of processors that the model may use.
    """

    model_dir: Path
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    bad_inputs: Mapping[str, Array] | None = None
    rtol: float = 1e-5
    atol: float = 1e-6
    settings: Mapping[str, str] = field(default_factory=dict)
    cpus: int = 2


class Opened(NamedTuple):
    """A model as opened by the engine: the model with its complete configuration."""

    model: BackendModel
    config: ModelConfig

    def instance(self, index: int = 0) -> Instance:
        """Return a new instance with the placement of the configuration's first one."""
        placement = (placements(self.config) or (Placement(self.config.name),))[0]
        return self.model.instance(self.config, placement._replace(name=f"{self.config.name}_{index}"))


@contextmanager
def opened(backend: Backend, example: Example) -> Any:
    """Open, complete and validate the example's model as the engine does, then close it."""
    made = open_model(backend, example)
    try:
        yield made
    finally:
        made.model.close()


def open_model(backend: Backend, example: Example) -> Opened:
    """Return the example's model as opened by the engine. The caller closes ``model``.

    Raises what the backend raises.
    """
    source, config = source_of(example)
    model = backend.open(source, config)
    try:
        model.complete(config)
        normalise(config, source.name)
        validate(config, source.name)
    except BaseException:
        model.close()
        raise
    return Opened(model, config)


def source_of(example: Example) -> tuple[Source, ModelConfig]:
    """Return the arguments of `Backend.open`.

    They are the newest version of the example's model, and its configuration as written.
    """
    directory = example.model_dir
    versions = sorted((path for path in directory.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    assert versions, f"{directory} has no version directory such as 1/"
    version = versions[-1]
    written = find_config(directory, "")
    config = read_config(written) if written is not None else ModelConfig()
    config.name = config.name or directory.name
    infer_backend(config, config.name, [path.name for path in version.iterdir()])
    source = Source(
        config.name, int(version.name), directory, version, directory.parent, dict(example.settings), example.cpus
    )
    return source, config


LATE_S = 30.0
"""Maximum time between the end of an execution and a late answer, in seconds."""


def request_of(inputs: Mapping[str, Array], requested: Sequence[str], *, batches: bool = True) -> Request:
    """Return a request as passed to an instance, with read-only arrays."""
    frozen = {}
    for name, array in inputs.items():
        view = array.view()
        view.flags.writeable = False
        frozen[name] = view
    rows = next(iter(inputs.values())).shape[0] if batches and inputs else 1
    specs = tuple(InputSpec(name, "", array.shape) for name, array in inputs.items())
    return Request(InferForm(specs), frozen, tuple(requested), rows, None)


def run(instance: Instance, *requests: Request) -> list[Outcome | None]:
    """Return the outcomes of one execution, late answers included.

    Raises what the instance raises.
    """
    late: SimpleQueue[tuple[int, Streamed]] = SimpleQueue()

    def send(index: int, streamed: Streamed) -> None:
        late.put((index, streamed))

    execution = Execution(requests, send)
    outcomes = list(instance.execute(execution))
    for _ in execution.late:
        index, streamed = late.get(timeout=LATE_S)
        outcomes[index] = streamed.outcome
    assert len(outcomes) == len(requests), f"{len(requests)} requests got {len(outcomes)} outcomes"
    return outcomes


# -- The checks -------------------------------------------------------------------------------------------------------


def check_it_speaks_this_api(backend: Backend, example: Example) -> None:
    """Check the backend's name and the major version of its ``api_version``, if present."""
    assert isinstance(getattr(backend, "name", None), str), "the backend needs a name, which configurations refer to"
    major = str(getattr(backend, "api_version", API_VERSION)).partition(".")[0]
    assert major == API_VERSION.partition(".")[0], f"the backend is written for API {major}, this is {API_VERSION}"


def check_completing_twice_changes_nothing(backend: Backend, example: Example) -> None:
    """Check that completing a complete configuration does not change it."""
    with opened(backend, example) as made:
        again = ModelConfig()
        again.CopyFrom(made.config)
        made.model.complete(again)
        assert again == made.config, f"complete() changed a complete configuration:\n{again}"


def check_a_request_is_answered(backend: Backend, example: Example) -> None:
    """Check the values and the types of the response to one request."""
    with opened(backend, example) as made:
        instance = made.instance()
        _expect(_answer(made, instance, example.inputs, example), example.outputs, example)
        instance.close()


def check_only_what_is_requested_comes_back(backend: Backend, example: Example) -> None:
    """Check that a request for one output gets only that output."""
    with opened(backend, example) as made:
        instance = made.instance()
        for name in example.outputs:
            (outcome,) = run(instance, request_of(example.inputs, (name,), batches=made.config.max_batch_size > 0))
            names = [tensor.name for tensor in _response(outcome).outputs]
            assert names == [name], f"'{name}' was requested, {names} were returned"
        instance.close()


def check_a_batch_is_cut_at_its_requests(backend: Backend, example: Example) -> None:
    """Check that requests of unequal sizes in a batch each get their own rows."""
    with opened(backend, example) as made:
        if not made.config.max_batch_size:
            return
        rows = next(iter(example.inputs.values())).shape[0]
        assert rows > 1, "give the example two rows or more"
        instance = made.instance()
        parts = [slice(0, 1), slice(0, rows), slice(1, rows)]
        names = tuple(example.outputs)
        requests = [request_of({name: a[part] for name, a in example.inputs.items()}, names) for part in parts]
        for part, outcome in zip(parts, run(instance, *requests), strict=True):
            _expect(_arrays(outcome), {name: array[part] for name, array in example.outputs.items()}, example)
        instance.close()


def check_inputs_stay_as_they_are(backend: Backend, example: Example) -> None:
    """Check that the model does not write to a request's arrays.

    They are views of the received bytes.
    """
    before = {name: array.copy() for name, array in example.inputs.items()}
    with opened(backend, example) as made:
        instance = made.instance()
        _answer(made, instance, example.inputs, example)
        instance.close()
    for name, array in before.items():
        assert np.array_equal(array, example.inputs[name], equal_nan=array.dtype.kind == "f"), f"'{name}' was changed"


def check_an_answer_outlives_the_next_run(backend: Backend, example: Example) -> None:
    """Check that later runs and closing the model do not change the outputs of a response."""
    with opened(backend, example) as made:
        instance = made.instance()
        first = _answer(made, instance, example.inputs, example)
        other = {name: np.flip(array, 0) if array.ndim else array for name, array in example.inputs.items()}
        run(instance, request_of(other, tuple(example.outputs), batches=made.config.max_batch_size > 0))
        _expect(first, example.outputs, example)
        instance.close()
    _expect(first, example.outputs, example)


def check_a_bad_request_fails_alone(backend: Backend, example: Example) -> None:
    """Check that a request refused by the model does not fail the others of its batch."""
    if example.bad_inputs is None:
        return
    with opened(backend, example) as made:
        instance, names, batches = made.instance(), tuple(example.outputs), made.config.max_batch_size > 0
        good, bad = (request_of(each, names, batches=batches) for each in (example.inputs, example.bad_inputs))
        outcomes = run(instance, good, bad, good)
        assert isinstance(outcomes[1], RemoraError), f"the bad request ended in {outcomes[1]!r}"
        for outcome in (outcomes[0], outcomes[2]):
            _expect(_arrays(outcome), example.outputs, example)
        instance.close()


def check_instances_run_side_by_side(backend: Backend, example: Example) -> None:
    """Check that instances in several threads give the same answers.

    The instances were created in another thread.
    """
    with opened(backend, example) as made:
        instances = [made.instance(index) for index in range(_THREADS)]
        failures: list[BaseException] = []

        def work(instance: Instance) -> None:
            try:
                for _ in range(_CYCLES):
                    _expect(_answer(made, instance, example.inputs, example), example.outputs, example)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(instance,)) for instance in instances]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for instance in instances:
            instance.close()
        if failures:
            raise failures[0]


def check_loading_and_unloading_leaves_nothing(backend: Backend, example: Example) -> None:
    """Check that repeated loading, running and closing leaks no thread and no open file."""

    def cycle() -> None:
        with opened(backend, example) as made:
            instance = made.instance()
            _answer(made, instance, example.inputs, example)
            instance.close()

    cycle()
    cycle()  # the first cycles may start what the framework keeps for the process
    before = (threading.active_count(), _open_files())
    for _ in range(_CYCLES):
        cycle()
    after = (threading.active_count(), _open_files())
    assert after[0] <= before[0], f"{after[0] - before[0]} threads were left behind by {_CYCLES} loads"
    assert after[1] <= before[1] + 1, f"{after[1] - before[1]} open files were left behind by {_CYCLES} loads"


def check_a_missing_file_is_told(backend: Backend, example: Example) -> None:
    """Check that a version directory without the model's files is refused with a reason."""
    import tempfile

    source, config = source_of(example)
    with tempfile.TemporaryDirectory() as empty:
        bare = source._replace(path=Path(empty), model_dir=Path(empty), repository=Path(empty))
        try:
            backend.open(bare, config).close()
        except Exception as error:
            reason = str(error)
        else:
            raise AssertionError("a model without files was opened")
        assert reason, "the failure has no message"


Check = Callable[[Backend, Example], None]

CHECKS: tuple[Check, ...] = (
    check_it_speaks_this_api,
    check_completing_twice_changes_nothing,
    check_a_request_is_answered,
    check_only_what_is_requested_comes_back,
    check_a_batch_is_cut_at_its_requests,
    check_inputs_stay_as_they_are,
    check_an_answer_outlives_the_next_run,
    check_a_bad_request_fails_alone,
    check_instances_run_side_by_side,
    check_loading_and_unloading_leaves_nothing,
    check_a_missing_file_is_told,
)


def check_backend(backend: Backend, example: Example) -> None:
    """Run every check. Raises AssertionError with one line for each failed check."""
    wrong = []
    for check in CHECKS:
        try:
            check(backend, example)
        except Exception as error:
            wrong.append(f"{check.__name__}: {error or type(error).__name__}")
    if wrong:
        raise AssertionError("\n".join(wrong))


# -- What the checks need ---------------------------------------------------------------------------------------------


def _answer(made: Opened, instance: Instance, inputs: Mapping[str, Array], example: Example) -> dict[str, Array]:
    request = request_of(inputs, tuple(example.outputs), batches=made.config.max_batch_size > 0)
    (outcome,) = run(instance, request)
    for tensor in _response(outcome).outputs:
        wanted = DTYPES[tensor.datatype]
        assert tensor.data.dtype == wanted, f"'{tensor.name}' is {tensor.datatype} in an array of {tensor.data.dtype}"
    return _arrays(outcome)


def _response(outcome: Outcome | None) -> Response:
    if isinstance(outcome, RemoraError):
        raise outcome
    assert isinstance(outcome, Response), f"a request ended in {outcome!r}"
    return outcome


def _arrays(outcome: Outcome | None) -> dict[str, Array]:
    return {tensor.name: tensor.data for tensor in _response(outcome).outputs}


def _expect(found: Mapping[str, Array], wanted: Mapping[str, Array], example: Example) -> None:
    assert set(found) == set(wanted), f"the outputs are {sorted(found)}, not {sorted(wanted)}"
    for name, array in wanted.items():
        assert found[name].shape == array.shape, f"'{name}' has shape {found[name].shape}, not {array.shape}"
        if array.dtype.kind == "f":
            close = np.allclose(found[name], array, rtol=example.rtol, atol=example.atol, equal_nan=True)
        else:
            close = np.array_equal(found[name], array)
        assert close, f"'{name}' is {found[name]!r}, not {array!r}"


def _open_files() -> int:
    """Return the number of files that the process has open, or 0 if unknown."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
