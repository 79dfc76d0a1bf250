"""Sequences: which slot serves which correlation id, and when."""
