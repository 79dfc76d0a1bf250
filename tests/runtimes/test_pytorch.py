"""PyTorch models beyond the parity suite: names, state, precision, strings, files that would run code."""

from __future__ import annotations

import importlib
import json
import logging
import pickle
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends import Placement, Source
from remora.errors import ConfigError, InternalError, InvalidArgumentError, UnsupportedError
from remora.messages import Array, Response
from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup
from remora.testing.backend import Example, Opened, open_model, request_of, run
from remora_runtimes.pytorch import PyTorchBackend
from remora_runtimes.pytorch.program import load_program

torch = pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

X = np.arange(6, dtype="f4").reshape(3, 2)
PLAIN = 'backend: "pytorch" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 2 } '
OUT = 'output { name: "y" data_type: TYPE_FP32 dims: 2 } '


def script(tmp_path: Path, module: Any, config: str) -> Example:
    (tmp_path / "m" / "1").mkdir(parents=True, exist_ok=True)
    torch.jit.script(module.eval()).save(str(tmp_path / "m" / "1" / "model.pt"))
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    return Example(tmp_path / "m", {}, {})


def opened(example: Example) -> Opened:
    return open_model(PyTorchBackend(), example)


def answer(instance: Any, requested: str = "y", **inputs: Array) -> Array:
    (outcome,) = run(instance, request_of(inputs, (requested,)))
    if not isinstance(outcome, Response):
        raise outcome
    return outcome.outputs[0].data


class Half(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.div_(2)


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(1))
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.add_(1)
        return x * self.weight * 0 + self.runs


class Named(torch.nn.Module):
    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"twice": inputs["x"] * 2, "y": inputs["x"] + inputs["z"]}


class Words(torch.nn.Module):
    def forward(self, words: list[str], x: torch.Tensor) -> tuple[list[str], torch.Tensor]:
        return [word + "!" for word in words], x


class Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Refuses(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() < 0):
            raise ValueError("negative sums are refused")
        return x


def test_a_program_that_writes_to_its_input_gets_a_copy(tmp_path: Path) -> None:
    made = opened(script(tmp_path, Half(), PLAIN + OUT))
    inputs = X.copy()
    np.testing.assert_array_equal(answer(made.instance(), x=inputs), X / 2)
    np.testing.assert_array_equal(inputs, X)


def test_instances_share_parameters_and_have_their_own_state(tmp_path: Path) -> None:
    made = opened(script(tmp_path, Counter(), PLAIN + OUT))
    one, other = made.instance(0), made.instance(1)
    assert [answer(one, x=X)[0, 0] for _ in range(3)] == [1, 2, 3]
    assert answer(other, x=X)[0, 0] == 1
    programs = [instance._run._program.call for instance in (one, other)]  # type: ignore[attr-defined]
    first, second = ({name: p.data_ptr() for name, p in program.named_parameters()} for program in programs)
    assert first == second


def test_weight_sharing_shares_the_state_as_well(tmp_path: Path) -> None:
    shared = 'parameters { key: "ENABLE_WEIGHT_SHARING" value { string_value: "true" } }'
    made = opened(script(tmp_path, Counter(), PLAIN + OUT + shared))
    one, other = made.instance(0), made.instance(1)
    assert (answer(one, x=X)[0, 0], answer(other, x=X)[0, 0]) == (1, 2)


def test_an_answer_that_is_the_models_own_memory_is_copied(tmp_path: Path) -> None:
    class Gives(Counter):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs.add_(1)
            return self.runs

    config = 'backend: "pytorch" input { name: "x" data_type: TYPE_FP32 dims: [3, 2] } output '
    made = opened(script(tmp_path, Gives(), config + '{ name: "y" data_type: TYPE_FP32 dims: 1 }'))
    instance = made.instance()
    first = answer(instance, x=X)
    answer(instance, x=X)
    assert first == [1]


def test_a_dictionary_goes_in_and_comes_out_by_name(tmp_path: Path) -> None:
    z = 'input { name: "z" data_type: TYPE_FP32 dims: 2 } output { name: "twice" data_type: TYPE_FP32 dims: 2 } '
    made = opened(script(tmp_path, Named(), PLAIN + z + OUT))
    np.testing.assert_array_equal(answer(made.instance(), "twice", x=X, z=X), X * 2)
    np.testing.assert_array_equal(answer(made.instance(), "y", x=X, z=X), X * 2)


def test_strings_are_lists_of_text_beside_tensors(tmp_path: Path) -> None:
    config = (
        PLAIN + 'input { name: "words" data_type: TYPE_STRING dims: 1 } '
        'output { name: "louder" data_type: TYPE_STRING dims: 1 } ' + OUT
    )
    made = opened(script(tmp_path, Words(), config))
    words = np.array([["é".encode()], [b"b"], [b""]], object)
    louder = answer(made.instance(), "louder", x=X, words=words)
    assert louder.tolist() == [["é!".encode()], [b"b!"], [b"!"]]
    with pytest.raises(InvalidArgumentError, match="takes UTF-8 text"):
        answer(made.instance(), "louder", x=X[:1], words=np.array([[b"\xff"]], object))


