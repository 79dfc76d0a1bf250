"""Generate the messages of core/remora/proto into a folder: python .ci/proto.py FOLDER.

The published files have the protocol's package `inference`. The generated code has a package of its own, because
tritonclient and kserve register `inference.*` in the same process.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

PROTO = Path(__file__).resolve().parent.parent / "core" / "remora" / "proto"


def main(output: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch) / "remora" / "proto"
        sources.mkdir(parents=True)
        for path in PROTO.glob("*.proto"):
            text = path.read_text()
            assert "\npackage inference;\n" in text, path
            text = text.replace("\npackage inference;\n", "\npackage remora.v2;\n")
            (sources / path.name).write_text(text.replace('import "', 'import "remora/proto/'))
        names = [f"remora/proto/{path.name}" for path in sorted(sources.iterdir())]
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={output}", f"--pyi_out={output}"]
        subprocess.run([*command, *names], cwd=scratch, check=True)


main(str(Path(sys.argv[1]).resolve()))
