"""Command `remora infer`, which sends one V2 inference request and prints the response."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remora.api.http import serialized, with_workers
from remora.api.models import NOT_DESCRIBED, FunctionArguments, read_arguments
from remora.calls import ModelInfo, TensorInfo
from remora.cli.client import ApiClient, EngineClient, call_json, model_path, open_client, raise_for_status
from remora.cli.interrupts import open_models
from remora.cli.output import UsageError, columns, warnings_shown
from remora.errors import InvalidArgumentError, MalformedError, RemoraError
from remora.messages import DTYPES, Array, Tensor
from remora.system.clock import Clock, SystemClock
from remora.system.json_text import read_json
from remora_tools.client.inputs import InferRequest, array_inputs, random_inputs, read_document, typed_inputs

_FIRST = 6
"""Number of values of an output in the table."""
_LONGEST_TEXT = 40


class InferReply(NamedTuple):
    """Decoded response to an inference request."""

    model: str
    version: str
    id: str
    parameters: dict[str, Any]
    outputs: tuple[Tensor, ...]


def infer(options: argparse.Namespace, clock: Clock | None = None) -> int:
    """Run the command. Raises RemoraError, UsageError, OSError for unreadable files."""
    if options.repeat < 1:
        raise UsageError("--repeat must be 1 or more")
    if not (options.random or options.json or options.npy or options.input):
        raise UsageError("no inputs: pass --random, --json FILE, --npy NAME=FILE or --input NAME=VALUE,...")
    with _open_client(options) as client:
        path = model_path(options.model, options.model_version)
        info = read_metadata(call_json(client, "GET", path))
        request = make_request(info, options, arguments_of(client, path) if options.random else NOT_DESCRIBED)
        body, header_length = encode_request(request)
        times_ns: list[int] = []
        now = (clock or SystemClock()).monotonic_ns
        for _ in range(options.repeat):
            begin_ns = now()
            answer = client.exchange("POST", f"{path}/infer", body, header_length)
            times_ns.append(now() - begin_ns)
            raise_for_status(client, answer)
    reply = decode_reply(answer.body, answer.header_length)
    print(_as_json(reply, times_ns) if options.json_out else _as_table(reply, times_ns))
    return 0


@contextmanager
def _open_client(options: argparse.Namespace) -> Iterator[ApiClient]:
    if options.repository is None:
        client = open_client(options)
        try:
            yield client
        finally:
            client.close()
        return
    from remora.engine import Engine
    from remora.options import EngineOptions

    # Load only this model, because the repository may hold many more.
    settings = EngineOptions(paths=(options.repository,), model_control_mode="explicit", load_model=(options.model,))
    with warnings_shown("remora infer"), open_models(Engine(options=with_workers(settings))) as engine:
        yield EngineClient(engine, options.timeout)


# -- the request ------------------------------------------------------------------------------------------------------


def arguments_of(client: ApiClient, path: str) -> FunctionArguments:
    """Return the arguments of a model's function; none for other models and other servers."""
    try:
        config = call_json(client, "GET", f"{path}/config")
        parameters = {str(key): str(value.get("string_value", "")) for key, value in config["parameters"].items()}
    except (RemoraError, KeyError, TypeError, AttributeError):
        return NOT_DESCRIBED
    return read_arguments(parameters)


