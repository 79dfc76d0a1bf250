"""Which requests are to be traced, as clients change it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InvalidArgumentError, RemoraError, UnsupportedError
from remora.trace_settings import Changes, TraceSettings, checked, merged


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"trace_file": None},
            UnsupportedError,
            "trace file location can not be updated through network protocol",
        ),
        ({"trace_rate": ("many",)}, InvalidArgumentError, "Unable to parse 'trace_rate', got: many"),
        ({"trace_rate": ("",)}, InvalidArgumentError, "Unable to parse 'trace_rate', got: "),
        ({"trace_rate": ("1", "2")}, InvalidArgumentError, "expect only 1 value for 'trace_rate'"),
        (
            {"trace_count": ("-2",)},
            InvalidArgumentError,
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: -2",
        ),
        (
            {"trace_level": ("OFF", "TENSORS")},
            InvalidArgumentError,
            "Expect only one trace level 'OFF' is specified",
        ),
    ],
)
def test_what_cannot_be_set_is_refused_in_tritons_words(
    changes: Changes, kind: type[RemoraError], message: str
) -> None:
    with pytest.raises(RemoraError) as caught:
        checked(changes)
    assert (type(caught.value), caught.value.message) == (kind, message)


def test_levels_that_nobody_knows_come_to_none() -> None:
    assert checked({"trace_level": ("LOUD",)}) == {"trace_level": ("OFF",)}
    assert checked({"trace_level": ("TENSORS", "LOUD")}) == {"trace_level": ("TENSORS",)}


def test_keys_that_nobody_knows_change_nothing() -> None:
    assert checked({"nothing": ("1",), "trace_mode": ("opentelemetry",)}) == {}


def test_a_model_has_the_servers_settings_but_for_its_own() -> None:
    server: Changes = {"trace_rate": ("7",), "trace_level": ("TIMESTAMPS",)}
    own: Changes = {"trace_rate": ("3",)}
    assert TraceSettings().over({**server, **own}) == TraceSettings(trace_level=("TIMESTAMPS",), trace_rate="3")


_changes = st.dictionaries(
    st.sampled_from(("trace_rate", "trace_count", "log_frequency")),
    st.none() | st.integers(0, 2**31 - 1).map(lambda number: (str(number),)),
)


@given(before=_changes, changes=_changes)
def test_the_last_word_on_a_setting_holds_and_none_takes_it_back(before: Changes, changes: Changes) -> None:
    after = TraceSettings().over(merged(merged({}, checked(before)), checked(changes)))
    for name in ("trace_rate", "trace_count", "log_frequency"):
        last = changes[name] if name in changes else before.get(name)
        assert getattr(after, name) == (last[0] if last else getattr(TraceSettings(), name))


@given(st.text())
def test_any_text_is_a_number_within_its_range_or_refused(text: str) -> None:
    try:
        kept = checked({"trace_count": (text,)})["trace_count"]
    except InvalidArgumentError:
        return
    assert kept is not None
    assert -1 <= int(kept[0]) < 2**31
