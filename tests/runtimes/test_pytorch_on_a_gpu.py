"""PyTorch models on a GPU: which device is theirs, and what has been waited for; over a fake of torch."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remora.backends import Source
from remora.errors import InternalError
from remora_runtimes import pytorch
from remora_runtimes.pytorch import ProgramRun, PyTorchModel
from remora_runtimes.pytorch.plan import plan_run
from remora_runtimes.pytorch.program import COMPILED, SCRIPT, Program
from support.engine.fakes import config_of

CONFIG = config_of(
    'name: "m" backend: "pytorch" input { name: "x" data_type: TYPE_FP32 dims: 2 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 2 }'
)


class FakeTensor:
    def __init__(self, kind: str, values: Any, happened: list[str]) -> None:
        self.device = SimpleNamespace(type=kind)
        self.dtype = "torch.float32"
        self._values = values
        self._happened = happened

    def to(self, device: Any) -> FakeTensor:
        self._happened.append("input there")
        return FakeTensor("cuda", self._values, self._happened)

    def cpu(self) -> FakeTensor:
        return FakeTensor("cpu", self._values, self._happened)

    def detach(self) -> FakeTensor:
        return self

    contiguous = resolve_neg = detach

    def numpy(self) -> Any:
        return self._values


class FakeTorch:
    """The calls to torch around a run, noted in order."""

    Tensor = FakeTensor

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.cuda = SimpleNamespace(device=self._device, current_stream=lambda: SimpleNamespace(synchronize=self._wait))

    @contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        self.happened.append(f"on GPU {device.index}")
        try:
            yield
        finally:
            self.happened.append("off")

    def _wait(self) -> None:
        self.happened.append("waited")

    def from_numpy(self, array: Any) -> FakeTensor:
        return FakeTensor("cpu", array, self.happened)

    def inference_mode(self) -> Any:
        return nullcontext()

    def set_num_threads(self, count: int) -> None:
        pass


ORDER = ["on GPU 1", "input there", "called", "waited", "off"]


def run_of(torch: FakeTorch, call: Any) -> ProgramRun:
    def noted(x: Any) -> Any:
        torch.happened.append("called")
        return call(x)

    return ProgramRun(
        torch, Program(noted, COMPILED), plan_run(CONFIG, {}), CONFIG, SimpleNamespace(type="cuda", index=1), 1
    )


def test_the_device_is_the_models_and_is_done_when_the_answer_is_there() -> None:
    torch = FakeTorch()
    (found,) = run_of(torch, lambda x: x)({"x": np.ones(2, "f4")}, ("y",))
    assert found.data.tolist() == [1, 1]
    assert torch.happened == ORDER


def test_the_device_is_done_with_the_inputs_of_a_model_that_fails() -> None:
    torch = FakeTorch()

    def failing(x: Any) -> Any:
        raise ValueError("after the first kernel")

    with pytest.raises(InternalError, match="PyTorch execute failure: after the first kernel"):
        run_of(torch, failing)({"x": np.ones(2, "f4")}, ("y",))
    assert torch.happened == ORDER


class Placing:
    """Torch's functions about devices, with this many GPUs."""

    __version__ = "2"

    def __init__(self, gpus: int) -> None:
        self.cuda = SimpleNamespace(device_count=lambda: gpus)

    def device(self, kind: str, index: int = 0) -> str:
        return f"{kind}:{index}"

    def get_num_interop_threads(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("gpus", "group", "devices"),
    [
        (0, "", ["cpu:0"]),
        (0, "instance_group { gpus: 1 }", ["cpu:0"]),
        (2, "", ["cuda:0"]),
        (2, "instance_group { gpus: 1 }", ["cuda:1"]),
        (2, "instance_group { gpus: 2 }", ["cpu:0"]),
        (2, "instance_group { kind: KIND_CPU }", ["cpu:0"]),
        (2, "instance_group { kind: KIND_MODEL }", ["None"]),
    ],
)
def test_a_program_is_read_onto_the_device_that_it_will_run_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, group: str, devices: list[str]
) -> None:
    """A copy on any other device would stay there for the model's life."""
    read: list[str] = []
    monkeypatch.setattr(
        pytorch,
        "load_program",
        lambda torch, path, device, **given: (read.append(str(device)), Program(len, SCRIPT))[1],
    )
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:  # its members tell a script from other programs
        archive.writestr("m/constants.pkl", b"")
        archive.writestr("m/code/__torch__.py", b"")
    torch: Any = Placing(gpus)
    config = config_of(f'name: "m" backend: "pytorch" {group}')
    opened = PyTorchModel(torch, Source("m", 1, Path(), Path(), Path()), path, config)
    assert read == devices
    assert opened.preferred_kinds == (("GPU", "CPU") if gpus else ("CPU",))
