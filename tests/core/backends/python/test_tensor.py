"""Tensors of Python models: datatypes, bytes, DLPack with numpy and torch, and the functions around them."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.backends import triton_python_backend_utils as pb_utils
from remora.backends.python.dlpack import DLPackError, export_bfloat16, import_tensor
from remora.backends.python.messages import parameters_text
from remora.backends.python.tensor import DATATYPES
from remora.messages import DTYPES
from remora.tensors.device import CudaMemory, DeviceArray, HostMemory
from support.engine.fakes import UntouchableMemory
from support.models.cuda_stand_in import StandIn

NUMERIC = [name for name in DTYPES if name not in ("BYTES", "BF16")]
has_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: pip install torch")


def bfloat16(values: list[int], *shape: int) -> pb_utils.Tensor:
    return pb_utils.Tensor.received("x", "BF16", np.array(values, np.uint16).reshape(shape or (-1,)))


@pytest.mark.parametrize("datatype", NUMERIC)
def test_every_datatype_goes_through_numpy_and_dlpack(datatype: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(DTYPES[datatype])
    tensor = pb_utils.Tensor("x", array)
    assert tensor.as_numpy() is array
    assert (tensor.name(), tensor.shape(), tensor.is_cpu()) == ("x", [2, 3], True)
    assert DATATYPES[tensor.triton_dtype()] == datatype
    for source in (tensor, tensor.to_dlpack()):
        back = pb_utils.Tensor.from_dlpack("y", source)
        assert back.message().datatype == datatype
        assert np.shares_memory(back._array, array)
        assert back.as_numpy().tolist() == array.tolist()
    assert np.from_dlpack(tensor).tolist() == array.tolist()


def test_arrays_with_gaps_or_foreign_byte_order_become_plain_ones() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    held = pb_utils.Tensor("x", array).message().data
    assert held.flags.c_contiguous
    assert held.dtype == np.dtype("<i4")
    assert held.tolist() == array.tolist()
    scalar = pb_utils.Tensor("x", np.array(3.0)).message()
    assert (scalar.data.shape, scalar.datatype) == ((), "FP64")
    assert type(pb_utils.Tensor("x", np.ma.masked_array([1], [False])).as_numpy()) is np.ndarray


@pytest.mark.parametrize(
    "array",
    [
        np.array([b"a", "\u00e9", bytearray(b"b"), 5], object),
        np.array([b"a", "\u00e9".encode(), b"b", b"5"]),
        np.array(["a", "\u00e9", "b", "5"]),
        np.array([[np.bytes_(b"a"), "\u00e9"], [memoryview(b"b"), np.str_("5")]], object).reshape(4),
    ],
)
def test_text_bytes_and_objects_leave_as_bytes(array: Any) -> None:
    message = pb_utils.Tensor("x", array).message()
    assert message.datatype == "BYTES"
    assert message.data.dtype == object
    assert [type(item) for item in message.data] == [bytes] * 4
    assert message.data.tolist() == [b"a", "\u00e9".encode(), b"b", b"5"]


@pytest.mark.parametrize("array", [np.array([1j]), np.array(["2020"], "M8[Y]"), np.zeros(1, [("a", "i4")])])
def test_arrays_without_a_datatype_are_refused(array: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^NumPy dtype is not supported\. "):
        pb_utils.Tensor("x", array)


def test_a_tensor_has_a_name() -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        pb_utils.Tensor("", np.zeros(1))


def test_the_numbers_and_tables_are_those_of_tritons_module() -> None:
    assert (pb_utils.TRITONSERVER_MEMORY_GPU, pb_utils.TRITONSERVER_MEMORY_CPU) == (0, 1)
    assert len(pb_utils.TRITON_STRING_TO_NUMPY) == 13
    assert pb_utils.TRITON_STRING_TO_NUMPY["TYPE_STRING"] is np.object_
    assert pb_utils.TRITON_STRING_TO_NUMPY["TYPE_BOOL"] is bool


@pytest.mark.parametrize(("name", "value"), [("x", [1, 2]), (5, np.zeros(1)), ("x", None)])
def test_what_is_no_array_is_refused(name: Any, value: Any) -> None:
    with pytest.raises(TypeError):
        pb_utils.Tensor(name, value)


def test_bfloat16_is_not_for_numpy_and_strings_are_not_for_dlpack() -> None:
    with pytest.raises(pb_utils.TritonModelException) as caught:
        bfloat16([1]).as_numpy()
    assert str(caught.value) == (
        "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
    )
    with pytest.raises(pb_utils.TritonModelException) as caught:
        pb_utils.Tensor("x", np.array([b"a"], object)).to_dlpack()
    assert caught.value.message() == "DLPack does not have support for string tensors."


def test_bfloat16_goes_through_a_capsule_without_a_copy() -> None:
    tensor = bfloat16([0x3F80, 0x4000, 0, 1], 2, 2)
    back = pb_utils.Tensor.from_dlpack("y", tensor.to_dlpack())
    assert (back.name(), back.shape(), back.triton_dtype()) == ("y", [2, 2], 14)
    message = back.message()
    assert (message.datatype, message.data.tolist()) == ("BF16", [[0x3F80, 0x4000], [0, 1]])
    assert np.shares_memory(back._array, tensor._array)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (1, 1)])
def test_bfloat16_of_unusual_shapes(shape: tuple[int, ...]) -> None:
    tensor = pb_utils.Tensor.received("x", "BF16", np.full(shape, 7, np.uint16))
    back = pb_utils.Tensor.from_dlpack("y", tensor)
    assert back._array.tolist() == tensor._array.tolist()
    assert back.shape() == list(shape)


def test_memory_lives_as_long_as_a_capsule_or_what_was_made_of_it() -> None:
    def exported() -> tuple[object, weakref.ref[Any]]:
        bits = np.arange(4, dtype=np.uint16)
        return export_bfloat16(bits), weakref.ref(bits)

    unused, first = exported()
    used, second = exported()
    taken = import_tensor(used)[1]
    gc.collect()
    assert taken.tolist() == [0, 1, 2, 3]
    assert first() is not None
    del unused, used
    gc.collect()
    assert first() is None
    assert second() is not None
    del taken
    gc.collect()
    assert second() is None


def test_a_capsule_serves_once() -> None:
    capsule = bfloat16([1]).to_dlpack()
    import_tensor(capsule)
    for wrong in (capsule, 5):
        with pytest.raises(DLPackError, match=r"Provided tensor is not supported\. Tensor must be a DLPack capsule"):
            import_tensor(wrong)


def test_a_tensor_of_another_device_is_brought_over_or_refused() -> None:
    class Elsewhere:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 10, 0

        def __dlpack__(self, **wanted: Any) -> Any:
            if wanted != {"dl_device": (1, 0), "copy": True}:
                raise BufferError
            return np.arange(2).__dlpack__()

    class Stuck(Elsewhere):
        def __dlpack__(self, **wanted: Any) -> Any:
            raise BufferError

    assert pb_utils.Tensor.from_dlpack("x", Elsewhere()).as_numpy().tolist() == [0, 1]
    with pytest.raises(pb_utils.TritonModelException, match="device type 10: move it to the CPU"):
        pb_utils.Tensor.from_dlpack("x", Stuck())
    with pytest.raises(BufferError):
        bfloat16([1]).__dlpack__(dl_device=(2, 0))


def test_a_tensor_on_a_gpu_stays_there_and_says_so(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora.tensors.device._cuda_memory", partial(CudaMemory, stand_in.runtime))
    memory = UntouchableMemory()
    pointer = DeviceArray("FP32", (2, 3), memory, 4096, None)
    tensor = pb_utils.Tensor.from_dlpack("x", pointer)
    assert (tensor.is_cpu(), tensor.shape(), tensor.__dlpack_device__()) == (False, [2, 3], (2, 0))
    assert tensor.triton_dtype() == 11  # TYPE_FP32
    with pytest.raises(pb_utils.TritonModelException, match="stored in GPU and cannot be converted to NumPy"):
        tensor.as_numpy()
    again = pb_utils.Tensor.from_dlpack("y", tensor.to_dlpack()).message(keep_on_device=True).data
    assert isinstance(again, DeviceArray)
    assert again.address == 4096


def test_an_input_on_a_device_goes_back_as_it_is_only_where_it_may_stay() -> None:
    values = np.arange(4, dtype="f4")
    given = DeviceArray("FP32", values.shape, HostMemory(), values.ctypes.data, values)
    tensor = pb_utils.Tensor.received("x", "FP32", given.as_array())
    assert tensor.message([tensor], keep_on_device=True).data is given
    back = tensor.message([tensor]).data
    assert type(back) is np.ndarray
    assert back.tolist() == values.tolist()


@has_torch
def test_torch_takes_and_gives_every_tensor_bfloat16_included() -> None:
    import torch.utils.dlpack

    taken = torch.utils.dlpack.from_dlpack(bfloat16([0x3F80, 0x4000, 0xBF80]))
    assert taken.dtype == torch.bfloat16
    assert taken.tolist() == [1.0, 2.0, -1.0]
    assert torch.utils.dlpack.from_dlpack(bfloat16([0x3F80]).to_dlpack()).tolist() == [1.0]
    source = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    given_back = pb_utils.Tensor.from_dlpack("x", source)
    source += 1
    assert torch.utils.dlpack.from_dlpack(given_back).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert pb_utils.Tensor.from_dlpack("x", source[1:]).shape() == [1, 3]
    for dtype in (torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool):
        whole = torch.ones(2, dtype=dtype)
        assert torch.equal(torch.utils.dlpack.from_dlpack(pb_utils.Tensor.from_dlpack("x", whole)), whole)


@has_torch
def test_torch_tensors_that_are_not_c_ordered_are_refused_with_tritons_text() -> None:
    import torch.utils.dlpack

    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(pb_utils.TritonModelException) as caught:
            pb_utils.Tensor.from_dlpack("x", torch.ones(2, 3, dtype=dtype).T)
        assert caught.value.message() == (
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )


@given(st.lists(st.binary(max_size=20), min_size=1))
def test_serialized_bytes_come_back(elements: list[bytes]) -> None:
    array = np.array([*elements, None], object)[:-1]
    encoded = pb_utils.serialize_byte_tensor(array)
    assert encoded is not None
    assert pb_utils.deserialize_bytes_tensor(encoded).tolist() == elements
    with pytest.raises(pb_utils.TritonModelException, match="element"):
        pb_utils.deserialize_bytes_tensor(encoded + b"\x05\0\0\0abcd")


def test_only_bytes_are_serialized() -> None:
    assert pb_utils.serialize_byte_tensor(np.array(["\u00e9", 5], object)) == b"\2\0\0\0\xc3\xa9\1\0\0\0005"
    assert pb_utils.serialize_byte_tensor(np.array([], object)) == ()
    assert pb_utils.serialize_byte_tensor(np.zeros(2)) is None
    assert pb_utils.deserialize_bytes_tensor(b"").shape == (0,)


def test_types_have_numbers_names_and_numpy_twins() -> None:
    for number, name in enumerate(DATATYPES):
        if name in NUMERIC:
            twin = DTYPES[name].type
            assert pb_utils.triton_to_numpy_type(number) is twin
            assert pb_utils.triton_string_to_numpy(f"TYPE_{name}") is (bool if name == "BOOL" else twin)
            assert pb_utils.numpy_to_triton_type(twin) == pb_utils.numpy_to_triton_type(np.dtype(twin)) == number
    assert pb_utils.triton_to_numpy_type(13) is pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert [pb_utils.numpy_to_triton_type(kind) for kind in (np.object_, np.bytes_, np.complex64)] == [13, 13, None]
    assert [pb_utils.triton_to_numpy_type(number) for number in (0, 14, 99)] == [None] * 3
    for unknown in ("TYPE_BF16", "TYPE_X", "FP32"):
        with pytest.raises(KeyError):
            pb_utils.triton_string_to_numpy(unknown)


def test_configurations_are_looked_up_by_name() -> None:
    config = {"input": [{"name": "a", "dims": [1]}], "output": [{"name": "b"}]}
    assert pb_utils.get_input_config_by_name(config, "a") == {"name": "a", "dims": [1]}
    assert pb_utils.get_output_config_by_name(config, "b") == {"name": "b"}
    assert pb_utils.get_input_config_by_name(config, "b") is None
    assert pb_utils.get_output_config_by_name({}, "b") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(config)
    assert pb_utils.using_decoupled_model_transaction_policy({"model_transaction_policy": {"decoupled": True}})


def test_parameters_of_received_requests_are_the_text_that_triton_gives_to_models() -> None:
    parameters = {"a": 1e40, "b": 2.0**63, "c": "é", "d": 1.5, "e": 3, "f": False}
    assert parameters_text(parameters) == '{"a":1e40,"b":9223372036854776000.0,"c":"é","d":1.5,"e":3,"f":false}'


def test_responses_and_requests_are_made_of_what_they_take() -> None:
    tensor = pb_utils.Tensor("x", np.zeros(1))
    response = pb_utils.InferenceResponse([tensor], None, {"a": True})
    assert (response.has_error(), response.error(), response.parameters()) == (False, None, '{"a":true}')
    assert pb_utils.get_output_tensor_by_name(response, "x") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "y") is None
    asked = pb_utils.InferenceRequest(
        "id", 7, [tensor], ["y"], "other", 2, 3, 9,
        pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 1), parameters={"k": 1},
    )  # fmt: skip
    assert (asked.request_id(), asked.correlation_id(), asked.inputs(), asked.requested_output_names()) == (
        "id", 7, [tensor], {"y"},
    )  # fmt: skip
    assert (asked.model_name(), asked.model_version(), asked.flags(), asked.timeout(), asked.parameters()) == (
        "other", 2, 3, 9, '{"k": 1}',
    )  # fmt: skip
    asked.set_flags(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    assert asked.flags() == 2
    assert asked.preferred_memory().preferred_device_id == 1
    error = pb_utils.TritonError("text", pb_utils.TritonError.NOT_FOUND)
    assert (error.code(), error.message(), str(error)) == (pb_utils.TritonError.NOT_FOUND, "text", "text")


@pytest.mark.parametrize(
    "make",
    [
        lambda: pb_utils.InferenceResponse([None]),  # type: ignore[list-item]
        lambda: pb_utils.InferenceResponse([1]),  # type: ignore[list-item]
        lambda: pb_utils.InferenceResponse([], "error"),  # type: ignore[arg-type]
        lambda: pb_utils.InferenceResponse([], None, {"a": [1]}),  # type: ignore[dict-item]
        lambda: pb_utils.InferenceResponse([], None, {1: 1}),  # type: ignore[dict-item]
        lambda: pb_utils.InferenceRequest(inputs=[1]),  # type: ignore[list-item]
        lambda: pb_utils.TritonError(5),  # type: ignore[arg-type]
    ],
)
def test_what_they_do_not_take_is_refused(make: Any) -> None:
    with pytest.raises((TypeError, pb_utils.TritonModelException)):
        make()


def test_a_call_outside_a_model_is_refused() -> None:
    for ask in (pb_utils.get_model_dir, lambda: pb_utils.load_model("x"), lambda: pb_utils.is_model_ready("x")):
        with pytest.raises(pb_utils.TritonModelException):
            ask()
