"""Backends of language models."""