def make_request(info: ModelInfo, options: argparse.Namespace, arguments: FunctionArguments) -> InferRequest:
    """Build the request from the command's options and the files that they name.

    Values in arguments override those in files. Raises InvalidArgumentError, UsageError, OSError.
    """
    shapes = dict(options.shape)
    request = InferRequest(())
    if options.json:
        request = read_document(info, _read_json(options.json), shapes)
    inputs = {tensor.name: tensor for tensor in request.inputs}
    arrays = {name: _read_npy(Path(file)) for name, file in options.npy}
    for tensor in (*array_inputs(info, arrays, shapes), *typed_inputs(info, dict(options.input), shapes)):
        inputs[tensor.name] = tensor
    if options.random:
        missing = [tensor for tensor in info.inputs if tensor.name not in inputs]
        inputs |= {tensor.name: tensor for tensor in random_inputs(missing, shapes, arguments)}
    for name in shapes:
        if name not in inputs:
            raise UsageError(f"--shape {name}: the request has no such input; it has {', '.join(inputs)}")
    outputs = tuple(options.output) or request.outputs
    if options.classes and not outputs:
        outputs = tuple(tensor.name for tensor in info.outputs)
    return replace(request, inputs=tuple(inputs.values()), outputs=outputs, classes=options.classes)


def _read_json(file: str) -> object:
    try:
        return read_json(sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise InvalidArgumentError(f"{'standard input' if file == '-' else file} is not JSON: {error}") from error


def _read_npy(file: Path) -> Array:
    try:
        array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidArgumentError(f"{file} is not an .npy file of numbers or text: {error}") from error
    if not isinstance(array, np.ndarray):
        raise InvalidArgumentError(f"{file} holds several arrays: save each with numpy.save")
    return array


def encode_request(request: InferRequest) -> tuple[bytes, int]:
    """Return the body of a V2 request with binary tensors and the length of its JSON [B01, B06]."""
    pieces = [bytes(serialized(tensor)) for tensor in request.inputs]
    header: dict[str, Any] = {"id": request.id} if request.id else {}
    header["inputs"] = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.data.shape),
            "parameters": {"binary_data_size": len(piece)},
        }
        for tensor, piece in zip(request.inputs, pieces, strict=True)
    ]
    if request.outputs:
        output_parameters: dict[str, Any] = {"binary_data": True}
        if request.classes:
            output_parameters["classification"] = request.classes
        header["outputs"] = [{"name": name, "parameters": output_parameters} for name in request.outputs]
    header["parameters"] = {**request.parameters, "binary_data_output": True}
    text = json.dumps(header).encode()
    return b"".join([text, *pieces]), len(text)


# -- the response -----------------------------------------------------------------------------------------------------


def read_metadata(document: Any) -> ModelInfo:
    """Parse a model's metadata [H07]. Raises MalformedError for an unexpected document."""
    try:
        inputs, outputs = (
            tuple(
                TensorInfo(str(row["name"]), str(row["datatype"]), tuple(map(int, row["shape"])))
                for row in document[key]
            )
            for key in ("inputs", "outputs")
        )
        versions = tuple(map(str, document.get("versions") or ()))  # KServe's are null
        return ModelInfo(str(document["name"]), versions, str(document.get("platform") or ""), inputs, outputs)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedError(f"the model's metadata cannot be read ({error!r}): is it a V2 server?") from error


