"""File of the state of all releases."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from remora.errors import InternalError
from remora.system.json_text import read_json
from remora.traffic import releases
from remora.traffic.releases import Release


class ReleaseStore:
    """File of all releases, replaced as a whole.

    Args:
        path: the file, None to keep nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path.absolute() if path is not None else None

    def read(self) -> dict[str, Release]:
        """Return the stored releases by model. Raises InternalError for a file that cannot be read."""
        if self.path is None:
            return {}
        try:
            document = read_json(self.path.read_bytes())
            rows = document["releases"]
            return {str(key): releases.from_document(row) for key, row in rows.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InternalError(
                f"the stored releases in '{self.path}' cannot be read ({type(error).__name__}: {error}): restore the "
                "file, or remove it to serve by the version policies"
            ) from error

    def write(self, stored: Mapping[str, Release]) -> None:
        """Replace the file. Raises OSError; the file then is as before."""
        if self.path is None:
            return
        text = json.dumps(
            {"releases": {key: releases.as_document(row) for key, row in sorted(stored.items())}}, indent=1
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=self.path.parent, prefix=".releases.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self.path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(draft)
            raise
