"""Reading one V2 inference request; the law: errors have the order, the texts and the kinds of Triton's [H13].

That order is id, parameters, each input with its bytes, surplus bytes, outputs. What needs the model to be judged
(names, datatypes, shapes, sizes) passes through untouched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remora.errors import InvalidArgumentError, MalformedError, given_twice
from remora.messages import DTYPES, Data, InferForm, InputSpec, OutputSpec, Parameter
from remora.protocols.json import access
from remora.protocols.json import tensors as json_tensors
from remora.protocols.rest.response import ReplyFormat
from remora.protocols.sequence_ids import checked_id
from remora.tensors.shared_memory import DISABLED, Place, Regions, Target

MAX_DIM = 2**63 - 1
MAX_CLASSES = 1_000_000
"""More classes than that are as good as all of them [X06]."""
MAX_TENSORS = 65_536
"""How many tensors one request may name: each costs far more time and memory here than its few bytes on the wire."""
_FLOAT_BYTES = 4
_MORE_VALUES = 1024 * 1024


class RequestLimits(NamedTuple):
    """What one request may take [H28].

    ``input_bytes`` is the most that one JSON input may have as a tensor; as many arrays in each other as ``json_depth``
    are refused. ``json_values`` bounds how many values one JSON text may hold, for each takes some 32 bytes while it is
    read; an array counts as two and an object as eight. None stands for as many as a tensor of floats of
    ``input_bytes`` needs.
    """

    input_bytes: int = 64 * 1024 * 1024
    json_depth: int = 100
    json_values: int | None = None


DEFAULT_LIMITS = RequestLimits()


class Reading(NamedTuple):
    """A request that was read. ``slices`` tell where in the body its tensors are, None when some came as JSON."""

    form: InferForm
    data: list[Data]
    reply: ReplyFormat
    slices: tuple[slice, ...] | None


@dataclass(slots=True)
class _Parameters:
    """The request's parameters, sorted into what the engine knows by name and the rest [H23]."""

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
    """The request in ``body``, whose first ``header_length`` bytes are JSON. ``model`` is named in some errors.

    Raises MalformedError for JSON of another form, InvalidArgumentError for contradictions in it and for tensors
    beyond the limits, and what ``regions`` raise for tensors in shared memory.
    """
    header = body[:header_length]
    check_values(header, limits)
    request = access.document(header)
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
    """Refuse JSON text of more values than may be read at once, before it is read. Raises InvalidArgumentError."""
    # Every value but the first follows a comma or opens a container, so the text tells before anything is built.
    most = limits.input_bytes // _FLOAT_BYTES + _MORE_VALUES if limits.json_values is None else limits.json_values
    if len(header) > most:
        text = bytes(header)
        values = text.count(b",") + 2 * text.count(b"[") + 8 * text.count(b"{")
        if values > most:
            raise InvalidArgumentError(
                f"request JSON holds about {values} values, more than the {most} that are read at once. "
                "Send large tensors in the binary data format."
            )


def _parameters(request: Any) -> _Parameters:
    found = _Parameters()
    present, values = access.find(request, "parameters")
    if not present:
        return found
    if not isinstance(values, dict):
        raise MalformedError(f"failed to get request params.: {access.NOT_OBJECT}")
    for key, value in values.items():
        match key:
            case "sequence_id":
                found.sequence_id = value if access.is_uint(value) else checked_id(access.as_text(value, key))
            case "sequence_start":
                found.sequence_start = access.as_bool(value, key)
            case "sequence_end":
                found.sequence_end = access.as_bool(value, key)
            case "priority":
                found.priority = access.as_uint(value, key)
            case "timeout":
                found.timeout_us = access.as_uint(value, key)
            case "binary_data_output":
                found.binary_output = access.as_bool(value, key)
            case _:
                found.custom[key] = custom_parameter(key, value)
    return found


