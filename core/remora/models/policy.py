"""Pure choice of the next action that brings a model to its desired state.

The desired state is a `Revision`, made from the repository or the load request; `CurrentState` is what serves now. The
origin of the desired state (startup, client call, poll, on-demand request) makes no difference. A version with the same
files and configuration is kept [M09]; one that differs only in its instances is adjusted in place [M13]; any other is
opened beside the serving one, which is retired when all new versions are ready [M04].
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from remora.model_files import CONFIG_FILENAMES, RELEASE_FILE
from remora.proto.model_config_pb2 import ModelConfig
from remora.repository import Fingerprint, ModelFolder

_NO_FILES: Fingerprint = {}


class Revision(NamedTuple):
    """Identity of a model's content. Equal revisions make equal models.

    ``versions`` are those that the version policy selects, each with a stamp of its files; ``shared`` is the stamp of
    the files common to all versions, ``config`` the configuration without ``instances``, which can change in place.
    ``bound`` is the set of decoupled models of an ensemble.
    """

    versions: Mapping[int, Hashable]
    shared: Hashable = ()
    config: bytes = b""
    instances: bytes = b""
    bound: Hashable = None


class CurrentState(NamedTuple):
    """The state that a model serves with.

    ``adjustable`` is True if its instances can change in place.
    """

    revision: Revision
    ready: frozenset[int]
    adjustable: bool = True


class Action(NamedTuple):
    """The versions to ``open``, ``adjust`` in place, ``keep``, and then ``retire``.

    All are empty if the desired state selects no version that could serve.
    """

    open: tuple[int, ...] = ()
    adjust: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    retire: tuple[int, ...] = ()


def next_action(desired: Revision | None, current: CurrentState | None) -> Action | None:
    """Return the action towards the desired state, or None if nothing is left to do.

    A desired state of None means: do not serve.
    """
    ready = current.ready if current is not None else frozenset[int]()
    if desired is None:
        return Action(retire=tuple(sorted(ready))) if ready else None
    steps: dict[str, list[int]] = {"open": [], "adjust": [], "keep": []}
    for version in sorted(desired.versions):
        steps[_step(desired, current, version)].append(version)
    opens, adjusts, keeps = (tuple(steps[step]) for step in ("open", "adjust", "keep"))
    retires = tuple(sorted(ready.difference(adjusts, keeps)))
    if keeps and not (opens or adjusts or retires):
        return None
    return Action(opens, adjusts, keeps, retires)


def _step(desired: Revision, current: CurrentState | None, version: int) -> str:
    if current is None or version not in current.ready:
        return "open"
    actual = current.revision
    same = (desired.versions[version], desired.shared, desired.config, desired.bound) == (
        actual.versions.get(version),
        actual.shared,
        actual.config,
        actual.bound,
    )
    if not same:
        return "open"
    if desired.instances == actual.instances:
        return "keep"
    return "adjust" if current.adjustable else "open"


def revision_of(
    folder: ModelFolder, config: ModelConfig, versions: list[int], files: Fingerprint = _NO_FILES
) -> Revision:
    """Return the revision of a model.

    Args:
        folder: the model's folder.
        config: the configuration as written or sent.
        versions: the versions that its policy selects.
        files: its files with their stamps; configuration files are left out because ``config`` counts instead, and
            the declared release because ``versions`` counts.
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
        elif (top != "configs" or not rest) and path not in (*CONFIG_FILENAMES, RELEASE_FILE):
            shared.append((path, stamp))
    rest_of_config = ModelConfig()
    rest_of_config.CopyFrom(config)
    instances = ModelConfig(instance_group=config.instance_group)
    rest_of_config.ClearField("instance_group")
    rest_of_config.ClearField("version_policy")  # it selects versions and does not change their content
    return Revision(
        {number: (folder.versions[number].name, *own[number]) for number in versions},
        (tuple(flat), *shared),
        rest_of_config.SerializeToString(deterministic=True),
        instances.SerializeToString(deterministic=True),
    )
