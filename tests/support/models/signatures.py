"""Model signatures and requests to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from remora.errors import InvalidArgumentError
from remora.messages import DTYPES, Data, InferForm, InputSpec, OutputSpec, Request
from remora.signature import Signature
from support.engine.fakes import config_of

ADDSUB = """
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: 4 }
input { name: "INPUT1" data_type: TYPE_FP32 dims: 4 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 4 }
output { name: "OUTPUT1" data_type: TYPE_FP32 dims: 4 }
"""
FIXED = """
input { name: "INPUT0" data_type: TYPE_INT16 dims: [2, 3] }
output { name: "OUTPUT0" data_type: TYPE_INT16 dims: [2, 3] }
"""
OPTIONAL = """
max_batch_size: 4
input { name: "NEEDED" data_type: TYPE_INT32 dims: 1 }
input { name: "EXTRA" data_type: TYPE_INT32 dims: 1 optional: true }
input { name: "MORE" data_type: TYPE_INT32 dims: 1 optional: true }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
BYTES = """
input { name: "INPUT0" data_type: TYPE_STRING dims: -1 }
output { name: "OUTPUT0" data_type: TYPE_STRING dims: -1 }
"""
RESHAPE = """
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 1 reshape { } }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 reshape { } }
"""
OUTPUT = ' output { name: "O" data_type: TYPE_FP32 dims: 1 }'
ANON = "[request id: <id_unknown>] "


def signature(text: str, name: str = "m") -> Signature:
    return Signature(config_of(text), name)


def spec(name: str, *shape: int, datatype: str = "FP32") -> InputSpec:
    return InputSpec(name, datatype, shape)


def form(*inputs: InputSpec, outputs: tuple[str, ...] = (), id: str = "") -> InferForm:
    return InferForm(inputs, tuple(OutputSpec(name) for name in outputs), id)


def zeros(shape: tuple[int, ...], datatype: str = "FP32") -> bytes:
    return bytes(int(np.prod(shape)) * DTYPES[datatype].itemsize)


def ask(text: str, wanted: InferForm, data: list[Data] | None = None) -> Request:
    """The request, with zeros for data that is not given."""
    if data is None:
        data = [zeros(row.shape, row.datatype) if row.datatype != "BYTES" else b"" for row in wanted.inputs]
    return signature(text).request(wanted, data)


def refusal(text: str, wanted: InferForm, data: list[Data] | None = None) -> str:
    """The text with which the request is refused."""
    with pytest.raises(InvalidArgumentError) as refused:
        ask(text, wanted, data)
    return str(refused.value)


FIT = (spec("INPUT0", 1, 4), spec("INPUT1", 1, 4))
RAW = InferForm((), raw=True)
names = st.sampled_from(["INPUT0", "INPUT1", "NEEDED", "EXTRA", "IN", "X", ""])
sizes = st.sampled_from([-(2**63), -2, -1, 0, 1, 2, 3, 4, 5, 9, 2**31, 2**62, 2**63, 2**64])
inputs = st.builds(
    InputSpec,
    names,
    st.sampled_from(["FP32", "INT16", "INT32", "BYTES", "BF16", "WAT", ""]),
    st.lists(sizes, max_size=3).map(tuple),
)
sources = st.one_of(st.binary(max_size=40), st.sampled_from([0, 4, 8, 12, 16, 32, 64]).map(bytes), st.none())


def asked(model: Signature, wanted: InferForm, data: list[Data]) -> object:
    try:
        request = model.request(wanted, data)
    except InvalidArgumentError as error:
        return error.message
    arrays = [(name, array.dtype, array.shape, array.tolist()) for name, array in request.inputs.items()]
    return repr((arrays, request.requested, request.rows, request.shape_key))
