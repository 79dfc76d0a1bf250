"""Which requests are to be traced, as clients change it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InvalidArgumentError, RemoraError, UnsupportedError
from remora.options import EngineOptions
from remora.tracing.settings import Changes, SpanExport, TraceSettings, checked, merged


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
            "Unable to parse 'trace_count'. Expecting value >= -1, got:-2",
        ),
        (
            {"trace_count": ("2147483648",)},
            InvalidArgumentError,
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: 2147483648",
        ),
        (
            {"trace_rate": ("4294967295",)},
            InvalidArgumentError,
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 4294967295",
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


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("trace_rate", "1.5", "1"),
        ("trace_rate", "\t\n 00012z", "12"),
        ("trace_count", "+3", "3"),
        ("trace_count", "-1", "-1"),
        ("log_frequency", "0x10", "0"),
        ("log_frequency", "-1", "4294967295"),
        ("trace_rate", "-2147483648", "2147483648"),
    ],
)
def test_numbers_are_read_as_triton_reads_them_with_cs_stoi(name: str, text: str, kept: str) -> None:
    assert checked({name: (text,)}) == {name: (kept,)}


def test_unknown_levels_change_nothing() -> None:
    assert checked({"trace_level": ("LOUD",)}) == {}
    assert checked({"trace_level": ("OFF",)}) == {"trace_level": ("OFF",)}
    assert checked({"trace_level": ("TENSORS", "LOUD")}) == {"trace_level": ("TENSORS",)}


def test_unknown_keys_change_nothing() -> None:
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (EngineOptions(), TraceSettings()),
        (
            EngineOptions(
                trace_config=("triton,file=/t", "triton,log-frequency=50", "rate=100", "level=TIMESTAMPS", "count=9")
            ),
            TraceSettings(("TIMESTAMPS",), "100", "9", "50", "/t"),
        ),
        (
            EngineOptions(trace_file="/t", trace_level=("max",), trace_rate=7, trace_count=3, trace_log_frequency=2),
            TraceSettings(("TIMESTAMPS",), "7", "3", "2", "/t"),
        ),
        (EngineOptions(trace_rate=7, trace_config=("rate=9",)), TraceSettings(trace_rate="9")),
        (EngineOptions(trace_config=("level=TENSORS", "level=TIMESTAMPS")), TraceSettings(("TIMESTAMPS", "TENSORS"))),
        (EngineOptions(trace_config=("level=TENSORS", "level=off")), TraceSettings()),
        (
            EngineOptions(
                trace_config=(
                    "mode=opentelemetry",
                    "opentelemetry,url=http://c/v1/traces?a=b",
                    "opentelemetry,resource=a=b=c",
                    "opentelemetry,resource=d=e",
                    "opentelemetry,bsp_schedule_delay=7",
                )
            ),
            TraceSettings(
                trace_mode="opentelemetry",
                export=SpanExport("http://c/v1/traces?a=b", ("a=b=c", "d=e"), bsp_schedule_delay="7"),
            ),
        ),
    ],
)
def test_the_flags_are_read_as_triton_reads_them(options: EngineOptions, expected: TraceSettings) -> None:
    assert TraceSettings.of(options) == expected


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("rate", "expected"),
        ("=1", "expected"),
        (",rate=1", "expected"),
        ("rate=x", "Unable to parse 'trace_rate', got: x"),
        ("count=-2", "out of range"),
        ("level=LOUD", "the levels are OFF, TIMESTAMPS, TENSORS"),
        ("mode=zipkin", "the modes are triton and opentelemetry"),
        ("zipkin,url=x", "there is no mode 'zipkin'"),
        ("speed=1", "no setting 'speed'; those of all modes are level, rate, count, mode"),
        ("triton,url=x", "no setting 'url'; those of mode triton are file, log-frequency"),
        ("opentelemetry,resource=x", "expected KEY=VALUE"),
        ("opentelemetry,bsp_max_queue_size=0", "expected a whole number from 1"),
    ],
)
def test_a_flag_that_says_nothing_is_refused_with_what_would(entry: str, reason: str) -> None:
    with pytest.raises(ValueError, match="--trace-config") as caught:
        TraceSettings.of(EngineOptions(trace_config=(entry,)))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://u:s3cret@h:9/v1/traces", "http://***@h:9/v1/traces"),
        ("http://u:s3/?cret@h:9", "http://***@h:9"),
        ("http://h/v1/traces?key=s3cret", "http://h/v1/traces?***"),
        ("https://h:9/v1/traces", "https://h:9/v1/traces"),
    ],
)
def test_clients_and_errors_see_the_collectors_url_without_secrets(url: str, shown: str) -> None:
    config = ("mode=opentelemetry", f"opentelemetry,url={url}")
    assert TraceSettings.of(EngineOptions(trace_config=config)).shown()["url"] == shown
    for entry in (f"opentelemetry,url:{url}", f"zipkin,url={url}", f"triton,url={url}"):
        with pytest.raises(ValueError, match="--trace-config") as caught:
            TraceSettings.of(EngineOptions(trace_config=(entry,)))
        assert "cret" not in str(caught.value)


def test_clients_see_the_settings_of_the_mode_that_is_on_and_no_others() -> None:
    assert list(TraceSettings().shown()) == [
        "trace_level",
        "trace_rate",
        "trace_count",
        "log_frequency",
        "trace_file",
        "trace_mode",
    ]
    assert TraceSettings(trace_mode="opentelemetry").shown() == {
        "trace_level": ("OFF",),
        "trace_rate": "1000",
        "trace_count": "-1",
        "trace_mode": "opentelemetry",
        "url": "http://localhost:4318/v1/traces",
        "resource": "service.name=triton-inference-server",
        "bsp_max_export_batch_size": "512",
        "bsp_schedule_delay": "5000",
        "bsp_max_queue_size": "2048",
    }
