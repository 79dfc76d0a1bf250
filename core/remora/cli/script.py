"""Function `remora.serve`, which serves the models of a script."""

from __future__ import annotations

import sys
from typing import Any

from remora.cli import main
from remora.functions.definition import ModelDefinitionError


def serve(*models: Any, **options: Any) -> int:
    """Serve decorated functions of the calling script until SIGTERM, and return the exit code.

    ``remora.serve(double, http_port=9000)`` equals ``remora serve script.py:double --http-port=9000``. Call it under
    ``if __name__ == "__main__"``, because the processes of the models import the script too.

    Args:
        models: objects of `remora.model` or `remora.Pipeline` that are variables of the script; none for all.
        options: flags of `remora serve` with underscores.

    Raises:
        ModelDefinitionError: a model is not a variable of a file, or the script is being imported by its own server.
    """
    script = sys.modules["__main__"]
    file = getattr(script, "__file__", None)
    if getattr(getattr(script, "__spec__", None), "name", "") == "remora.repository.exporting":
        raise ModelDefinitionError('remora.serve(...) runs on import: put it under if __name__ == "__main__":')
    if not file:
        raise ModelDefinitionError("remora.serve needs a script; in a notebook use remora.Engine(models=[...])")
    names = {id(value): name for name, value in vars(script).items()}
    unknown = next((each for each in models if id(each) not in names), None)
    if unknown is not None:
        raise ModelDefinitionError(f"{unknown!r} is not a variable of {file}: give it a name there")
    source = file + (":" + ",".join(names[id(each)] for each in models) if models else "")
    flags = [f"--{name.replace('_', '-')}={_text(value)}" for name, value in options.items()]
    return main(["serve", source, *flags])


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
