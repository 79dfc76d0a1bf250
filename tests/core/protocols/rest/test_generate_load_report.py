"""Load report: its gauges, both notations, and the cases without a report [H33]."""

from __future__ import annotations

import pytest

from remora.protocols.rest.generate import load_report


def gauges(**values: object) -> str:
    family = "nv_trt_llm_kv_cache_block_metrics"
    rows = [
        f'{family}{{kv_cache_block_type="{kind}",model="llm",version="1"}} {value}' for kind, value in values.items()
    ]
    return "\n".join(["# HELP x y", f"# TYPE {family} gauge", *rows, 'nv_other{kv_cache_block_type="used"} 9', ""])


FULL = gauges(used=25, max=100, tokens_per=64, fraction=0.25)


@pytest.mark.parametrize(
    ("notation", "report"),
    [
        (b"text", b"TEXT named_metrics.kv_cache_utilization=0.250000, named_metrics.max_token_capacity=6400"),
        (b"json", b'JSON {"named_metrics":{"kv_cache_utilization":0.25,"max_token_capacity":6400}}'),
        (b"TEXT", None),
        (b"", None),
    ],
)
def test_the_report_uses_the_requested_notation(notation: bytes, report: bytes | None) -> None:
    assert load_report(notation, FULL) == report


def test_an_empty_cache_is_not_used_at_all() -> None:
    report = load_report(b"json", gauges(used=0, max=0, tokens_per=64))
    assert report == b'JSON {"named_metrics":{"kv_cache_utilization":0.0,"max_token_capacity":0}}'


@pytest.mark.parametrize(
    "metrics",
    [
        "",
        gauges(used=1, max=2),
        gauges(used=-1, max=2, tokens_per=3),
        gauges(used="NaN", max=2, tokens_per=3),
        gauges(used=1, max="+Inf", tokens_per=3),
    ],
)
def test_unknown_values_are_not_reported(metrics: str) -> None:
    assert load_report(b"text", metrics) is None
