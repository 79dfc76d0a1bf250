"""Models as shared libraries, compiled here with the system's C compiler."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.backends.registry import backend_in
from remora.engine import Engine
from remora.errors import ConfigError, InternalError, InvalidArgumentError, UnavailableError
from remora.messages import Response
from remora.testing.backend import CHECKS, Check, Example, Opened, open_model, request_of, run
from remora_runtimes.native import INCLUDE, NativeBackend
from remora_runtimes.native.calls import ABI_VERSION
from remora_runtimes.native.elf import why_incomplete
from support.models import parity_models as parity

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)")

ONE = 'input { name: "x" data_type: TYPE_FP32 dims: [1, 1] } output { name: "y" data_type: TYPE_FP32 dims: [1, 1] }'


def model(tmp_path: Path, kind: str, config: str, *defines: str) -> Example:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True, exist_ok=True)
    parity.build_native(version / "model.so", kind, *defines)
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    return Example(tmp_path / "m", {}, {})


def opened(example: Example) -> Opened:
    return open_model(NativeBackend(), example)


def example(tmp_path: Path) -> Example:
    left, right = np.arange(24, dtype="f4").reshape(2, 3, 4)
    made = model(tmp_path, "", 'backend: "native"')
    return Example(made.model_dir, {"a": left, "b": right}, {"sum": left + right, "difference": left - right})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_documentations_example_conforms(check: Check, tmp_path: Path) -> None:
    check(NativeBackend(), example(tmp_path))


def test_a_library_describes_what_the_configuration_leaves_out(tmp_path: Path) -> None:
    made = opened(example(tmp_path))
    assert [row.name for row in made.config.input] == ["a", "b"]
    assert made.config.max_batch_size == 8
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "native" max_batch_size: 2')
    assert opened(Example(tmp_path / "m", {}, {})).config.max_batch_size == 2


def test_a_bare_folder_with_a_library_is_served(tmp_path: Path) -> None:
    made = example(tmp_path)
    (tmp_path / "m" / "config.pbtxt").unlink()
    with Engine(tmp_path) as engine:
        np.testing.assert_array_equal(engine.infer("m", dict(made.inputs))["sum"], made.outputs["sum"])


def test_the_librarys_errors_keep_their_code_and_text(tmp_path: Path) -> None:
    instance = opened(model(tmp_path, "BROKEN", f'backend: "native" {ONE}')).instance()
    with pytest.raises(InvalidArgumentError, match=r"^seven is refused$"):
        run(instance, request_of({"x": np.full((1, 1), 7, "f4")}, ("y",), batches=False))
    (outcome,) = run(instance, request_of({"x": np.full((1, 1), 8, "f4")}, ("y",), batches=False))
    assert isinstance(outcome, Response)
    assert outcome.outputs[0].data == 8
    instance.close()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (0, "returned success, but it omitted the output y"),
        (1, "output 1|output 7 of 1"),
        (2, r"3 bytes for output 'y' \(FP32\) of shape \[1, 1\]"),
        (3, "18446744073709551615 bytes for output 'y'"),
        (4, r"of shape \[-1, 1\]"),
        (5, "too many dimensions"),
        (6, "remora_run returned 99 and no reason"),
    ],
)
def test_a_library_that_asks_for_what_does_not_fit_gets_nothing(tmp_path: Path, what: int, reason: str) -> None:
    instance = opened(model(tmp_path, "BROKEN", f'backend: "native" {ONE}')).instance()
    with pytest.raises(InternalError, match=reason):
        run(instance, request_of({"x": np.full((1, 1), what, "f4")}, ("y",), batches=False))
    instance.close()


def test_an_instance_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    refuse = 'parameters { key: "refuse" value { string_value: "yes" } }'
    made = opened(model(tmp_path, "BROKEN", f'backend: "native" {ONE} {refuse}'))
    with pytest.raises(UnavailableError, match="m is refused in m_0"):
        made.instance()


def test_another_version_of_the_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"built for version 99 of remora_backend.h, this engine has {ABI_VERSION}"):
        opened(model(tmp_path, "IDENTITY", f'backend: "native" {ONE}', "-DABI=99"))


def test_a_library_without_the_functions_is_refused(tmp_path: Path) -> None:
    made = model(tmp_path, "IDENTITY", f'backend: "native" {ONE}', "-Dremora_run=other_run")
    with pytest.raises(ConfigError, match="does not export remora_run: build it with"):
        opened(made)


def test_a_changed_library_is_loaded_anew(tmp_path: Path) -> None:
    first = opened(model(tmp_path, "SINGLE", f'backend: "native" {ONE}'))
    x = np.zeros((1, 1), "f4")
    found = []
    for kind in ("SINGLE", "IDENTITY"):
        made = first if kind == "SINGLE" else opened(model(tmp_path, kind, f'backend: "native" {ONE}'))
        instance = made.instance()
        (outcome,) = run(instance, request_of({"x": x}, ("y",), batches=False))
        assert isinstance(outcome, Response)
        found.append(float(outcome.outputs[0].data[0, 0]))
        instance.close()
        made.model.close()
    assert found == [1, 0]


def test_a_library_cut_anywhere_never_reaches_the_loader(tmp_path: Path) -> None:
    whole = (model(tmp_path, "IDENTITY", f'backend: "native" {ONE}').model_dir / "1" / "model.so").read_bytes()
    assert why_incomplete(tmp_path / "m" / "1" / "model.so") == ""
    part = tmp_path / "part.so"
    (begin,) = struct.unpack_from("<Q", whole, 32)
    for length in (0, 3, 5, 63, begin, begin + 60, len(whole) // 3):
        part.write_bytes(whole[:length])
        assert why_incomplete(part)


@given(st.binary(max_size=200))
def test_no_bytes_confuse_the_check(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "bytes.so"
    for head in (b"", b"\x7fELF\x02\x01", b"\x7fELF\x01\x01"):
        file.write_bytes(head + data)
        assert isinstance(why_incomplete(file), str)


def test_a_backend_directory_holds_libraries_for_many_models(tmp_path: Path) -> None:
    folder = tmp_path / "backends" / "adder"
    folder.mkdir(parents=True)
    parity.build_native(folder / "libremora_adder.so", "")
    for name in ("one", "two"):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text('backend: "adder"')
    with Engine(tmp_path / "models", backend_directory=str(tmp_path / "backends")) as engine:
        a = np.ones((1, 2), "f4")
        assert engine.infer("two", {"a": a, "b": a})["sum"].tolist() == [[2, 2]]


def test_a_library_for_tritons_api_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "libtriton_other.so").touch()
    with pytest.raises(ConfigError, match=r"for Triton's C API.*libremora_other\.so"):
        backend_in(tmp_path, "other")


def test_the_header_says_the_version_that_the_engine_speaks() -> None:
    header = (INCLUDE / "remora_backend.h").read_text()
    assert f"#define REMORA_ABI_VERSION {ABI_VERSION}\n" in header
