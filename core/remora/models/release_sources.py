"""Releases outside of a server: in the file of their state, a ``release.yaml`` or a text."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from remora.errors import InvalidArgumentError
from remora.model_files import RELEASE_FILE, RELEASE_STATE_FILE, RELEASE_STATE_FOLDER
from remora.models.release_members import declared_release, number_of
from remora.models.release_store import ReleaseStore
from remora.traffic import releases
from remora.traffic.releases import SHADOW, STABLE, Release, Shadow

_SHOWN = 60


def find_release(source: str, paths: Sequence[str]) -> Release:
    """Return the one release that runs.

    ``source`` is a text such as ``stable=2,canary=3:10%,shadow=4:20%``, the file of a server's state, a
    ``release.yaml``, or the name of a model. ``paths`` are models or repositories; without a file, those of them that
    are folders are searched for the state of a server and for declarations. An empty source is the only release there.

    Raises InvalidArgumentError, and InternalError for a damaged state.
    """
    try:
        if "=" in source:
            return parse_release(source)
        if source and Path(source).is_file():
            name, found = "", _in_file(Path(source))
        else:
            name, found = source, _in_folders([Path(path) for path in paths if "://" not in path])
    except (ValueError, OSError) as error:
        raise InvalidArgumentError(f"--release {source[:_SHOWN]}: {error}") from error
    running = {key: release for key, release in found.items() if release.arms or release.shadow is not None}
    rows = [release for key, release in running.items() if name in ("", key)]
    if len(rows) == 1:
        return rows[0]
    there = ", ".join(sorted(running)) or "none"
    what = f"a running release of '{name[:_SHOWN]}'" if name else "one running release"
    raise InvalidArgumentError(
        f"--release: expected {what} in {source if not name and source else ', '.join(paths)}; running: {there}. Name "
        "the model, a file, or the versions, such as stable=2,canary=3:10%"
    )


def parse_release(text: str) -> Release:
    """Return the release of a text such as ``stable=2,canary=3:10%``. Raises ValueError."""
    rows: dict[str, tuple[int, str]] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        number, _, weight = value.partition(":")
        if name in rows:
            raise ValueError(f"'{name[:_SHOWN]}' occurs twice")
        rows[name] = number_of(number, name[:_SHOWN]), weight
    if STABLE not in rows or rows[STABLE][1]:
        raise ValueError("expected stable=VERSION without a weight: it gets the rest")
    release = Release(rows.pop(STABLE)[0])
    for name, (version, weight) in rows.items():
        share = releases.parse_weight(weight or "0")
        if name == SHADOW:
            release = releases.set_shadow(release, Shadow(version, share), 0)
        else:
            release = releases.start(release, version, share, 0, alias=name)
    return release


def _in_file(path: Path) -> dict[str, Release]:
    if path.suffix == ".json":
        return ReleaseStore(path).read()
    text = path.read_bytes()
    return {path.resolve().parent.name: declared_release(text, blake2b(text, digest_size=16).hexdigest(), 0)}


def _in_folders(folders: Sequence[Path]) -> dict[str, Release]:
    """Return the releases of servers' states, and the declarations that no server has begun."""
    found: dict[str, Release] = {}
    for folder in folders:
        for declared in (folder / RELEASE_FILE, *sorted(folder.glob(f"*/{RELEASE_FILE}"))):
            if declared.is_file():
                found |= _in_file(declared)
    for folder in folders:
        found |= ReleaseStore(folder / RELEASE_STATE_FOLDER / RELEASE_STATE_FILE).read()
    return found
