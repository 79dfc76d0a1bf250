"""Replays what a real vLLM answered on OpenAI's routes against `remora serve`, with the list of known differences.

    python tests/oracle/run_openai.py --models DIR [--oracle DIR] [--more FLAGS]

DIR is what the recordings' make_models.sh makes. Prints and fails as run.py.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from run import HERE, ids_of, judge

COMMAND = (
    "{python} -m remora serve {{repo}} --openai --http-port {{http}} --allow-grpc=false --allow-metrics=false {more}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--oracle", type=Path, default=HERE.parents[2] / "shared" / "oracle_openai")
    parser.add_argument("--models", type=Path, required=True, help="folder with the models of the recordings")
    parser.add_argument("--more", default="", metavar="FLAGS", help="more flags for the server")
    parser.add_argument("--verbose", action="store_true", help="show listed differences too")
    options = parser.parse_args()
    expected: dict[str, str] = json.loads((HERE / "exceptions_openai.json").read_text(encoding="utf-8"))
    cases = sorted((options.oracle / "cases").glob("*.jsonl"))
    start = COMMAND.format(python=shlex.quote(sys.executable), more=options.more)
    replay = [sys.executable, str(options.oracle / "replay.py"), "--json", "--wait", "/v2/health/ready"]
    arguments = ["--models", str(options.models), "--start", start, "--cases", *map(str, cases)]
    run = subprocess.run([*replay, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if not run.stdout.strip():
        print("the replayer printed nothing: see above")
        return 1
    replayed = set().union(*(ids_of(path) for path in cases))
    return judge(json.loads(run.stdout), expected, replayed, show_listed=options.verbose)


if __name__ == "__main__":
    sys.exit(main())
