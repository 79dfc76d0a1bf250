"""Declaration of an option as a dataclass field, and of a fragment of the options."""

from __future__ import annotations

from dataclasses import field
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


def option(
    help: str,
    *,
    default: Any = None,
    metavar: str = "",
    many: bool = False,
    choices: tuple[str, ...] = (),
    basic: bool = False,
) -> Any:
    """Return a dataclass field that is a command-line option.

    With ``many`` it repeats and is a tuple. With ``basic`` the short help shows it, for readers who start with remora.
    """
    metadata = {"help": help, "metavar": metavar, "many": many, "choices": choices, "basic": basic}
    return field(default=() if many else default, metadata=metadata)


@dataclass_transform(frozen_default=True)
def fragment(kind: type[T]) -> type[T]:
    """Mark a class as a base of the option dataclasses.

    Its annotated options become their fields. The class is not a dataclass at run time, because generating its methods
    would lengthen every start; its empty ``__slots__`` lets several fragments be bases of one class.
    """
    return kind


def composed(kind: type[T]) -> type[T]:
    """Declare the options of all bases on the class itself.

    They stand in the order of the bases, for `dataclass` to find.
    """
    for base in kind.__bases__:
        for name, annotation in base.__annotations__.items():
            kind.__annotations__[name] = annotation
            setattr(kind, name, base.__dict__[name])
    return kind
