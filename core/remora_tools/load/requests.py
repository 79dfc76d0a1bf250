"""Requests of a load: generated inputs or files, encoded for a protocol once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

import numpy as np

from remora.api.http import serialized
from remora.api.models import NOT_DESCRIBED
from remora.calls import ModelInfo
from remora.cli.client import ApiClient, call_json, model_path, split_url
from remora.cli.output import UsageError
from remora.errors import InvalidArgumentError
from remora.system.json_text import read_json
from remora_tools.client.infer import arguments_of, encode_request, make_request, read_metadata
from remora_tools.client.inputs import InferRequest, read_document
from remora_tools.load.generator import SEQUENCE_ID


def server_address(url: str) -> tuple[SplitResult, int]:
    """Return the parts of a server's URL and its port. Raises UsageError."""
    parts = split_url(url)
    return parts, parts.port or (443 if parts.scheme == "https" else 80)


def model_requests(client: ApiClient, name: str, options: argparse.Namespace) -> list[InferRequest]:
    """Return the requests to a model: those of ``--requests``, or one of the other arguments.

    Raises RemoraError, UsageError, OSError.
    """
    path = model_path(name, options.model_version)
    info = read_metadata(call_json(client, "GET", path))
    if options.requests is None:
        given = options.json or options.npy or options.input
        options = argparse.Namespace(**{**vars(options), "random": options.random or not given})
        arguments = arguments_of(client, path) if options.random else NOT_DESCRIBED
        found = [make_request(info, options, arguments)]
    else:
        found = [_request_of(info, document) for document in read_lines(options.requests)]
    if options.batch:
        found = [with_rows(request, options.batch) for request in found]
    return found


def _request_of(info: ModelInfo, document: object) -> InferRequest:
    return read_document(info, document, {})


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the JSON documents of a file, one per line, or its only document.

    Raises InvalidArgumentError, OSError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{path} is not text in UTF-8: expected a JSON document per line") from error
    try:
        yield read_json(text)
        return
    except ValueError:
        pass
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise InvalidArgumentError(f"{path} is empty: expected a JSON document per line")
    for number, line in enumerate(lines, 1):
        try:
            yield read_json(line)
        except ValueError as error:
            raise InvalidArgumentError(f"{path} line {number} is not JSON: {error}") from error


def with_rows(request: InferRequest, rows: int) -> InferRequest:
    """Return the request with its first row ``rows`` times."""
    inputs = tuple(each._replace(data=np.repeat(each.data[:1], rows, axis=0)) for each in request.inputs)
    return replace(request, inputs=inputs)


def interleave(several: Sequence[Sequence[bytes]], weights: Sequence[int]) -> list[bytes]:
    """Return the requests of several models in turn.

    In a round each model has as many turns as its weight, spread evenly. Its requests keep their order, and none is
    missing.
    """
    turns = sorted(((n + 0.5) / weight, model) for model, weight in enumerate(weights) for n in range(weight))
    rounds = max(-(-len(each) // weight) for each, weight in zip(several, weights, strict=True))
    endless = [cycle(each) for each in several]
    return [next(endless[model]) for _ in range(rounds) for _, model in turns]


def in_sequence(request: InferRequest, length: int) -> list[InferRequest]:
    """Return the first, a middle and the last request of a sequence, with the id that the generator replaces.

    The only request of a sequence of ``length`` 1 is both the first and the last one.
    """
    found = []
    only = length == 1
    for start, end in ((True, only), (False, False), (only, True)):
        parameters = {"sequence_id": SEQUENCE_ID, "sequence_start": start, "sequence_end": end}
        found.append(replace(request, parameters={**request.parameters, **parameters}))
    return found


def http_message(parts: SplitResult, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """Return a complete HTTP/1.1 request."""
    lines = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])).encode("latin-1") + body


def infer_message(
    parts: SplitResult, path: str, request: InferRequest, headers: Mapping[str, str], *, as_json: bool
) -> bytes:
    """Return a V2 inference over HTTP with binary tensors, or with tensors in JSON."""
    if as_json:
        return http_message(parts, path, json_body(request), {"Content-Type": "application/json", **headers})
    body, length = encode_request(request)
    binary = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(length)}
    return http_message(parts, path, body, {**binary, **headers})


def json_body(request: InferRequest) -> bytes:
    """Return the body of a V2 request with all tensors in JSON.

    Raises UsageError for BF16 and FP16.
    """
    rows = []
    for tensor in request.inputs:
        if tensor.datatype in ("BF16", "FP16"):
            raise UsageError(f"--encoding json: input '{tensor.name}' is {tensor.datatype}, which JSON cannot hold")
        data = tensor.data.reshape(-1).tolist()
        values = [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in data]
        shape = list(tensor.data.shape)
        rows.append({"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "data": values})
    document: dict[str, Any] = {"inputs": rows, "parameters": dict(request.parameters)}
    if request.outputs:
        document["outputs"] = [{"name": name} for name in request.outputs]
    return json.dumps(document).encode()


def grpc_message(name: str, version: str, request: InferRequest, *, streams: bool = False) -> bytes:
    """Return a serialised ModelInferRequest with raw tensors.

    In streams it requests a mark on the last response.
    """
    from remora.proto.inference_pb2 import ModelInferRequest

    message = ModelInferRequest(model_name=name, model_version=version, id=request.id)
    for tensor in request.inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.data.shape)
        message.raw_input_contents.append(bytes(serialized(tensor)))
    for output in request.outputs:
        message.outputs.add(name=output)
    for key, value in request.parameters.items():
        kind = {bool: "bool", int: "int64", float: "double"}.get(type(value), "string")
        setattr(message.parameters[key], f"{kind}_param", value if kind != "string" else str(value))
    if streams:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message.SerializeToString()


def bodies_of(path: Path) -> Sequence[bytes]:
    """Return the documents of a file as request bodies. Raises InvalidArgumentError, OSError."""
    return [json.dumps(document).encode() for document in read_lines(path)]
