"""What is called of TensorRT, held against NVIDIA's own Python bindings; no engine is read and no GPU is needed.

The bindings can be installed without the libraries that they call, of which they need a few functions to be imported. A
library with these names, which do nothing, is built and loaded first; then the bindings tell their classes' signatures.
`make test-tensorrt-bindings` runs this.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
import shutil
import subprocess
from typing import Any

import pytest

from remora_runtimes.tensorrt.context import DATATYPES

_MISSING = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry",
    "getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins",
)  # fmt: skip
_LIBRARIES = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_bindings") is None,
        reason="TensorRT's bindings are not installed: make test-tensorrt-bindings",
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)"),
]


@pytest.fixture(scope="module")
def trt(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The bindings' module."""
    folder = tmp_path_factory.mktemp("tensorrt")
    version = importlib.import_module("importlib.metadata").version
    major = next(
        version(f"tensorrt_{name}_bindings").partition(".")[0]
        for name in ("cu12", "cu13")
        if importlib.util.find_spec("tensorrt_bindings") and _installed(f"tensorrt_{name}_bindings")
    )
    source = folder / "empty.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in _MISSING))
    for library in _LIBRARIES:
        name = f"{library}.so.{major}"
        built = folder / name
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(built), f"-Wl,-soname,{name}"], check=True)
        ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)
    return importlib.import_module("tensorrt_bindings")


def _installed(distribution: str) -> bool:
    metadata = importlib.import_module("importlib.metadata")
    try:
        return bool(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return False


CALLS = {
    "ICudaEngine": {
        "get_tensor_name": ("index",),
        "get_tensor_dtype": ("name",),
        "get_tensor_mode": ("name",),
        "get_tensor_format": ("name", "profile_index"),
        "get_tensor_shape": ("name",),
        "is_shape_inference_io": ("name",),
        "get_tensor_profile_shape": ("name", "profile_index"),
        "create_execution_context": ("strategy",),
    },
    "IExecutionContext": {
        "set_optimization_profile_async": ("profile_index", "stream_handle"),
        "set_input_shape": ("name", "shape"),
        "set_tensor_address": ("name", "memory"),
        "infer_shapes": (),
        "get_tensor_shape": ("name",),
        "execute_async_v3": ("stream_handle",),
    },
    "Runtime": {"__init__": ("logger",), "deserialize_cuda_engine": ("serialized_engine",)},
    "ILogger": {"__init__": (), "log": ("severity", "msg")},
}
"""The methods that `tensorrt_context` calls, and their parameters by place."""


@pytest.mark.parametrize(("kind", "method"), [(kind, method) for kind in CALLS for method in CALLS[kind]])
def test_a_method_that_is_called_takes_what_it_is_given(trt: Any, kind: str, method: str) -> None:
    text = getattr(getattr(trt, kind), method).__doc__
    found = [re.findall(r"(?:^|, )(\w+): ", line)[1:] for line in re.findall(rf"{method}\((self: .*)\)", text)]
    assert list(CALLS[kind][method]) in found, text


def test_the_fakes_have_the_parameters_of_the_real_ones() -> None:
    import inspect

    fakes = importlib.import_module("support.models.tensorrt_fakes")
    for kind, fake in (("ICudaEngine", fakes.FakeEngine), ("IExecutionContext", fakes.FakeContext)):
        for method, parameters in CALLS[kind].items():
            given = [name for name in inspect.signature(getattr(fake, method)).parameters if name != "self"]
            assert len(given) == len(parameters) or method == "create_execution_context", (kind, method, given)


def test_properties_and_names_are_there(trt: Any) -> None:
    for name in ("num_io_tensors", "num_optimization_profiles"):
        assert isinstance(getattr(trt.ICudaEngine, name), property)
    assert tuple(trt.Dims([2, -1])) == (2, -1)
    assert trt.Dims([2, -1])[0] == 2
    assert set(DATATYPES) <= set(trt.DataType.__members__)
    assert "LINEAR" in trt.TensorFormat.__members__
    assert {"INPUT", "OUTPUT"} <= set(trt.TensorIOMode.__members__)
    assert {"ERROR", "INTERNAL_ERROR"} <= set(trt.ILogger.Severity.__members__)


def test_a_log_can_be_written_in_python_and_is_taken(trt: Any) -> None:
    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            pass

    assert trt.init_libnvinfer_plugins(Log(), "") in (True, False)
    with pytest.raises(TypeError, match="nullptr"):  # from the library that does nothing
        trt.Runtime(Log())
