"""What to do next so that a model serves as it is wished: two states in, at most one action out; pure.

The wish is a `Revision`: what the repository and the load request say now. The other state is what a model serves
with. Who writes wishes (the start, a client's call, the poll, a request on demand) makes no difference here. A version
whose files and configuration are the same stays as it is [M09]; one whose instances alone differ is adjusted in
place [M13]; any other is opened beside what serves, which goes when all of them are ready [M04].
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from remora.model_files import CONFIG_FILENAMES
from remora.proto.model_config_pb2 import ModelConfig
from remora.repository import Fingerprint, ModelFolder

_NO_FILES: Fingerprint = {}


class Revision(NamedTuple):
    """All that decides what a model is; equal revisions make equal models.

    ``versions`` are those that the version policy picks, each with a stamp of its own files; ``shared`` stands for
    the files that belong to all of them, ``config`` for the configuration but for what can change in place, which is
    ``instances``. ``bound`` is what an ensemble is tied to.
    """

    versions: Mapping[int, Hashable]
    shared: Hashable = ()
    config: bytes = b""
    instances: bytes = b""
    bound: Hashable = None


class CurrentState(NamedTuple):
    """What a model serves with; ``adjustable``: its instances can change while it serves."""

    revision: Revision
    ready: frozenset[int]
    adjustable: bool = True


class Action(NamedTuple):
    """One step. ``open`` beside what serves, ``adjust`` in place, ``keep``; when that is done, ``retire`` the rest.

    All empty: there is a wish, but no version that could serve it.
    """

    open: tuple[int, ...] = ()
    adjust: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    retire: tuple[int, ...] = ()


def next_action(wish: Revision | None, standing: CurrentState | None) -> Action | None:
    """What brings a model nearer to the wish (None: it shall not serve); None when nothing is to be done."""
    ready = standing.ready if standing is not None else frozenset[int]()
    if wish is None:
        return Action(retire=tuple(sorted(ready))) if ready else None
    steps: dict[str, list[int]] = {"open": [], "adjust": [], "keep": []}
    for version in sorted(wish.versions):
        steps[_step(wish, standing, version)].append(version)
    opens, adjusts, keeps = (tuple(steps[step]) for step in ("open", "adjust", "keep"))
    retires = tuple(sorted(ready.difference(adjusts, keeps)))
    if keeps and not (opens or adjusts or retires):
        return None
    return Action(opens, adjusts, keeps, retires)


def _step(wish: Revision, standing: CurrentState | None, version: int) -> str:
    if standing is None or version not in standing.ready:
        return "open"
    has = standing.revision
    same = (wish.versions[version], wish.shared, wish.config, wish.bound) == (
        has.versions.get(version),
        has.shared,
        has.config,
        has.bound,
    )
    if not same:
        return "open"
    if wish.instances == has.instances:
        return "keep"
    return "adjust" if standing.adjustable else "open"


def revision_of(
    folder: ModelFolder, config: ModelConfig, versions: list[int], files: Fingerprint = _NO_FILES
) -> Revision:
    """The revision of a model.

    Args:
        folder: where it lies.
        config: as it is written, or was sent.
        versions: those that its policy picks.
        files: its files with their stamps; those of the configuration do not count, the configuration itself does.
    """
    homes = {path.name: number for number, path in folder.versions.items() if path != folder.path}
    flat = [number for number, path in folder.versions.items() if path == folder.path]
    own: dict[int, list[Hashable]] = {number: [] for number in versions}
    shared: list[Hashable] = []
    for path, stamp in sorted(files.items()):
        top, _, rest = path.partition("/")
        number = homes.get(top)
        if number is not None:
            own.get(number, []).append((path, stamp))
        elif (top != "configs" or not rest) and path not in CONFIG_FILENAMES:
            shared.append((path, stamp))
    rest_of_config = ModelConfig()
    rest_of_config.CopyFrom(config)
    instances = ModelConfig(instance_group=config.instance_group)
    rest_of_config.ClearField("instance_group")
    rest_of_config.ClearField("version_policy")  # which versions, not what they are
    return Revision(
        {number: (folder.versions[number].name, *own[number]) for number in versions},
        (tuple(flat), *shared),
        rest_of_config.SerializeToString(deterministic=True),
        instances.SerializeToString(deterministic=True),
    )
