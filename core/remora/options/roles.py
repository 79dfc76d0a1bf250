"""Roles of API keys and tokens, and the permissions that they grant."""

from __future__ import annotations

from collections.abc import Mapping

INFER, METADATA, READ, CONTROL, DEPLOY = "infer", "metadata", "read", "control", "deploy"
"""Permissions.

They are: run models; read their metadata; read all state; load models of the repositories and change settings; load
what a request brings, which may be code.
"""

ROLES: Mapping[str, frozenset[str]] = {
    "infer": frozenset((INFER, METADATA)),
    "read": frozenset((READ, METADATA)),
    "control": frozenset((CONTROL, READ, METADATA)),
    "deploy": frozenset((DEPLOY, CONTROL, READ, METADATA)),
    "all": frozenset((INFER, METADATA, READ, CONTROL, DEPLOY)),
}
"""Permissions of each role."""
