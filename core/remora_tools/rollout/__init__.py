"""Releases: routes among versions, shadows, and the judgement on the answers."""
