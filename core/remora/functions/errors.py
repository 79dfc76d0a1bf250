"""Errors of functions that are models: hints that are not tensors, and invalid requests."""

from __future__ import annotations


class HintError(TypeError):
    """Type hint that is not a tensor."""


class BadRequestError(ValueError):
    """Error that a model raises for an invalid request; status 400 with this text."""


class InvalidFieldError(BadRequestError):
    """Value in a JSON document that does not have the type of its hint.

    ``path`` is the place in the document, such as ``lines[2].count``, or "" for the document itself.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.reason, self.path = reason, path
