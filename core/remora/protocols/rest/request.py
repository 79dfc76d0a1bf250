"""Reader of one V2 inference request, with errors in Triton's order, texts and kinds [H13].

The order is id, parameters, each input with its bytes, surplus bytes, outputs. Names, datatypes, shapes and sizes need
the model to be checked and pass unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remora.errors import InvalidArgumentError, MalformedError, given_twice
from remora.messages import DTYPES, Data, InferForm, InputSpec, OutputSpec, Parameter
from remora.protocols.json import access
from remora.protocols.json import tensors as json_tensors
from remora.protocols.json.long_lists import release
from remora.protocols.json.reader import LONG_BYTES
from remora.protocols.rest.response import ReplyFormat
from remora.protocols.sequence_ids import checked_id
from remora.tensors.shared_memory import DISABLED, Place, Regions, Target

MAX_DIM = 2**63 - 1
MAX_CLASSES = 1_000_000
"""Larger requests for classes are reduced to this number, which covers all of them [X06]."""
MAX_TENSORS = 65_536
"""Largest number of tensors in one request, because each costs far more time and memory here than on the wire."""
_FLOAT_BYTES = 4
_MORE_VALUES = 1024 * 1024
_COUNT_BYTES = 1 << 20


class RequestLimits(NamedTuple):
    """Limits of one request [H28].

    ``input_bytes`` is the largest size of a JSON input as a tensor; ``json_depth`` levels of arrays or more are
    refused. ``json_values`` bounds the values in one JSON text, because each takes some 32 bytes while it is read; an
    array counts as two and an object as eight. None allows the values of a float tensor of ``input_bytes``.
    ``slow_bytes`` is the longest JSON text that is read although orjson refuses it; longer text raises SlowTextError.
    None allows text of any length, which may take half a second.
    """

    input_bytes: int = 64 * 1024 * 1024
    json_depth: int = 100
    json_values: int | None = None
    slow_bytes: int | None = None


DEFAULT_LIMITS = RequestLimits()


class Reading(NamedTuple):
    """Request that was read.

    ``slices`` are the places of its tensors in the body, None if some came as JSON.
    """

    form: InferForm
    data: list[Data]
    reply: ReplyFormat
    slices: tuple[slice, ...] | None


@dataclass(slots=True)
class _Parameters:
    """Request parameters, sorted into the engine's own and custom ones [H23]."""

    custom: dict[str, Parameter] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    binary_output: bool = False


def read_request(
    body: memoryview, header_length: int, model: str, limits: RequestLimits, regions: Regions = DISABLED
) -> Reading:
    """Read the request in ``body``, whose first ``header_length`` bytes are JSON.

    Some errors name ``model``. Raises MalformedError for JSON of another form, InvalidArgumentError for contradictions
    in it and for tensors beyond the limits, SlowTextError (see `RequestLimits`), and what ``regions`` raise for tensors
    in shared memory.
    """
    header = body[:header_length]
    check_values(header, limits)
    request = access.document(header, slow_bytes=limits.slow_bytes)
    try:
        return _reading(request, body, header_length, model, limits, regions)
    finally:
        if header_length > LONG_BYTES:
            release(request)


def _reading(
    request: Any, body: memoryview, header_length: int, model: str, limits: RequestLimits, regions: Regions
) -> Reading:
    has_id, request_id = access.find(request, "id")
    if has_id:
        access.as_text(request_id, "id")
    parameters = _parameters(request)
    inputs = _Inputs(body, header_length, model, request_id or "", limits, regions)
    for item in _tensors(request, "inputs"):
        inputs.read(item)
    if inputs.at != len(body):
        raise InvalidArgumentError(f"unexpected additional input data for model '{model}'")
    outputs, listed, places = _outputs(request, regions)
    form = InferForm(
        inputs=tuple(inputs.specs),
        outputs=outputs,
        id=request_id or "",
        parameters=parameters.custom,
        priority=parameters.priority,
        timeout_us=parameters.timeout_us,
        sequence_id=parameters.sequence_id,
        sequence_start=parameters.sequence_start,
        sequence_end=parameters.sequence_end,
    )
    slices = tuple(inputs.slices) if len(inputs.slices) == len(inputs.specs) else None
    return Reading(form, inputs.data, ReplyFormat.of(parameters.binary_output, listed, places), slices)


