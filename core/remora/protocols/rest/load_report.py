"""The load report in a response header that Kubernetes' gateway reads (ORCA); the law: what is not known is not said.

A generate request may ask for one with ``endpoint-load-metrics-format: text`` or ``json`` (spec H33). It is made of one
family of gauges, which LLM backends keep: without them there is no header. Pure: metrics' text in, header out.
"""

from __future__ import annotations

import re

from remora.tensors.float_text import number

REQUEST_HEADER = b"endpoint-load-metrics-format"
RESPONSE_HEADER = b"endpoint-load-metrics"

_GAUGE = re.compile(
    r"^nv_trt_llm_kv_cache_block_metrics\{[^}\n]*?kv_cache_block_type=\"(used|max|tokens_per)\"[^}\n]*\} (\S+)",
    re.MULTILINE,
)


def load_report(notation: bytes, metrics: str) -> bytes | None:
    """The header's value out of Prometheus text; None for another notation, or when a gauge is missing or negative."""
    gauges = {kind: float(value) for kind, value in _GAUGE.findall(metrics)}
    used, most, tokens = (gauges.get(kind, -1.0) for kind in ("used", "max", "tokens_per"))
    if not all(0.0 <= value < 2.0**63 for value in (used, most, tokens)):  # nor is NaN a load
        return None
    utilization = used / most if most > 0 else 0.0
    capacity = min(int(most * tokens), 2**64 - 1)
    if notation == b"text":
        return (
            f"TEXT named_metrics.kv_cache_utilization={utilization:.6f}, named_metrics.max_token_capacity={capacity}"
        ).encode()
    if notation == b"json":
        return b'JSON {"named_metrics":{"kv_cache_utilization":%b,"max_token_capacity":%d}}' % (
            number(utilization),
            capacity,
        )
    return None
