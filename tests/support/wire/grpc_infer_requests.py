"""Infer requests as bytes, and how they are decoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from remora.errors import (
    RemoraError,
)
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.infer import InferCall, decode_infer

Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor


def request(*inputs: Any, raw: tuple[bytes, ...] = (), **fields: Any) -> bytes:
    fields.setdefault("model_name", "m")
    return pb.ModelInferRequest(inputs=inputs, raw_input_contents=raw, **fields).SerializeToString(deterministic=True)


def fp32(name: str = "A", **fields: Any) -> Any:
    return Input(name=name, datatype="FP32", shape=[2], **fields)


def refusal(message: bytes) -> tuple[str, str]:
    with pytest.raises(RemoraError) as caught:
        decode_infer(message)
    return caught.value.code, caught.value.message


def values(call: InferCall) -> list[Any]:
    return [
        each.tolist() if isinstance(each, np.ndarray) else each if isinstance(each, list) else bytes(each)  # type: ignore[arg-type]
        for each in call.data
    ]


def with_parameters(**parameters: dict[str, Any]) -> bytes:
    return request(fp32(), raw=(b"12345678",), parameters=parameters)
