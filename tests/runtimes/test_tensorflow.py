"""SavedModels beyond the parity suite: signatures, tags, graphs that access files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remora.backends import Placement
from remora.errors import ConfigError, InternalError, NotFoundError, UnsupportedError
from remora.messages import Array, Response
from remora.testing.backend import Example, Opened, open_model, request_of, run
from remora_runtimes.tensorflow import TensorFlowBackend, TensorFlowModel, check_operations

PLAIN = 'platform: "tensorflow_savedmodel" '


@pytest.fixture
def tf() -> Any:
    return pytest.importorskip("tensorflow", reason="TensorFlow is not installed here: make test-tensorflow")


def saved(tf: Any, tmp_path: Path, config: str, **signatures: Any) -> Example:
    module = tf.Module()
    for name, function in signatures.items():
        setattr(module, name, function)
    tf.saved_model.save(module, str(tmp_path / "m" / "1" / "model.savedmodel"), signatures=signatures)
    (tmp_path / "m" / "config.pbtxt").write_text(PLAIN + config)
    return Example(tmp_path / "m", {}, {})


def function(tf: Any, body: Any, kind: Any, shape: Any = (None, 2)) -> Any:
    return tf.function(lambda x: body(x), input_signature=[tf.TensorSpec(shape, kind, name="x")])


def opened(example: Example) -> Opened:
    return open_model(TensorFlowBackend(), example)


def answer(made: Opened, x: Array, name: str = "y") -> Array:
    (outcome,) = run(made.instance(), request_of({"x": x}, (name,)))
    if not isinstance(outcome, Response):
        raise outcome
    return outcome.outputs[0].data


def test_without_a_configuration_the_signature_tells(tf: Any, tmp_path: Path) -> None:
    double = function(tf, lambda x: {"y": x * 2, "rank": tf.rank(x)}, tf.float32)
    made = opened(saved(tf, tmp_path, "", serving_default=double))  # the rank is one value: no batches
    assert [(row.name, list(row.dims)) for row in made.config.input] == [("x", [-1, 2])]
    assert sorted(row.name for row in made.config.output) == ["rank", "y"]


def test_a_signature_is_chosen_by_its_name(tf: Any, tmp_path: Path) -> None:
    chosen = 'parameters { key: "TF_SIGNATURE_DEF" value { string_value: "triple" } }'
    signatures = {
        "serving_default": function(tf, lambda x: {"y": x * 2}, tf.float32),
        "triple": function(tf, lambda x: {"y": x * 3}, tf.float32),
    }
    x = np.ones((2, 2), "f4")
    np.testing.assert_array_equal(answer(opened(saved(tf, tmp_path, chosen, **signatures)), x), x * 3)
    (tmp_path / "m" / "config.pbtxt").write_text(PLAIN + chosen.replace("triple", "other"))
    with pytest.raises(ConfigError, match=r"no signature 'other': .* one of these: serving_default, triple"):
        opened(Example(tmp_path / "m", {}, {}))


def test_strings_are_bytes_as_they_come(tf: Any, tmp_path: Path) -> None:
    made = opened(saved(tf, tmp_path, "", serving_default=function(tf, lambda x: {"y": x + "!"}, tf.string, (None, 1))))
    found = answer(made, np.array([[b"\xff\0"], [b""]], object))
    assert found.tolist() == [[b"\xff\0!"], [b"!"]]


def test_a_models_failure_is_reported_in_one_line(tf: Any, tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_non_negative(x, "negative values are refused")]):
            return {"y": tf.identity(x)}

    made = opened(saved(tf, tmp_path, "", serving_default=function(tf, body, tf.float32)))
    with pytest.raises(InternalError, match=r"TensorFlow: .*negative values are refused"):
        answer(made, np.full((1, 2), -1, "f4"))


def test_a_graph_that_reaches_for_files_is_refused_before_it_is_loaded(tf: Any, tmp_path: Path) -> None:
    mark = tmp_path / "written"

    def body(x: Any) -> Any:
        tf.io.write_file(str(mark), "x")
        return {"y": x}

    with pytest.raises(UnsupportedError, match=r"the operation WriteFile .* reaches out of the model"):
        opened(saved(tf, tmp_path, "", serving_default=function(tf, body, tf.float32)))
    assert not mark.exists()


def test_a_missing_gpu_is_reported(tf: Any, tmp_path: Path) -> None:
    made = opened(saved(tf, tmp_path, "", serving_default=function(tf, lambda x: {"y": x}, tf.float32)))
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="asks for GPU 0, but TensorFlow sees 0"):
        made.model.instance(made.config, Placement("m_0", "GPU", 0))


# These need no TensorFlow.


def test_ordinary_operations_pass_and_python_operations_are_refused() -> None:
    check_operations("m", {"MatMul": "a", "RestoreV2": "b", "LookupTableFindV2": "c"})
    with pytest.raises(UnsupportedError, match=r"the operation PyFunc \(tokenizer\)"):
        check_operations("m", {"MatMul": "a", "PyFunc": "tokenizer"})


def test_frozen_graphs_and_missing_models_are_refused(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('platform: "tensorflow_graphdef"')
    with pytest.raises(UnsupportedError, match="a frozen graph, which does not describe its inputs"):
        opened(Example(tmp_path / "m", {}, {}))
    (tmp_path / "m" / "config.pbtxt").write_text(PLAIN)
    with pytest.raises(NotFoundError, match=r"unable to find '1/model\.savedmodel'"):
        opened(Example(tmp_path / "m", {}, {}))
    (version / "model.savedmodel").mkdir()
    with pytest.raises(NotFoundError, match=r"unable to find '1/model\.savedmodel/saved_model\.pb'"):
        opened(Example(tmp_path / "m", {}, {}))


class Devices:
    """TensorFlow's ``config``, where it sees some GPUs."""

    def __init__(self, gpus: int, *, late: bool = False) -> None:
        self.gpus = [f"GPU:{number}" for number in range(gpus)]
        self.growing: list[str] = []
        self.experimental = self
        self._late = late

    def list_physical_devices(self, kind: str) -> list[str]:
        assert kind == "GPU"
        return self.gpus

    def set_memory_growth(self, gpu: str, enable: bool) -> None:
        if self._late:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        assert enable
        self.growing.append(gpu)


def seeing(devices: Devices) -> TensorFlowModel:
    made = object.__new__(TensorFlowModel)
    made._tensorflow = SimpleNamespace(config=devices)
    return made


def test_a_gpus_memory_is_taken_as_it_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    devices = Devices(2)
    seeing(devices)._let_gpu_memory_grow()
    assert devices.growing == ["GPU:0", "GPU:1"]
    seeing(Devices(1, late=True))._let_gpu_memory_grow()
    assert "TensorFlow keeps all of a GPU's memory to itself: Physical devices cannot be modified" in caplog.text


def test_auto_means_the_cpu_where_tensorflow_sees_no_gpu() -> None:
    assert seeing(Devices(0)).preferred_kinds == ("CPU",)
    assert seeing(Devices(1)).preferred_kinds == ("GPU", "CPU")
