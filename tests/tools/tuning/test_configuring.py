"""Tuned settings in configurations: read, written into files, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from remora.config import read_config
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig
from remora_tools.tuning import Runtime, Settings
from remora_tools.tuning.configuring import (
    apply_settings,
    decorator_of,
    default_threads,
    find_folders,
    has_fixed_instances,
    providers_of,
    read_settings,
    stanza,
    with_settings,
)

COMPLETE = """
name: "m" backend: "onnxruntime" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: 3 }
instance_group { name: "m_0" count: 2 kind: KIND_CPU }
dynamic_batching { max_queue_delay_microseconds: 100 priority_levels: 2 default_priority_level: 1 }
response_cache { enable: true }
parameters { key: "intra_op_thread_count" value { string_value: "3" } }
"""
NEW = Settings(32, True, (), 500, 1, Runtime(2))


def config(text: str = COMPLETE) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def test_settings_are_read_from_a_complete_configuration() -> None:
    assert read_settings(config(), 4) == Settings(8, True, (), 100, 2, Runtime(3))
    full = config(COMPLETE.replace("dynamic_batching {", "dynamic_batching { preferred_batch_size: 8"))
    assert read_settings(full, 4) == read_settings(config(), 4)
    plain = read_settings(config('name: "m" backend: "onnxruntime" instance_group { count: 2 }'), 4)
    assert plain == Settings(0, False, (), 0, 2, Runtime(2))


def test_the_default_number_of_threads_is_that_of_the_backend() -> None:
    assert default_threads("onnxruntime", 2, 8) == 4
    assert default_threads("onnxruntime", 16, 8) == 1
    assert default_threads("openvino", 2, 8) == 8
    assert default_threads("python", 2, 8) == 0


def test_changed_fields_alone_are_written() -> None:
    present = read_settings(config(), 4)
    assert with_settings(config(), present, present, config(), 4) == config()
    new = with_settings(config(), NEW, present, config(), 4)
    assert read_settings(new, 4) == NEW
    assert new.dynamic_batching.priority_levels == 2
    assert new.response_cache.enable
    assert new.instance_group[0].kind == config().instance_group[0].kind
    assert new.parameters["intra_op_thread_count"].string_value == "2"


def test_threads_that_are_the_default_are_not_written() -> None:
    present = read_settings(config(), 4)
    new = with_settings(config(), NEW._replace(runtime=Runtime(4)), present, config(), 4)
    assert not new.parameters


def test_a_model_without_batches_loses_its_dynamic_batching() -> None:
    present = read_settings(config(), 4)
    new = with_settings(config(), present._replace(dynamic=False, delay_us=0), present, config(), 4)
    assert not new.HasField("dynamic_batching")
    assert new.max_batch_size == 8


def test_an_accelerator_is_written_and_removed() -> None:
    present = read_settings(config(), 4)
    fast = present._replace(runtime=Runtime(3, "openvino"))
    new = with_settings(config(), fast, present, config(), 4)
    assert [each.name for each in new.optimization.execution_accelerators.cpu_execution_accelerator] == ["openvino"]
    assert read_settings(new, 4) == fast
    back = with_settings(new, present, fast, new, 4)
    assert not back.optimization.execution_accelerators.cpu_execution_accelerator


def test_accelerators_fit_the_runtime_and_the_device() -> None:
    installed = ["OpenVINOExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"]
    assert providers_of(config(), installed) == ["openvino"]
    gpu = config('backend: "onnxruntime" instance_group { count: 1 kind: KIND_GPU gpus: 0 }')
    assert providers_of(gpu, installed) == ["tensorrt"]
    assert providers_of(config(), ["CPUExecutionProvider"]) == []
    assert providers_of(config('backend: "python"'), installed) == []


def test_instances_of_several_groups_or_devices_stay() -> None:
    assert not has_fixed_instances(config())
    assert has_fixed_instances(config(COMPLETE + "instance_group { count: 1 }"))
    assert has_fixed_instances(config("instance_group { kind: KIND_GPU gpus: [0, 1] }"))


def test_the_stanza_has_the_tuned_fields_alone() -> None:
    read = text_format.Parse(stanza(NEW, config(), 4), ModelConfig())
    assert sorted(field.name for field, _ in read.ListFields()) == [
        "dynamic_batching", "instance_group", "max_batch_size", "parameters",
    ]  # fmt: skip
    assert read_settings(config(f'backend: "onnxruntime" {stanza(NEW, config(), 4)}'), 4) == NEW


# -- files ------------------------------------------------------------------------------------------------------------


def folder(root: Path, text: str | None, name: str = "config.pbtxt") -> Path:
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / "model.onnx").write_bytes(b"")
    if text is not None:
        (root / "m" / name).write_text(text)
    return root / "m"


def test_a_file_keeps_its_other_fields_and_its_mode(tmp_path: Path) -> None:
    place = folder(tmp_path, COMPLETE)
    (place / "config.pbtxt").chmod(0o640)
    file, copy = apply_settings(place, NEW, read_settings(config(), 4), config(), 4)
    assert (file, copy) == (place / "config.pbtxt", None)
    assert file.stat().st_mode & 0o777 == 0o640
    assert read_config(file) == with_settings(config(), NEW, read_settings(config(), 4), config(), 4)
    assert sorted(path.name for path in place.iterdir()) == ["1", "config.pbtxt"]


def test_comments_are_kept_in_a_copy(tmp_path: Path) -> None:
    text = f"# why 8: see the load test\n{COMPLETE}"
    file, copy = apply_settings(folder(tmp_path, text), NEW, read_settings(config(), 4), config(), 4)
    assert copy is not None
    assert copy.read_text() == text
    assert read_settings(read_config(file), 4) == NEW


def test_a_model_without_a_configuration_gets_one(tmp_path: Path) -> None:
    file, _ = apply_settings(folder(tmp_path, None), NEW, read_settings(config(), 4), config(), 4)
    assert file.name == "config.pbtxt"
    written = read_config(file)
    assert written.max_batch_size == 32
    assert not written.input


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder(tmp_path, COMPLETE)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="No space left"):
        apply_settings(place, NEW, read_settings(config(), 4), config(), 4)
    assert (place / "config.pbtxt").read_text() == COMPLETE
    assert sorted(path.name for path in place.iterdir()) == ["1", "config.pbtxt"]


def test_another_notation_is_refused_with_the_file(tmp_path: Path) -> None:
    place = folder(tmp_path, "{}", "config.json")
    with pytest.raises(ConfigError, match=r"config\.json: only a config\.pbtxt is written"):
        apply_settings(place, NEW, read_settings(config(), 4), config(), 4)


def test_a_repository_and_a_model_folder_can_be_written(tmp_path: Path) -> None:
    place = folder(tmp_path, COMPLETE)
    assert find_folders(str(tmp_path)) == {"m": place}
    assert find_folders(str(place)) == {"m": place}


def test_places_without_a_configuration_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("import remora\n@remora.model\ndef f(x: int) -> int: return x\n")
    (tmp_path / "some.onnx").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"in their decorator, @remora\.model"):
        find_folders(str(tmp_path / "app.py"))
    with pytest.raises(ConfigError, match=r"move it to some/1/some\.onnx"):
        find_folders(str(tmp_path / "some.onnx"))
    with pytest.raises(ConfigError, match="not a local folder"):
        find_folders("s3://bucket/models")


def test_a_decorator_has_the_tuned_arguments() -> None:
    assert decorator_of(NEW) == '@remora.model(batch=32, max_delay="0.5ms", instances=1)'
    assert decorator_of(Settings(0, False, (), 0, 2)) == "@remora.model(instances=2)"
