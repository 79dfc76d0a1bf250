"""OpenVINO models beyond the parity suite: options, batches of single-row models, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends import Placement
from remora.errors import ConfigError, InvalidArgumentError, UnsupportedError
from remora.messages import Array, Response
from remora.testing.backend import Example, open_model, request_of, run
from remora_runtimes.openvino import OpenVinoBackend, compile_options
from support.engine.fakes import config_of


def parameters(**given: str) -> Any:
    text = " ".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in given.items())
    return config_of(f'name: "m" backend: "openvino" {text}')


def test_all_instances_together_use_the_processors_there_are() -> None:
    options = compile_options(parameters(), {}, cpus=4, instances=2)
    assert options == {"INFERENCE_NUM_THREADS": "4", "NUM_STREAMS": "2", "INFERENCE_PRECISION_HINT": "f32"}
    assert compile_options(parameters(), {}, cpus=2, instances=8)["NUM_STREAMS"] == "2"


def test_parameters_and_settings_say_otherwise() -> None:
    made = parameters(NUM_STREAMS="3", INFERENCE_PRECISION_HINT="bf16")
    options = compile_options(made, {"INFERENCE_NUM_THREADS": "7", "NUM_STREAMS": "1"}, cpus=4, instances=2)
    assert options == {"INFERENCE_NUM_THREADS": "7", "NUM_STREAMS": "3", "INFERENCE_PRECISION_HINT": "bf16"}
    hinted = compile_options(parameters(PERFORMANCE_HINT="LATENCY"), {}, cpus=4, instances=2)
    assert "NUM_STREAMS" not in hinted
    with pytest.raises(ConfigError, match="must be a whole number"):
        compile_options(parameters(NUM_STREAMS="many"), {}, cpus=4, instances=2)


def written(tmp_path: Path, shape: list[int], config: str, kind: str = "f32") -> Example:
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed here: make test-openvino")
    import openvino.opset13 as ops

    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    x = ops.parameter(shape, dtype=getattr(openvino.Type, kind), name="x")
    y = ops.reshape(x, ops.shape_of(x), False) if kind not in ("f32", "bf16") else ops.add(x, x)
    x.output(0).set_names({"x"})
    y.output(0).set_names({"y"})
    openvino.save_model(openvino.Model([ops.result(y)], [x], "m"), version / "model.xml", compress_to_fp16=False)
    (tmp_path / "m" / "config.pbtxt").write_text(f'backend: "openvino" {config}')
    return Example(tmp_path / "m", {}, {})


def answer(example: Example, x: Array) -> Array:
    made = open_model(OpenVinoBackend(), example)
    (outcome,) = run(made.instance(), request_of({"x": x}, ("y",)))
    assert isinstance(outcome, Response), outcome
    return outcome.outputs[0].data


def test_a_model_for_one_row_runs_batches_where_the_configuration_has_them(tmp_path: Path) -> None:
    example = written(tmp_path, [1, 2], "max_batch_size: 8")
    x = np.arange(6, dtype="f4").reshape(3, 2)
    np.testing.assert_array_equal(answer(example, x), x * 2)


def test_that_can_be_left_alone(tmp_path: Path) -> None:
    alone = 'max_batch_size: 8 parameters { key: "SKIP_OV_DYNAMIC_BATCHSIZE" value { string_value: "true" } }'
    with pytest.raises(ConfigError, match="does not support batching"):
        open_model(OpenVinoBackend(), written(tmp_path, [1, 2], alone))


def test_without_a_configuration_the_model_tells(tmp_path: Path) -> None:
    made = open_model(OpenVinoBackend(), written(tmp_path, [-1, 2], ""))
    assert (made.config.max_batch_size, made.config.input[0].name, list(made.config.output[0].dims)) == (4, "x", [2])


def test_bf16_is_computed_from_its_bits(tmp_path: Path) -> None:
    def bits(*values: float) -> Array:
        return (np.array([values], "f4").view("u4") >> 16).astype("u2")

    found = answer(written(tmp_path, [-1, 3], "max_batch_size: 8", "bf16"), bits(1, -2.5, 0.125))
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, bits(2, -5, 0.25))


def test_text_must_be_text(tmp_path: Path) -> None:
    example = written(tmp_path, [-1, 1], "", "string")
    with pytest.raises(InvalidArgumentError, match="takes UTF-8 text"):
        answer(example, np.array([[b"\xff"]], object))


def test_a_type_without_a_name_on_the_wire_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="has the OpenVINO type f8e4m3"):
        open_model(OpenVinoBackend(), written(tmp_path, [-1, 2], "", "f8e4m3"))


def test_a_gpu_is_refused(tmp_path: Path) -> None:
    made = open_model(OpenVinoBackend(), written(tmp_path, [-1, 2], ""))
    with pytest.raises(ConfigError, match="OpenVINO models run on the CPU here"):
        made.model.instance(made.config, Placement("m_0", "GPU", 0))