def test_a_failing_request_fails_alone_and_with_the_models_reason(tmp_path: Path) -> None:
    instance = opened(script(tmp_path, Refuses(), PLAIN + OUT)).instance()
    good, bad = request_of({"x": X}, ("y",)), request_of({"x": -X - 1}, ("y",))
    outcomes = run(instance, good, bad)
    assert isinstance(outcomes[0], Response)
    assert "negative sums are refused" in str(outcomes[1])
    assert str(outcomes[1]).startswith("PyTorch execute failure: ")


@pytest.mark.parametrize("name", ["INFERENCE_MODE", "DISABLE_OPTIMIZED_EXECUTION", "DISABLE_CUDNN"])
@pytest.mark.parametrize("value", ["true", "false"])
def test_every_mode_gives_the_same_answer(tmp_path: Path, name: str, value: str) -> None:
    module = Product()
    extra = f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
    made = opened(script(tmp_path, module, PLAIN + OUT + extra))
    np.testing.assert_allclose(answer(made.instance(), x=X), module(torch.from_numpy(X)).detach().numpy(), rtol=1e-6)


def test_mixed_precision_computes_in_less_and_answers_in_the_declared_type(tmp_path: Path) -> None:
    module = Product()
    amp = 'optimization { execution_accelerators { cpu_execution_accelerator { name: "auto_mixed_precision" } } }'
    found = answer(opened(script(tmp_path, module, PLAIN + OUT + amp)).instance(), x=X)
    exact = module(torch.from_numpy(X)).detach().numpy()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=0.05, atol=0.05)
    assert not np.array_equal(found, exact)


def test_a_result_of_another_type_is_reported_with_tritons_text(tmp_path: Path) -> None:
    wrong = 'output { name: "y" data_type: TYPE_INT32 dims: 2 }'
    made = opened(script(tmp_path, Product(), PLAIN + wrong))
    with pytest.raises(InternalError, match="unexpected datatype TYPE_INT32 for output 'y', model provides TYPE_FP32"):
        answer(made.instance(), x=X)


def test_torchscript_without_declared_tensors_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its format, TorchScript, declares no types and shapes of tensors"):
        opened(script(tmp_path, Product(), 'backend: "pytorch"'))


def test_an_exported_program_needs_no_configuration(tmp_path: Path) -> None:
    class Pair(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": x * mask, "ids": mask.to(torch.int64)}

    (tmp_path / "m" / "1").mkdir(parents=True)
    batch = torch.export.Dim.AUTO
    program = torch.export.export(Pair(), (torch.ones(3, 2), torch.ones(3, 2)), dynamic_shapes=({0: batch}, {0: batch}))
    torch.export.save(program, tmp_path / "m" / "1" / "model.pt2")
    made = opened(Example(tmp_path / "m", {}, {}))
    assert [(row.name, list(row.dims)) for row in made.config.input] == [("x", [2]), ("mask", [2])]
    assert [(row.name, row.data_type) for row in made.config.output] == [("y", 11), ("ids", 9)]
    assert made.config.max_batch_size == 4
    assert made.config.HasField("dynamic_batching")
    np.testing.assert_array_equal(answer(made.instance(), "ids", x=X, mask=X), X.astype("i8"))


def test_an_exported_program_can_be_compiled_and_torchscript_cannot(tmp_path: Path) -> None:
    compiled = (
        'parameters { key: "TORCH_COMPILE_OPTIONAL_PARAMETERS" value { string_value: "{\\"backend\\": \\"eager\\"}" } }'
    )
    with pytest.raises(UnsupportedError, match="TorchScript cannot be compiled"):
        opened(script(tmp_path, Product(), PLAIN + OUT + compiled))
    module = Product().eval()
    program = torch.export.export(module, (torch.ones(3, 2),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.export.save(program, tmp_path / "m" / "1" / "model.pt2")
    (tmp_path / "m" / "1" / "model.pt").unlink()
    (tmp_path / "m" / "config.pbtxt").write_text(f'default_model_filename: "model.pt2" {PLAIN} {OUT} {compiled}')
    found = answer(opened(Example(tmp_path / "m", {}, {})).instance(), x=X)
    np.testing.assert_allclose(found, module(torch.from_numpy(X)).detach().numpy(), rtol=1e-5)


def test_threads_are_set_for_each_thread_that_runs_the_model(tmp_path: Path) -> None:
    threads = 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "1" } }'
    instance = opened(script(tmp_path, Product(), PLAIN + OUT + threads)).instance()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.set_num_threads, 2).result()
        pool.submit(answer, instance, x=X).result()
        assert pool.submit(torch.get_num_threads).result() == 1


