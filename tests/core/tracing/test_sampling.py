"""Which requests are traced."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remora.tracing.sampling import Sampling
from remora.tracing.settings import TraceSettings

ON = TraceSettings(("TIMESTAMPS",))


@given(st.integers(1, 20), st.integers(-1, 5), st.integers(0, 100))
def test_every_nth_request_is_traced_until_there_are_enough(rate: int, count: int, requests: int) -> None:
    sampling = Sampling(ON._replace(trace_rate=str(rate), trace_count=str(count)))
    hits = [sampling.hits() and sampling.take() for _ in range(requests)]
    wanted = [number % rate == 0 for number in range(1, requests + 1)]
    assert [number for number, hit in enumerate(hits) if hit] == [number for number, want in enumerate(wanted) if want][
        : None if count < 0 else count
    ]
    assert sampling.now().trace_count == str(count - sum(hits) if count >= 0 else -1)


def test_a_request_that_leaves_no_trace_makes_room_for_another() -> None:
    sampling = Sampling(ON._replace(trace_rate="1", trace_count="1"))
    assert sampling.hits()
    assert sampling.take()
    assert not sampling.hits()
    assert not sampling.take()  # at the same time as the request before it
    sampling.give_back()
    assert sampling.hits()


def test_nothing_is_traced_when_it_is_off_or_when_only_contexts_count() -> None:
    assert not any(Sampling(TraceSettings(trace_rate="1")).hits() for _ in range(3))
    assert not any(Sampling(ON._replace(trace_rate="0")).hits() for _ in range(3))


def test_spans_have_no_room_for_tensors() -> None:
    both = ON._replace(trace_level=("TIMESTAMPS", "TENSORS"))
    assert Sampling(both).tensors
    assert not Sampling(both._replace(trace_mode="opentelemetry")).tensors
