"""The recorded models of the oracle run through the Python backend as they are, where the recordings are at hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from remora.backends import Execution, Placement, Source
from remora.backends.python import PythonBackend
from remora.config import dtype_name, normalise, read_config
from remora.errors import InternalError, RemoraError
from remora.messages import DTYPES, Array, InferForm, Outcome, Request, Response
from remora.proto.model_config_pb2 import DataType, ModelConfig

MODELS = Path(__file__).resolve().parents[5] / "shared" / "oracle" / "models"
pytestmark = pytest.mark.skipif(not MODELS.is_dir(), reason="the recordings are not here")

IDENTITIES = sorted(folder.name for folder in MODELS.glob("identity_*")) if MODELS.is_dir() else []
Ask = Callable[..., Outcome]


@pytest.fixture
def ask(request: pytest.FixtureRequest) -> Ask:
    """Loads a model of the oracle by name and asks it one request."""

    def load_and_ask(name: str, inputs: dict[str, Array], version: int = 1, form: InferForm | None = None) -> Outcome:
        folder = MODELS / name
        path = folder / "config.pbtxt"
        config = read_config(path) if path.is_file() else ModelConfig(backend="python")
        config.name = name
        model = PythonBackend().open(Source(name, version, folder, folder / str(version), MODELS), config)
        request.addfinalizer(model.close)
        model.complete(config)
        normalise(config, name)
        instance = model.instance(config, Placement(f"{name}_0_0"))
        request.addfinalizer(instance.close)
        wanted = tuple(output.name for output in config.output)
        (outcome,) = instance.execute(Execution([Request(form or InferForm(()), inputs, wanted, 1, None)]))
        return outcome

    return load_and_ask


def values(outcome: Outcome) -> dict[str, object]:
    assert isinstance(outcome, Response)
    return {output.name: output.data.tolist() for output in outcome.outputs}


@pytest.mark.parametrize("name", IDENTITIES)
def test_every_datatype_comes_back_as_it_went_in(ask: Ask, name: str) -> None:
    tensor = read_config(MODELS / name / "config.pbtxt").input[0]
    dtype = DTYPES[dtype_name(tensor.data_type)]
    shape = [2 if size < 0 else size for size in tensor.dims]
    data = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    if tensor.data_type == DataType.TYPE_STRING:
        data[...] = b"\xff\0"
    outcome = ask(name, {"INPUT0": data})
    assert isinstance(outcome, Response)
    assert outcome.outputs[0].datatype == dtype_name(tensor.data_type)
    assert outcome.outputs[0].data.dtype == dtype
    assert values(outcome) == {"OUTPUT0": data.tolist()}


def test_sums_differences_and_options(ask: Ask) -> None:
    one, two = np.ones((1, 4), np.float32), np.full((1, 4), 2, np.float32)
    assert values(ask("addsub", {"INPUT0": one, "INPUT1": two})) == {"OUTPUT0": [[3] * 4], "OUTPUT1": [[-1] * 4]}
    assert values(ask("optional", {"NEEDED": np.array([[1]]), "MORE": np.array([[2]])})) == {"OUT": [[201]]}
    assert values(ask("reshape", {"INPUT0": np.array([1.5], np.float32)})) == {"OUTPUT0": [3.0], "RANK": [1]}
    text = {"text_input": np.array([[b"hi"]], object)}
    assert values(ask("gen_once", text)) == {"text_output": [[b"HI"]]}


@pytest.mark.parametrize("name", ["auto", "auto_bare"])
def test_models_without_a_written_signature(ask: Ask, name: str) -> None:
    assert values(ask(name, {"INPUT0": np.array([[1, 2]])})) == {"OUTPUT0": [[10, 20]]}


@pytest.mark.parametrize("version", [1, 3])
def test_versions_know_their_number(ask: Ask, version: int) -> None:
    assert values(ask("versions_all", {"INPUT0": np.array([0], np.int32)}, version)) == {"VERSION": [version]}


def test_parameters_go_in_and_come_out(ask: Ask) -> None:
    form = InferForm((), id="abc", parameters={"clé": "été"}, sequence_id=7, sequence_start=True, timeout_us=5)
    outcome = ask("params", {"INPUT0": np.array([1], np.int32)}, form=form)
    assert isinstance(outcome, Response)
    assert outcome.parameters == {"flag": True, "count": 7, "word": "hello"}
    assert json.loads(outcome.outputs[0].data[0]) == {
        "correlation_id": 7, "flags": 1, "id": "abc", "outputs": ["SEEN"], "parameters": {"clé": "été"}, "timeout": 5,
    }  # fmt: skip


def test_recorded_failures(ask: Ask) -> None:
    outcome = ask("err", {"IN": np.array([12], np.int32)})
    assert isinstance(outcome, RemoraError)
    assert (outcome.code, outcome.message) == ("INTERNAL", 'quote " slash \\ newline \n café')
    file = MODELS / "err" / "1" / "model.py"
    with pytest.raises(InternalError) as caught:
        ask("err", {"IN": np.array([21], np.int32)})
    assert caught.value.message.startswith(
        "Failed to process the request(s) for model 'err_0_0', message: ValueError: raised a value error\n\nAt:\n"
        f"  {file}(43): answer\n"
    )
    with pytest.raises(InternalError) as caught:
        ask("bad_init", {})
    file = MODELS / "bad_init" / "1" / "model.py"
    assert caught.value.message == f"TritonModelException: this model never starts\n\nAt:\n  {file}(8): initialize\n"


def test_sequence_controls_are_inputs_like_others(ask: Ask) -> None:
    controls = {name: np.array([[1]], np.int32) for name in ("START", "READY", "END")}
    inputs = {"INPUT0": np.array([[5]], np.int32), **controls, "CORRID": np.array([[9]], np.uint64)}
    assert values(ask("seq_direct", inputs)) == {"OUTPUT0": [[5, 1, 1, 1, 9]]}
