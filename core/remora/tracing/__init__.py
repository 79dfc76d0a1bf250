"""Traces of single requests: which ones, what a record looks like, and where it goes [T04-T08].

Decided from data and time: `sampling`, `context`, `records`. What moves is in `tracer`, which follows requests, and in
`writer`, whose thread hands finished traces to a file (`trace_file`) or a collector (`otlp`). The law: a request is
never held up, changed or lost for its trace.
"""
