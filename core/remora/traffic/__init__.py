"""Deciders of offline scoring, load generation and releases. Pure."""
