"""Sampling, records and delivery of request traces [T04-T08].

`sampling`, `context` and `records` are pure. `tracer` follows requests; the thread of `writer` hands finished traces to
a file (`trace_file`) or a collector (`otlp`). Tracing never delays, changes or loses a request.
"""
