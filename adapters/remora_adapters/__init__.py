"""Platform adapters, one module per platform.

Invariant: no adapter imports another platform, and the engine imports no adapter.
"""
