"""Conformance test of the backend, with pytest or as a script."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from remora.backends.registry import find_backend
from remora.testing.backend import Example, check_backend


def test_the_backend_conforms() -> None:
    with tempfile.TemporaryDirectory() as place:
        version = Path(place, "matrix", "1")
        version.mkdir(parents=True)
        matrix = np.arange(6, dtype="f4").reshape(3, 2)
        np.save(version / "matrix.npy", matrix)
        (version.parent / "config.pbtxt").write_text('backend: "linear"')
        x = np.ones((2, 3), "f4")
        bad = np.full((2, 3), np.nan, "f4")
        check_backend(find_backend("linear"), Example(version.parent, {"x": x}, {"y": x @ matrix}, {"x": bad}))


if __name__ == "__main__":
    test_the_backend_conforms()
    print("linear: conforms")