def custom_parameter(key: str, value: Any) -> Parameter:
    """A parameter the protocol does not know. Raises InvalidArgumentError [H23]."""
    if key.startswith("triton_"):
        raise InvalidArgumentError(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    return as_parameter(key, value)


def as_parameter(key: str, value: Any) -> Parameter:
    """A JSON value as a parameter, whatever its key. Raises InvalidArgumentError [H23]."""
    if isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        # Parameters travel as signed 64-bit integers or doubles.
        return value if value <= 2**63 - 1 else float(value)
    raise InvalidArgumentError(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def too_many() -> InvalidArgumentError:
    """The error for more tensors than MAX_TENSORS."""
    return InvalidArgumentError(
        f"the request names more than {MAX_TENSORS} tensors or parameters: send fewer in one request"
    )


def _tensors(request: Any, name: str) -> list[Any]:
    items = access.array_member(request, name)
    if len(items) > MAX_TENSORS:
        raise too_many()
    return items


class _Inputs:
    """Reads the inputs one after the other and hands out the body's raw bytes to those that ask for them."""

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
        """The next ``size`` bytes of the body [B01, B05]."""
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
        """The tensor in ``data``, flat. Without elements nothing of it is looked at; nor when ``count`` overflows."""
        if count == 0:
            return [] if datatype == "BYTES" else b""
        if count > MAX_DIM:  # 2.51 finds fault with the other inputs' shapes, or with this one's: so does the engine
            return None
        values = access.array_member(item, "data")
        limits = self._limits
        if datatype == "BYTES":
            return json_tensors.strings(name, values, limits.json_depth, limits.input_bytes)
        return json_tensors.array(name, datatype, values, count, limits.json_depth, limits.input_bytes)


def _check_one_source(item: Any, parameters: Any) -> None:
    """An input's values come from exactly one place [H16]."""
    sources = (
        ("data", access.find(item, "data")[0]),
        ("binary_data_size", access.find(parameters, "binary_data_size")[0]),
        ("shared_memory_region", access.find(parameters, "shared_memory_region")[0]),
    )
    given = [name for name, present in sources if present]
    if len(given) != 1:
        found = " set " + " ".join(f"'{name}'" for name in given) if given else " no field is set"
        raise InvalidArgumentError(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But{found}"
        )


def _shape(item: Any, name: str) -> tuple[int, ...]:
    dims = tuple([access.as_uint(dim, "shape") for dim in access.array_member(item, "shape")])
    if any(dim > MAX_DIM for dim in dims):
        raise InvalidArgumentError(f"input '{name}' has a dimension beyond {MAX_DIM} in its shape {list(dims)}")
    return dims


def _count(shape: tuple[int, ...]) -> int:
    """How many elements a shape has, or some number beyond MAX_DIM: the product of many dims would take minutes.

    Triton counts no element in a tensor without dims, where numpy counts one.
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
    """Refuse a tensor whose bytes do not fit in 64 bits, with the text of Triton's newer releases."""
    size = DTYPES[datatype].itemsize if datatype in DTYPES and datatype != "BYTES" else 1
    if count <= MAX_DIM < count * size:
        raise InvalidArgumentError(
            f"byte size overflow for input '{name}': element count ({count}) * data type size ({size}) exceeds maximum "
            f"allowed size ({MAX_DIM})"
        )


def _place(parameters: Any) -> Place | None:
    """Where in shared memory a tensor lies, if it does; offset and size are checked even if not [X04]."""
    used, region = access.find(parameters, "shared_memory_region")
    if used:
        access.as_text(region, "shared_memory_region")
    numbers = []
    for key in ("shared_memory_offset", "shared_memory_byte_size"):
        present, value = access.find(parameters, key)
        numbers.append(access.as_uint(value, key) if present else 0)
    return Place(region, *numbers) if used else None


def _outputs(request: Any, regions: Regions) -> tuple[tuple[OutputSpec, ...], dict[str, bool], dict[str, Target]]:
    """The requested outputs, which of them are to be binary [B06], and which go into shared memory."""
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
        asked, binary = access.find(parameters, "binary_data")
        specs.append(OutputSpec(name, min(count, MAX_CLASSES)))
        listed.setdefault(name, access.as_bool(binary, "binary_data") if asked else False)
    return tuple(specs), listed, places


def _check_output_region(parameters: Any) -> None:
    """An output in shared memory is neither ranked nor sent along [X05]."""
    if not access.find(parameters, "shared_memory_region")[0]:
        return
    if access.find(parameters, "classification")[0]:
        raise InvalidArgumentError("Output can't set both 'shared_memory_region' and 'classification'")
    asked, binary = access.find(parameters, "binary_data")
    if not asked:
        return
    if not isinstance(binary, bool):
        raise MalformedError(f"Unable to set 'binary_data': {access.NOT_BOOL}")
    if binary:
        raise InvalidArgumentError("Output can't set both 'shared_memory_region' and 'binary_data'")
