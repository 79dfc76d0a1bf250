"""Every backend gives what its framework gives: the same models in every format, through the conformance kit.

A format whose framework is not installed is skipped; `make test-backends` installs each into a separate environment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends.registry import find_backend
from remora.engine import Engine
from remora.errors import RemoraError
from remora.messages import Response
from remora.testing.backend import Example, check_backend, open_model, request_of, run
from support.models import parity_models as parity

# Frameworks warn at export; the calls of the backends may not warn.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
KNOWN = ("mlp", "convolution", "two", "single", "identity", "strings")
LOADS = 20
MAX_GROWTH_BYTES = 48 << 20


def prepare(form: parity.Format, model: parity.Model, tmp_path: Path) -> Example:
    reason = form.missing()
    if reason:
        pytest.skip(reason)
    reference = form.write(model, tmp_path / "m")
    outputs = reference(model.inputs)
    for name, array in parity.compute(model, model.inputs).items() if model.kind in KNOWN else ():
        close = np.allclose if array.dtype.kind == "f" else np.array_equal  # the export itself is right
        tolerance = {"atol": 1e-4} if close is np.allclose else {}
        assert close(outputs[name], array, **tolerance), f"{form.name} computes another '{name}'"
    exact = model.kind in ("identity", "strings", "single", "two")
    return Example(tmp_path / "m", model.inputs, outputs, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5)


CASES = [
    pytest.param(form, model, id=f"{form.name}-{model.kind}-{model.datatype}-{next(iter(model.inputs.values())).size}")
    for form in parity.FORMATS
    for model in form.models()
]
ONE_OF_EACH = [pytest.param(form, id=form.name) for form in parity.FORMATS]


@pytest.mark.parametrize(("form", "model"), CASES)
def test_a_model_answers_as_its_framework_does(form: parity.Format, model: parity.Model, tmp_path: Path) -> None:
    example = prepare(form, model, tmp_path)
    check_backend(find_backend(form.backend), example)


@pytest.mark.parametrize("form", ONE_OF_EACH)
def test_a_batch_of_every_size_is_its_rows(form: parity.Format, tmp_path: Path) -> None:
    model = next(model for model in form.models() if "max_batch_size: 8" in model.config)
    example = prepare(form, model, tmp_path)
    opened = open_model(find_backend(form.backend), example)
    instance = opened.instance()
    for rows in (1, 2, 5, 8):
        inputs = {name: np.resize(array, (rows, *array.shape[1:])) for name, array in example.inputs.items()}
        (outcome,) = run(instance, request_of(inputs, tuple(example.outputs)))
        assert isinstance(outcome, Response), outcome
        for tensor in outcome.outputs:
            wanted = np.resize(example.outputs[tensor.name], (rows, *example.outputs[tensor.name].shape[1:]))
            np.testing.assert_allclose(tensor.data, wanted, rtol=1e-4, atol=1e-5)
    instance.close()
    opened.model.close()


@pytest.mark.parametrize("form", ONE_OF_EACH)
def test_the_engine_serves_it(form: parity.Format, tmp_path: Path) -> None:
    model = next(model for model in form.models() if "max_batch_size: 8" in model.config)
    example = prepare(form, model, tmp_path)
    text = (tmp_path / "m" / "config.pbtxt").read_text()
    (tmp_path / "m" / "config.pbtxt").write_text(
        text.replace(f"instance_group {{ kind: {form.place} }}", "")
        + f" instance_group {{ count: 2 kind: {form.place} }} dynamic_batching {{}}"
    )
    with Engine(tmp_path) as engine:
        found = engine.infer("m", dict(example.inputs))
        for name, array in example.outputs.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ONE_OF_EACH)
def test_loading_again_and_again_does_not_grow(form: parity.Format, tmp_path: Path) -> None:
    model = next(model for model in form.models() if "max_batch_size: 8" in model.config)
    example = prepare(form, model, tmp_path)
    backend: Any = find_backend(form.backend)

    def load() -> None:
        opened = open_model(backend, example)
        instance = opened.instance()
        run(instance, request_of(example.inputs, tuple(example.outputs)))
        instance.close()
        opened.model.close()

    for _ in range(4):
        load()
    growths: list[int] = []
    while len(growths) < 3 and (not growths or growths[-1] >= MAX_GROWTH_BYTES):
        before = resident_bytes()
        for _ in range(LOADS):
            load()
        growths.append(resident_bytes() - before)
    assert min(growths) < MAX_GROWTH_BYTES, "a leak grows each time, what other threads allocate does not"


@pytest.mark.parametrize("form", ONE_OF_EACH)
@pytest.mark.parametrize("damage", ["cut in half", "empty", "zeros", "text"])
def test_a_damaged_file_is_refused_with_a_reason(form: parity.Format, damage: str, tmp_path: Path) -> None:
    model = next(model for model in form.models() if "max_batch_size: 8" in model.config)
    example = prepare(form, model, tmp_path)
    file = max(
        (tmp_path / "m" / "1").rglob("*"), key=lambda path: (path.is_file(), path.stem == "model", path.stat().st_size)
    )
    whole = file.read_bytes()
    file.write_bytes(
        {"cut in half": whole[: len(whole) // 2], "empty": b"", "zeros": bytes(len(whole)), "text": b"no model\n"}[
            damage
        ]
    )
    with pytest.raises(RemoraError) as refused:
        answer_once(form, example)
    assert str(refused.value)
    if form.name != "python":  # whose errors are its code's own
        assert str(tmp_path) not in str(refused.value)


def answer_once(form: parity.Format, example: Example) -> None:
    opened = open_model(find_backend(form.backend), example)
    run(opened.instance(), request_of(example.inputs, tuple(example.outputs)))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
