"""Run the server's own tests in a copy of the project that has no other package.

``python .ci/alone.py [--oracle DIR] [ARGUMENT ...]`` copies what git tracks without the packages beside ``remora`` and
their tests, and runs ``tests/core`` there with pytest's arguments, then the recorded answers of ``DIR``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.process.separate_python import make_environment  # noqa: E402

OTHERS = (
    *(f"core/remora_{name}/" for name in ("llm", "runtimes", "tools")),
    "adapters/",
    *(f"tests/{name}/" for name in ("adapters", "deploy", "llm", "runtimes", "tools")),
)
NEEDS = re.compile(r"^\s*(?:from|import) remora_\w+", re.MULTILINE)


def copy(target: Path) -> list[str]:
    """Copy the files of the server; return the tests that are left out because they import another package."""
    left_out = []
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        source = ROOT / name
        if name.startswith(OTHERS) or not source.is_file():
            continue
        if name.startswith("tests/core/") and name.endswith(".py") and NEEDS.search(source.read_text(encoding="utf-8")):
            left_out.append(name)
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target / name)
    return left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--oracle", type=Path, help="folder of the recorded answers; without it they are not asked")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="remora-alone-") as folder:
        tree = Path(folder) / "project"
        for name in copy(tree):
            print(f"left out, because it imports another package: {name}")
        python = make_environment(Path(folder) / "venv", tree / "core")
        environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        codes = [subprocess.run([python, "-m", "pytest", *arguments, "tests/core"], cwd=tree, env=environ).returncode]
        if options.oracle is not None:
            command = [python, "tests/oracle/run.py", "--oracle", str(options.oracle.resolve())]
            codes.append(subprocess.run(command, cwd=tree, env=environ).returncode)
        return max(codes)


if __name__ == "__main__":
    sys.exit(main())
