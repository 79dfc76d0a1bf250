"""Cells run by a Jupyter kernel: ``python notebook_cells.py CELLS`` prints what each cell of a JSON list shows.

Runs under the Python of an environment with nbclient and ipykernel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import nbformat
from nbclient import NotebookClient


def shown(cells: list[str]) -> list[str]:
    """Return the value, the output and the error of each cell as one text."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True).execute()
    return ["".join(map(_text, cell["outputs"])) for cell in notebook["cells"]]


def _text(output: Any) -> str:
    if output["output_type"] == "error":
        return f"{output['ename']}: {output['evalue']}"
    return str(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])


if __name__ == "__main__":
    print(json.dumps(shown(json.loads(sys.argv[1]))))