def test_a_parameter_without_effect_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fuser = 'parameters { key: "ENABLE_NVFUSER" value { string_value: "true" } }'
    with caplog.at_level(logging.WARNING):
        opened(script(tmp_path, Product(), PLAIN + OUT + fuser))
    assert "does not use the parameter 'ENABLE_NVFUSER'" in caplog.text


def test_a_missing_gpu_is_reported(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    made = opened(script(tmp_path, Product(), PLAIN + OUT))
    with pytest.raises(ConfigError, match=r"asks for GPU 0, but torch \S+ sees 0"):
        made.model.instance(made.config, Placement("m_0", "GPU", 0))


class Evil:
    """What a pickle can do to the process that reads it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "whole module", "example inputs", "call"])
def test_a_file_that_would_run_code_is_refused_unread(tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "ran"
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(PLAIN + OUT)
    file = version / "model.pt"
    if kind == "pickle":
        file.write_bytes(pickle.dumps(Evil(mark)))
    elif kind == "torch.save":
        torch.save(Evil(mark), file)
    elif kind == "whole module":
        torch.save(Product(), file)
    else:
        file = version / "model.pt2"
        (tmp_path / "m" / "config.pbtxt").write_text(f'default_model_filename: "model.pt2" {PLAIN} {OUT}')
        torch.export.save(torch.export.export(Product().eval(), (torch.ones(3, 2),)), file)
        tamper(file, kind, mark)
    with pytest.raises(InternalError, match="cannot load '1/model"):
        opened(Example(tmp_path / "m", {}, {}))
    assert not mark.exists()


def tamper(file: Path, kind: str, mark: Path) -> None:
    import io
    import zipfile

    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name, data in members.items():
        if kind == "example inputs" and "sample_inputs" in name:
            buffer = io.BytesIO()
            torch.save((Evil(mark),), buffer)
            members[name] = buffer.getvalue()
        elif kind == "call" and name.endswith("models/model.json"):
            members[name] = data.replace(b"torch.ops.aten.linear.default", b"torch.os.system")
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def test_what_an_exported_program_creates_is_on_the_device_that_it_is_read_onto(tmp_path: Path) -> None:
    """PyTorch's device without memory stands for a GPU: it meets a tensor of the CPU with the same error."""

    class Shifted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.arange(2, dtype=torch.float32)

    file = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(Shifted(), (torch.ones(3, 2),)), file)
    program = load_program(torch, file, torch.device("meta"), runners=1, compiling=None)
    found = program.call(torch.ones(3, 2, device="meta"))
    assert (found[0] if isinstance(found, tuple) else found).device.type == "meta"


def exported(tmp_path: Path, name: str) -> Example:
    (tmp_path / name / "1").mkdir(parents=True)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()).eval()
    program = torch.export.export(module, (torch.ones(1, 2),))
    torch.export.save(program, str(tmp_path / name / "1" / "model.pt2"))
    text = 'backend: "pytorch" default_model_filename: "model.pt2" instance_group { kind: KIND_CPU }'
    (tmp_path / name / "config.pbtxt").write_text(text)
    return Example(tmp_path / name, {}, {})


def test_exported_programs_load_at_the_same_time(tmp_path: Path) -> None:
    examples = [exported(tmp_path, f"m{number}") for number in range(6)]
    with ThreadPoolExecutor(len(examples)) as pool:
        for _ in range(3):
            assert len(list(pool.map(opened, examples))) == len(examples)


class FakePackage:
    """Compiled program that a test does not run."""

    def __call__(self, *_values: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(("device", "right", "wrong"), [("cpu", "CPU", "GPU"), ("cuda", "GPU", "CPU")])
def test_a_compiled_package_runs_on_its_own_kind_of_device_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, right: str, wrong: str
) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    with zipfile.ZipFile(version / "model.pt2", "w") as made:
        made.writestr("m/archive_format", "pt2")
        made.writestr("m/data/aotinductor/model/c.wrapper_metadata.json", json.dumps({"AOTI_DEVICE_KEY": device}))
    package = importlib.import_module("torch._inductor.package")
    monkeypatch.setattr(package, "load_package", lambda *_, **__: FakePackage())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    source = Source("m", 1, tmp_path / "m", version, tmp_path, {}, cpus=1)
    kinds = ModelInstanceGroup
    config = ModelConfig(name="m", platform="torch_aoti")
    model = PyTorchBackend().open(source, config)
    assert model.preferred_kinds == (right,)
    config.instance_group.add(kind=getattr(kinds, f"KIND_{wrong}"))
    with pytest.raises(ConfigError, match=f"compiled for a {right}.*asks for a {wrong}.*KIND_{right}"):
        PyTorchBackend().open(source, config)