def check_values(header: memoryview, limits: RequestLimits) -> None:
    """Raise InvalidArgumentError for JSON text with too many values, before it is parsed."""
    # Every value but the first follows a comma or opens a container, so counting those in the text is enough.
    most = limits.input_bytes // _FLOAT_BYTES + _MORE_VALUES if limits.json_values is None else limits.json_values
    if len(header) > most:
        values = 0
        for at in range(0, len(header), _COUNT_BYTES):  # in steps, between which other threads may run
            text = bytes(header[at : at + _COUNT_BYTES])
            values += text.count(b",") + 2 * text.count(b"[") + 8 * text.count(b"{")
        if values > most:
            raise InvalidArgumentError(
                f"request JSON holds about {values} values, more than the {most} that are read at once. "
                "Send large tensors in the binary data format."
            )


def _parameters(request: Any) -> _Parameters:
    parameters = _Parameters()
    present, values = access.find(request, "parameters")
    if not present:
        return parameters
    if not isinstance(values, dict):
        raise MalformedError(f"failed to get request params.: {access.NOT_OBJECT}")
    for key, value in values.items():
        match key:
            case "sequence_id":
                parameters.sequence_id = value if access.is_uint(value) else checked_id(access.as_text(value, key))
            case "sequence_start":
                parameters.sequence_start = access.as_bool(value, key)
            case "sequence_end":
                parameters.sequence_end = access.as_bool(value, key)
            case "priority":
                parameters.priority = access.as_uint(value, key)
            case "timeout":
                parameters.timeout_us = access.as_uint(value, key)
            case "binary_data_output":
                parameters.binary_output = access.as_bool(value, key)
            case _:
                parameters.custom[key] = custom_parameter(key, value)
    return parameters


