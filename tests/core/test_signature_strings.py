"""String tensors: counts and packed bytes, with Triton's texts."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.messages import Data
from support.models.signatures import ANON, BYTES, ask, form, refusal, spec


def packed(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


@pytest.mark.parametrize(
    "data", [[b"abc", b""], packed(b"abc", b""), np.array([b"abc", b""], object), memoryview(packed(b"abc", b""))]
)
def test_strings_come_as_a_list_as_packed_bytes_or_as_an_array(data: Data) -> None:
    assert ask(BYTES, form(spec("INPUT0", 2, datatype="BYTES")), [data]).inputs["INPUT0"].tolist() == [b"abc", b""]


FEW = ANON + "expected 2 string elements for inference input 'INPUT0' for model 'm', got 1"
MANY = ANON + "unexpected number of string elements 3 for inference input 'INPUT0' for model 'm', expecting 2"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([b"a"], FEW),
        (packed(b"a"), FEW),
        ([b"a", b"b", b"c"], MANY),
        ([b"a", b"b", b"c", b"d"], MANY),
        (packed(b"a", b"b", b"c", b"d"), MANY),
        (
            packed(b"a") + b"\x01\x00",
            ANON
            + "incomplete string length indicator for inference input 'INPUT0' for model 'm', expecting 4 bytes but "
            "only 2 bytes available. Please make sure the string length indicator is in one buffer.",
        ),
        (struct.pack("<I", 10) + b"ab", FEW),
        (packed(b"a", b"b") + struct.pack("<I", 10), MANY),
        (
            packed(b"a") + struct.pack("<I", 10) + b"ab",
            "incomplete string data for inference input 'INPUT0', expecting string of length 10 but only "
            "2 bytes available",
        ),
        (
            packed(b"a") + b"\xff\xff\xff\xffabc",
            "incomplete string data for inference input 'INPUT0', expecting string of length 4294967295 but only "
            "3 bytes available",
        ),
    ],
)
def test_strings_that_do_not_fit_are_refused_with_tritons_text(data: Data, expected: str) -> None:
    assert refusal(BYTES, form(spec("INPUT0", 2, datatype="BYTES")), [data]) == expected


TWO_TEXTS = (
    'input { name: "A" data_type: TYPE_STRING dims: [2] } input { name: "B" data_type: TYPE_STRING dims: [2] } '
    'output { name: "OUT" data_type: TYPE_FP32 dims: [1] }'
)
TORN = packed(b"a") + struct.pack("<I", 10) + b"ab"


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"A": TORN, "B": TORN}, "incomplete string data for inference input 'A'"),
        ({"B": TORN, "A": TORN}, "incomplete string data for inference input 'B'"),
        ({"A": TORN, "B": packed(b"a")}, ANON + "expected 2 string elements for inference input 'B'"),
        ({"B": packed(b"a"), "A": TORN}, ANON + "expected 2 string elements for inference input 'B'"),
        ({"B": bytes(3), "A": TORN}, ANON + "incomplete string length indicator for inference input 'B'"),
    ],
)
def test_a_torn_string_is_the_last_fault_to_be_found_and_then_the_first_one_is(
    sources: dict[str, bytes], expected: str
) -> None:
    asked = form(*(spec(name, 2, datatype="BYTES") for name in sources))
    assert refusal(TWO_TEXTS, asked, list(sources.values())).startswith(expected)


@given(st.lists(st.binary(max_size=9), max_size=6))
def test_packed_strings_come_back(elements: list[bytes]) -> None:
    wanted = form(spec("INPUT0", len(elements), datatype="BYTES"))
    assert ask(BYTES, wanted, [packed(*elements)]).inputs["INPUT0"].tolist() == elements
