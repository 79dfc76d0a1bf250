"""Names for plug-ins: functions as models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remora.api import lazily

if TYPE_CHECKING:
    from remora.functions.definition import (
        InputField,
        Model,
        ModelDefinitionError,
        OutputField,
        Settings,
        Signature,
        tensor_config,
    )
    from remora.functions.errors import BadRequestError
    from remora.functions.hints import ANY, Array, Kind, kind_of, open_image
    from remora.functions.images import decode_image
    from remora.functions.runtime import FunctionModel

__getattr__ = lazily(
    __name__,
    {
        "remora.functions.definition": (
            "InputField Model ModelDefinitionError OutputField Settings Signature tensor_config"
        ),
        "remora.functions.errors": "BadRequestError",
        "remora.functions.hints": "ANY Array Kind kind_of open_image",
        "remora.functions.images": "decode_image",
        "remora.functions.runtime": "FunctionModel",
    },
)
