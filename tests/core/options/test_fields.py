"""Options that are declared in fragments and composed into one dataclass."""

from __future__ import annotations

import dataclasses

import pytest

from remora.options import EngineOptions, ServerOptions
from remora.options.fields import composed, fragment, option


@fragment
class Left:
    """Fragment with a number and a list."""

    __slots__ = ()

    count: int = option("Number.", default=3, metavar="N")
    names: tuple[str, ...] = option("Name. Repeatable.", many=True)


@fragment
class Right:
    """Fragment with a method that reads an option."""

    __slots__ = ()

    mode: str = option("Mode.", default="off", choices=("off", "on"))

    def is_on(self) -> bool:
        return self.mode == "on"


@dataclasses.dataclass(frozen=True, slots=True)
@composed
class Both(Left, Right):
    """Both fragments."""


def test_fields_follow_the_order_of_the_fragments_with_their_defaults_and_help() -> None:
    assert [(field.name, field.default) for field in dataclasses.fields(Both)] == [
        ("count", 3),
        ("names", ()),
        ("mode", "off"),
    ]
    assert dataclasses.fields(Both)[2].metadata["choices"] == ("off", "on")


def test_a_composed_instance_is_an_instance_of_each_fragment_and_has_its_methods() -> None:
    both = dataclasses.replace(Both(count=4), mode="on")
    assert isinstance(both, Left)
    assert both.is_on()
    assert (both.count, both.names) == (4, ())


def test_an_instance_cannot_be_changed_and_takes_no_unknown_option() -> None:
    both = Both()
    with pytest.raises(dataclasses.FrozenInstanceError):
        both.count = 5  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'counts'"):
        Both(counts=1)  # type: ignore[call-arg]
    assert not hasattr(both, "__dict__")


@pytest.mark.parametrize("kind", [EngineOptions, ServerOptions])
def test_no_option_is_declared_twice(kind: type[EngineOptions | ServerOptions]) -> None:
    names = [name for base in kind.__bases__ for name in base.__annotations__]
    assert names == [field.name for field in dataclasses.fields(kind)]
    assert len(set(names)) == len(names)


def test_the_options_of_engine_and_server_have_different_flags() -> None:
    engine, server = ({field.name for field in dataclasses.fields(kind)} for kind in (EngineOptions, ServerOptions))
    assert not engine & server


def test_a_secret_among_the_options_is_not_printed() -> None:
    assert "hunter2" not in repr(ServerOptions(http_restricted_api=("metadata:key=hunter2",)))
