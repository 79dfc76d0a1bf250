"""Fields of a V2 gRPC inference request as plain data, with Triton's errors.

`remora.protocols.grpc.infer` reads and writes the bytes. Refusals are kept as data where Triton would report another
error first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from remora.errors import InvalidArgumentError, MalformedError, RemoraError, error_of
from remora.messages import DTYPES, Buffer, Data, InferForm, InputSpec, OutputSpec, Parameter
from remora.proto import inference_pb2 as pb
from remora.protocols.rest.request import MAX_TENSORS, too_many
from remora.protocols.sequence_ids import checked_id
from remora.tensors.shared_memory import Place

_UINT64 = 2**64 - 1


class Source(NamedTuple):
    """Source of one input's values.

    It is the message's typed contents, shared memory, or else the next raw entry.
    """

    explicit: bool = False
    data: Data = None
    refused: RemoraError | None = None
    place: Place | None = None


class InferHeader(NamedTuple):
    """Contents of a request besides names, id and raw bytes.

    Refusals are kept here until Triton's order of checks reaches them.
    """

    form: InferForm
    sources: tuple[Source, ...]
    plain: bool
    empty_final: bool = False
    refused: RemoraError | None = None
    refused_outputs: RemoraError | None = None
    places: tuple[tuple[str, Place], ...] = ()
    """Outputs that are written to shared memory."""


def read_head(request: pb.ModelInferRequest) -> InferHeader:
    """Return the contents of a parsed request, whatever its raw entries.

    Raises InvalidArgumentError only for too many tensors.
    """
    if len(request.inputs) + len(request.outputs) > MAX_TENSORS:
        raise too_many()
    inputs = tuple(
        InputSpec(each.name, each.datatype if each.datatype in DTYPES else "<invalid>", tuple(each.shape))
        for each in request.inputs
    )
    sources = tuple(_source(each, request.model_name) for each in request.inputs)
    plain = not any(source.explicit or source.refused or source.place for source in sources)
    try:
        fields, parameters, empty_final = _read_parameters(request.parameters)
    except RemoraError as error:
        return InferHeader(InferForm(inputs), sources, plain, refused=error.with_traceback(None))
    try:
        outputs = tuple(OutputSpec(each.name, _classes(each)) for each in request.outputs)
        places = tuple(
            (each.name, place) for each in request.outputs if (place := _place_of(each.name, each.parameters))
        )
    except RemoraError as error:
        form = InferForm(inputs, parameters=parameters, **fields)
        return InferHeader(form, sources, plain, empty_final, refused_outputs=error.with_traceback(None))
    return InferHeader(
        InferForm(inputs, outputs, parameters=parameters, **fields), sources, plain, empty_final, places=places
    )


# The typed fields in the order in which Triton checks them, and the datatypes of each [R05]; a refusal names the first.
_TYPED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("bool_contents", ("BOOL",), "?"),
    ("int_contents", ("INT32", "INT8", "INT16"), "<i4"),
    ("int64_contents", ("INT64",), "<i8"),
    ("uint_contents", ("UINT32", "UINT8", "UINT16"), "<u4"),
    ("uint64_contents", ("UINT64",), "<u8"),
    ("fp32_contents", ("FP32",), "<f4"),
    ("fp64_contents", ("FP64",), "<f8"),
    ("bytes_contents", ("BYTES",), "O"),
)


def _source(tensor: pb.ModelInferRequest.InferInputTensor, model: str) -> Source:
    explicit = tensor.HasField("contents")
    try:
        place = _place_of(tensor.name, tensor.parameters)
    except RemoraError as error:
        return Source(refused=error.with_traceback(None))
    if place is not None and explicit:
        text = f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' for model"
        return Source(refused=InvalidArgumentError(f"{text} '{model}'"))
    if place is not None:
        return Source(place=place)
    if not explicit:
        return Source()
    where = f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{model}'"
    wanted = tensor.datatype if tensor.datatype in DTYPES else "<invalid>"
    data: Data = None
    for field, datatypes, wire in _TYPED:
        values = getattr(tensor.contents, field)
        if not values:
            continue
        if data is not None:
            return Source(True, refused=InvalidArgumentError(f"{where}, binary data was already supplied."))
        if wanted not in datatypes:
            text = f"{where} of type '{datatypes[0]}', expected datatype '{wanted}'"
            return Source(True, refused=InvalidArgumentError(text))
        if wanted == "BYTES":
            data = list(values)
        else:
            # Narrower integers keep their low bits, as Triton's cast does.
            array = np.fromiter(values, wire, len(values)).astype(DTYPES[wanted], copy=False)
            array.flags.writeable = False
            data = array
    return Source(True, b"" if data is None else data)


def _place_of(tensor: str, parameters: Mapping[str, pb.InferParameter]) -> Place | None:
    """Return the place of a tensor in shared memory, or None.

    Raises InvalidArgumentError for an incomplete place.
    """
    if "shared_memory_region" in parameters:
        if parameters["shared_memory_region"].WhichOneof("parameter_choice") != "string_param":
            raise InvalidArgumentError(
                f"invalid value type for 'shared_memory_region' parameter for tensor '{tensor}', expected string_param."
            )
        numbers = [_number(tensor, key, parameters) for key in ("shared_memory_offset", "shared_memory_byte_size")]
        if "shared_memory_byte_size" not in parameters:
            raise InvalidArgumentError(
                "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor "
                f"'{tensor}'"
            )
        return Place(parameters["shared_memory_region"].string_param, *numbers)
    for key in ("shared_memory_offset", "shared_memory_byte_size"):
        if key in parameters:
            raise InvalidArgumentError(
                f"'{key}' can not be specified without 'shared_memory_region' parameter for tensor '{tensor}'"
            )
    return None


def _number(tensor: str, key: str, parameters: Mapping[str, pb.InferParameter]) -> int:
    if key not in parameters:
        return 0
    if parameters[key].WhichOneof("parameter_choice") != "int64_param":
        raise InvalidArgumentError(
            f"invalid value type for '{key}' parameter for tensor '{tensor}', expected int64_param."
        )
    return parameters[key].int64_param


def _classes(output: pb.ModelInferRequest.InferRequestedOutputTensor) -> int:
    """Return the number of classes requested of an output, 0 for its values [R08]."""
    place = _place_of(output.name, output.parameters)
    classes = 0
    if "classification" in output.parameters:
        parameter = output.parameters["classification"]
        if parameter.WhichOneof("parameter_choice") != "int64_param":
            raise InvalidArgumentError("invalid value type for 'classification' parameter, expected int64_param")
        classes = parameter.int64_param
        if classes <= 0:
            raise InvalidArgumentError("invalid value for 'classification' parameter, expected >= 0")
    if place is not None and classes:
        raise InvalidArgumentError("output can't set both 'shared_memory_region' and 'classification'")
    return classes


_EMPTY_FINAL = "triton_enable_empty_final_response"
_RESERVED = {
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param",),
    _EMPTY_FINAL: ("bool_param",),
}
_CUSTOM = ("int64_param", "bool_param", "string_param", "double_param")


def _read_parameters(
    parameters: Mapping[str, pb.InferParameter],
) -> tuple[dict[str, Any], dict[str, Parameter], bool]:
    """Sort parameters into the form's own fields and custom ones [R07].

    The third value is True if the client wants an empty final response.
    """
    fields: dict[str, Any] = {}
    custom: dict[str, Parameter] = {}
    empty_final = False
    for key, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        allowed = _RESERVED.get(key, _CUSTOM)
        if key.startswith("triton_") and key != _EMPTY_FINAL:
            raise InvalidArgumentError(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {_EMPTY_FINAL}"
            )
        if choice is None or choice not in allowed:
            expected = " or ".join(allowed) if key in _RESERVED else "int64_param, bool_param, or string_param"
            raise InvalidArgumentError(f"invalid value type for '{key}' parameter, expected {expected}.")
        value = getattr(parameter, choice)
        if key == "priority" and value < 0:
            raise InvalidArgumentError("invalid value for 'priority', expected value >= 0.")
        if key == _EMPTY_FINAL:
            empty_final = value
        elif key == "timeout":
            fields["timeout_us"] = value & _UINT64  # Triton keeps timeouts and sequence ids as unsigned numbers
        elif key in _RESERVED:
            if key == "sequence_id":
                value = value & _UINT64 if choice == "int64_param" else checked_id(value)
            fields[key] = value
        else:
            custom[key] = value
    return fields, custom, empty_final


def again(error: RemoraError) -> RemoraError:
    """Return a new exception for a kept refusal.

    Raising the same exception twice would grow its traceback.
    """
    return error_of(error.code, error.message)


def version_of(text: str) -> int:
    """Return the number of a model version in a message, -1 (the newest) for "".

    Reads like C's ``stol``, as Triton does [R04].
    """
    if not text:
        return -1
    match = _LEADING_INTEGER.match(text)
    version = int(match[1] + match[2]) if match else 2**63
    if not -(2**63) <= version < 2**63:
        raise InvalidArgumentError(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    if version < 0:
        raise InvalidArgumentError(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    return version


_LEADING_INTEGER = re.compile(r"\s*([+-]?)0*([0-9]{1,19})(?![0-9])", re.ASCII)

_M = TypeVar("_M", bound=Message)


def parsed(kind: type[_M], message: Buffer) -> _M:
    """Parse the bytes as a message.

    Raises MalformedError (INTERNAL, as gRPC itself) for bytes that are not such a message.
    """
    try:
        return kind.FromString(bytes(message))
    except DecodeError as error:
        raise MalformedError(f"Unable to parse request: the bytes are not a valid {kind.DESCRIPTOR.name}") from error