def custom_parameter(key: str, value: Any) -> Parameter:
    """Return a parameter that the protocol does not define. Raises InvalidArgumentError [H23]."""
    if key.startswith("triton_"):
        raise InvalidArgumentError(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    return as_parameter(key, value)


def as_parameter(key: str, value: Any) -> Parameter:
    """Return a JSON value as a parameter, whatever its key. Raises InvalidArgumentError [H23]."""
    if isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        # Parameters are signed 64-bit integers or doubles.
        return value if value <= 2**63 - 1 else float(value)
    raise InvalidArgumentError(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def too_many() -> InvalidArgumentError:
    """Return the error for more tensors than MAX_TENSORS."""
    return InvalidArgumentError(
        f"the request names more than {MAX_TENSORS} tensors or parameters: send fewer in one request"
    )


def _tensors(request: Any, name: str) -> list[Any]:
    items = access.array_member(request, name)
    if len(items) > MAX_TENSORS:
        raise too_many()
    return items


class _Inputs:
    """Reader of the inputs in order, which assigns the body's raw bytes to them."""

    __slots__ = ("_body", "_id", "_limits", "_model", "_names", "_regions", "at", "data", "slices", "specs")

    def __init__(
        self, body: memoryview, at: int, model: str, request_id: str, limits: RequestLimits, regions: Regions
    ) -> None:
        self._body = body
        self._model = model
        self._id = request_id
        self._names: set[str] = set()
        self._limits = limits
        self._regions = regions
        self.at = at
        self.specs: list[InputSpec] = []
        self.data: list[Data] = []
        self.slices: list[slice] = []

    def read(self, item: Any) -> None:
        """Read the next input's JSON and take its bytes."""
        _, parameters = access.find(item, "parameters")
        _check_one_source(item, parameters)
        name = access.text_member(item, "name")
        datatype = access.text_member(item, "datatype")
        shape = _shape(item, name)
        if name in self._names:
            raise given_twice(self._id, name)
        self._names.add(name)
        self.specs.append(InputSpec(name, datatype if datatype in DTYPES else "<invalid>", shape))
        sized, size = access.find(parameters, "binary_data_size")
        if sized:
            self._take(name, access.as_uint(size, "binary_data_size"))
        elif place := _place(parameters):
            self.data.append(self._regions.view(place).toreadonly())
        else:
            count = _count(shape)
            _check_size(name, datatype, count)
            self.data.append(self._values(item, name, datatype, count))

    def _take(self, name: str, size: int) -> None:
        """Assign the next ``size`` bytes of the body [B01, B05]."""
        missing = self.at + size - len(self._body)
        if missing > 0:
            raise InvalidArgumentError(
                f"unexpected size for input '{name}', expecting {missing} additional bytes for model '{self._model}'"
            )
        place = slice(self.at, self.at + size)
        self.at += size
        self.slices.append(place)
        self.data.append(self._body[place])

    def _values(self, item: Any, name: str, datatype: str, count: int) -> Data:
        """Return the tensor in ``data``, flat.

        ``data`` is ignored without elements, and if ``count`` overflows.
        """
        if count == 0:
            return [] if datatype == "BYTES" else b""
        if count > MAX_DIM:  # Triton 2.51 reports other inputs' shapes first, then this one's; so does the engine
            return None
        values = access.array_member(item, "data")
        limits = self._limits
        if datatype == "BYTES":
            return json_tensors.strings(name, values, limits.json_depth, limits.input_bytes)
        return json_tensors.array(name, datatype, values, count, limits.json_depth, limits.input_bytes)


def _check_one_source(item: Any, parameters: Any) -> None:
    """Raise InvalidArgumentError unless the values come from exactly one place [H16]."""
    sources = (
        ("data", access.find(item, "data")[0]),
        ("binary_data_size", access.find(parameters, "binary_data_size")[0]),
        ("shared_memory_region", access.find(parameters, "shared_memory_region")[0]),
    )
    used = [name for name, present in sources if present]
    if len(used) != 1:
        problem = " set " + " ".join(f"'{name}'" for name in used) if used else " no field is set"
        raise InvalidArgumentError(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But{problem}"
        )


def _shape(item: Any, name: str) -> tuple[int, ...]:
    dims = tuple([access.as_uint(dim, "shape") for dim in access.array_member(item, "shape")])
    if any(dim > MAX_DIM for dim in dims):
        raise InvalidArgumentError(f"input '{name}' has a dimension beyond {MAX_DIM} in its shape {list(dims)}")
    return dims


def _count(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape, or some number beyond MAX_DIM.

    The product stops there because many dims would take minutes. Triton counts no element in a tensor without dims,
    where numpy counts one.
    """
    if not shape or 0 in shape:
        return 0
    count = 1
    for dim in shape:
        count *= dim
        if count > MAX_DIM:
            break
    return count


def _check_size(name: str, datatype: str, count: int) -> None:
    """Refuse a tensor of 2**63 bytes or more, with the text of Triton's newer releases."""
    size = DTYPES[datatype].itemsize if datatype in DTYPES and datatype != "BYTES" else 1
    if count <= MAX_DIM < count * size:
        raise InvalidArgumentError(
            f"byte size overflow for input '{name}': element count ({count}) * data type size ({size}) exceeds maximum "
            f"allowed size ({MAX_DIM})"
        )


def _place(parameters: Any) -> Place | None:
    """Return the place of a tensor in shared memory, or None.

    Offset and size are checked in either case [X04].
    """
    used, region = access.find(parameters, "shared_memory_region")
    if used:
        access.as_text(region, "shared_memory_region")
    numbers = []
    for key in ("shared_memory_offset", "shared_memory_byte_size"):
        present, value = access.find(parameters, key)
        numbers.append(access.as_uint(value, key) if present else 0)
    return Place(region, *numbers) if used else None


def _outputs(request: Any, regions: Regions) -> tuple[tuple[OutputSpec, ...], dict[str, bool], dict[str, Target]]:
    """Return the requested outputs, which of them are binary [B06], and those in shared memory."""
    specs: list[OutputSpec] = []
    listed: dict[str, bool] = {}
    places: dict[str, Target] = {}
    if not access.find(request, "outputs")[0]:
        return (), listed, places
    for item in _tensors(request, "outputs"):
        _, parameters = access.find(item, "parameters")
        _check_output_region(parameters)
        name = access.text_member(item, "name")
        ranked, classes = access.find(parameters, "classification")
        count = access.as_uint(classes, "classification", verb="set") if ranked else 0
        if place := _place(parameters):
            places.setdefault(name, regions.target(place))
        has_binary, binary = access.find(parameters, "binary_data")
        specs.append(OutputSpec(name, min(count, MAX_CLASSES)))
        listed.setdefault(name, access.as_bool(binary, "binary_data") if has_binary else False)
    return tuple(specs), listed, places


def _check_output_region(parameters: Any) -> None:
    """Raise for an output in shared memory that is also ranked or sent [X05]."""
    if not access.find(parameters, "shared_memory_region")[0]:
        return
    if access.find(parameters, "classification")[0]:
        raise InvalidArgumentError("Output can't set both 'shared_memory_region' and 'classification'")
    has_binary, binary = access.find(parameters, "binary_data")
    if not has_binary:
        return
    if not isinstance(binary, bool):
        raise MalformedError(f"Unable to set 'binary_data': {access.NOT_BOOL}")
    if binary:
        raise InvalidArgumentError("Output can't set both 'shared_memory_region' and 'binary_data'")