def decode_reply(body: bytes, header_length: int | None) -> InferReply:
    """Decode a body of which ``header_length`` bytes (None for all) are JSON [H15, B07].

    Raises MalformedError if the JSON and the bytes after it do not match.
    """
    try:
        header = read_json(body[:header_length])
        at = len(body) if header_length is None else header_length
        outputs = []
        for row in header["outputs"]:
            size = (row.get("parameters") or {}).get("binary_data_size")
            if size is None:
                outputs.append(_json_output(row))
            else:
                outputs.append(_binary_output(row, body[at : at + int(size)], int(size)))
                at += int(size)
        if at != len(body):
            raise ValueError(f"{len(body) - at} bytes follow the last output")
        return InferReply(
            str(header.get("model_name", "")),
            str(header.get("model_version", "")),
            str(header.get("id", "")),
            dict(header.get("parameters") or {}),
            tuple(outputs),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedError(f"the server's answer cannot be read: {error}") from error


def _json_output(row: dict[str, Any]) -> Tensor:
    name, datatype, shape = str(row["name"]), str(row["datatype"]), tuple(map(int, row["shape"]))
    if datatype == "BYTES":
        return Tensor(name, datatype, _bytes_array([str(item).encode() for item in row["data"]], shape))
    return Tensor(name, datatype, np.array(row["data"], dtype=DTYPES[datatype]).reshape(shape))


def _binary_output(row: dict[str, Any], piece: bytes, size: int) -> Tensor:
    name, datatype, shape = str(row["name"]), str(row["datatype"]), tuple(map(int, row["shape"]))
    if size < 0 or len(piece) != size:
        raise ValueError(f"output '{name}' should have {size} bytes, got {len(piece)}")
    if datatype == "BYTES":
        return Tensor(name, datatype, _bytes_array(_split(name, piece), shape))
    return Tensor(name, datatype, np.frombuffer(piece, DTYPES[datatype]).reshape(shape))


def _split(name: str, piece: bytes) -> list[bytes]:
    """Split a BYTES tensor into its length-prefixed elements (4 bytes little-endian) [B02]."""
    items, at = [], 0
    while at < len(piece):
        begin = at + 4
        at = begin + int.from_bytes(piece[at:begin], "little")
        if at > len(piece) or begin > len(piece):
            raise ValueError(f"output '{name}' ends in the middle of an element")
        items.append(piece[begin:at])
    return items


def _bytes_array(items: list[bytes], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(shape)


# -- printing ---------------------------------------------------------------------------------------------------------


def _as_table(reply: InferReply, times_ns: Sequence[int]) -> str:
    rows = [("output", "datatype", "shape", "first values")]
    for tensor in reply.outputs:
        rows.append((tensor.name, tensor.datatype, str(list(tensor.data.shape)), _first_values(tensor)))
    named = f"{reply.model} version {reply.version}" if reply.version else reply.model
    parameters = [f"{key} = {value}" for key, value in reply.parameters.items()]
    return "\n".join([f"{named}: {_time_text(times_ns)}", *parameters, columns(rows)])


def _time_text(times_ns: Sequence[int]) -> str:
    ordered = sorted(times_ns)
    if len(ordered) == 1:
        return f"{ordered[0] / 1e6:.3f} ms"
    middle, high = ordered[len(ordered) // 2], ordered[math.ceil(0.99 * len(ordered)) - 1]
    shown = {"median": middle, "min": ordered[0], "p99": high, "max": ordered[-1]}
    return f"{len(ordered)} requests, " + ", ".join(f"{word} {ns / 1e6:.3f} ms" for word, ns in shown.items())


def _first_values(tensor: Tensor) -> str:
    values = _readable(tensor._replace(data=tensor.data.reshape(-1)[:_FIRST]))
    shown = ", ".join(_shown(value) for value in values)
    return f"[{shown}{', ...' if tensor.data.size > _FIRST else ''}]"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return json.dumps(value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]}...", ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_json(reply: InferReply, times_ns: Sequence[int]) -> str:
    document: dict[str, Any] = {"id": reply.id} if reply.id else {}
    document |= {"model_name": reply.model, "model_version": reply.version}
    if reply.parameters:
        document["parameters"] = reply.parameters
    document["outputs"] = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.data.shape),
            "data": [_finite(value) for value in _readable(tensor)],
        }
        for tensor in reply.outputs
    ]
    document["times_ms"] = [ns / 1e6 for ns in times_ns]
    return json.dumps(document, ensure_ascii=False)


def _readable(tensor: Tensor) -> list[Any]:
    """Return all values as a flat list of numbers, booleans and text.

    BF16 bits become numbers, and bytes that are not UTF-8 are escaped.
    """
    flat = tensor.data.reshape(-1)
    if tensor.datatype == "BYTES":
        return [item.decode("utf-8", "backslashreplace") for item in flat.tolist()]
    if tensor.datatype == "BF16":
        flat = (flat.astype("<u4") << 16).view("<f4")
    return flat.tolist()


def _finite(value: Any) -> Any:
    """Return a word for a number that is not finite, because JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
