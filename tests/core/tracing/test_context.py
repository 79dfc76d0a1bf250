"""Contexts of other people's traces: what is read, and what was never sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace.span import TraceState

from remora.tracing.context import SpanContext, carried, context_of, traceparent

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
KNOWN = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
XRAY = b"Root=1-0af76519-16cd43dd8448eb211c80319c;Parent=b7ad6b7169203331;Sampled=1"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({b"traceparent": PARENT}, KNOWN),
        ({b"traceparent": PARENT[:-2] + b"00"}, KNOWN._replace(sampled=False)),
        ({b"traceparent": PARENT, b"tracestate": b"a=1,b=2"}, KNOWN._replace(state="a=1,b=2")),
        ({b"traceparent": PARENT, b"tracestate": b" 1@b=x y\t,, c-*/_=!"}, KNOWN._replace(state="1@b=x y\t,, c-*/_=!")),
        ({b"traceparent": PARENT, b"tracestate": b"a=" + b"x" * 600}, KNOWN),
        ({b"traceparent": PARENT, b"tracestate": b"a=1,no member"}, KNOWN),
        ({b"traceparent": PARENT, b"tracestate": b"A=1"}, KNOWN),
        ({b"traceparent": PARENT, b"tracestate": b"a=1,a=2"}, KNOWN),
        ({b"traceparent": PARENT, b"tracestate": b" ,,"}, KNOWN),
        ({b"traceparent": PARENT, b"tracestate": b"a=\xe9"}, KNOWN),
        ({b"traceparent": PARENT, b"tracestate": b",".join(b"k%d=1" % number for number in range(33))}, KNOWN),
        ({b"traceparent": b"cc" + PARENT[2:] + b"-more"}, KNOWN),
        ({b"traceparent": PARENT + b"-more"}, None),
        ({b"traceparent": b"ff" + PARENT[2:]}, None),
        ({b"traceparent": PARENT.upper()}, None),
        ({b"traceparent": b"00-" + b"0" * 32 + PARENT[35:]}, None),
        ({b"traceparent": PARENT[:36] + b"0" * 16 + b"-01"}, None),
        ({b"x-amzn-trace-id": XRAY}, KNOWN),
        ({b"x-amzn-trace-id": XRAY.replace(b"Sampled=1", b"Sampled=0")}, KNOWN._replace(sampled=False)),
        ({b"x-amzn-trace-id": XRAY.split(b";")[0]}, None),
        ({b"x-amzn-trace-id": XRAY, b"traceparent": b"nonsense"}, None),
    ],
)
def test_a_context_is_read_as_its_standard_says(headers: dict[bytes, bytes], expected: SpanContext | None) -> None:
    assert context_of(headers.get) == expected


@given(st.binary(max_size=80))
def test_no_message_breaks_the_connection(value: bytes) -> None:
    for name in (b"traceparent", b"x-amzn-trace-id"):
        found = context_of({name: value}.get)
        assert found is None or found.trace_id


@given(st.binary(max_size=40), st.sampled_from([b"a=1,", b"b@c=", b""]))
def test_a_state_that_is_kept_is_one_to_the_library_that_sends_it(value: bytes, before: bytes) -> None:
    found = context_of({b"traceparent": PARENT, b"tracestate": before + value}.get)
    assert found is not None
    assert bool(found.state) == bool(TraceState.from_header([found.state]))


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_sent_on_reads_as_the_same(trace_id: int, span_id: int, sampled: bool) -> None:
    context = SpanContext(trace_id, span_id, sampled)
    assert context_of({b"traceparent": traceparent(context).encode()}.get) == context


def test_models_are_given_the_headers_to_send_on() -> None:
    assert carried(KNOWN) == f'{{"traceparent":"{PARENT.decode()}"}}'
    assert '"tracestate":"a=1"' in carried(KNOWN._replace(state="a=1"))
