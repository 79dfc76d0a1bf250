"""Adapters to platforms, and to what a server uses there: Redis and collectors.

Invariant: no adapter imports another platform, and the engine imports no adapter.
"""
