"""Replays what a real Triton answered against `remora serve` and holds the result to the list of known differences.

Prints one line for each file, what differs and is not listed, and what is listed and no longer differs; both fail.

    python tests/oracle/run.py [--oracle DIR] [FILE ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from remora.plugins import is_present

HERE = Path(__file__).resolve().parent
FILES = (
    "cases/health_metadata",
    "cases/infer_json",
    "cases/infer_binary",
    "cases/bytes",
    "cases/classification",
    "cases/compression",
    "cases/errors",
    "cases/parameters",
    "cases/forwarding",
    "cases/generate",
    "cases/ensemble",
    "cases/scheduling",
    "cases/sequence",
    "cases/cache",
    "cases/restricted",
    "cases/shared_memory",
    "cases/shared_memory_off",
    "cases/statistics",
    "cases/metrics",
    "cases/metrics_off",
    "cases/logging_trace",
    "cases/not_ready",
    "cases/not_strict",
    "cases/repository",
    "cases/repository_bad",
    "cases/repository_none",
    "cases/repository_poll",
    "cases/sagemaker",
    "cases/sagemaker_mme",
    "grpc_cases/grpc_health_metadata",
    "grpc_cases/grpc_infer",
    "grpc_cases/grpc_parameters",
    "grpc_cases/grpc_stream",
    "grpc_cases/grpc_ensemble",
    "grpc_cases/grpc_sequence",
    "grpc_cases/grpc_repository",
    "grpc_cases/grpc_settings",
    "grpc_cases/grpc_shared_memory",
    "grpc_cases/grpc_restricted",
    "grpc_cases/grpc_forwarding",
)
OF_ADAPTERS = "cases/sagemaker"
"""Beginning of the names of files whose port another package serves."""
COMMAND = (
    "{python} -m remora serve --model-repository {{repo}} --http-port {{http}} --grpc-port {{grpc}} "
    "--metrics-port {{metrics}} {more} {{flags}}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--oracle", type=Path, default=HERE.parents[2] / "shared" / "oracle")
    parser.add_argument("--verbose", action="store_true", help="show listed differences too")
    parser.add_argument("--part", default="", metavar="WORDS", help="only the files whose names begin so")
    parser.add_argument("--more", default="", metavar="FLAGS", help="more flags for the server")
    parser.add_argument("files", nargs="*", default=FILES)
    options = parser.parse_args()
    expected: dict[str, str] = json.loads((HERE / "exceptions.json").read_text(encoding="utf-8"))
    replay = options.oracle / "replay.py"
    files = [name for name in options.files if name.startswith(options.part)]
    if not is_present("remora_adapters"):
        files, asked = [name for name in files if not name.startswith(OF_ADAPTERS)], files
        print(f"left out, because remora_adapters is not installed: {' '.join(sorted({*asked} - {*files}))}")
    cases = [str(options.oracle / f"{name}.jsonl") for name in files]
    start = COMMAND.format(python=sys.executable, more=options.more)
    run = subprocess.run(
        [sys.executable, str(replay), "--json", "--start", start, "--cases", *cases],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if not run.stdout.strip():
        print("the replayer printed nothing: see above")
        return 1
    replayed = set().union(*(ids_of(Path(path)) for path in cases))
    return judge(json.loads(run.stdout), expected, replayed, show_listed=options.verbose)


def judge(report: dict, expected: dict[str, str], replayed: set[str], *, show_listed: bool) -> int:
    """Print the report; 0 when exactly those of the listed cases differ that were replayed."""
    differing = {row["id"]: row for row in report["mismatches"]}
    reasons = {case: why for case, why in expected.items() if case in replayed}
    for name, score in report["files"].items():
        print(f"{name}: {score}")
    surprises = [row for case, row in differing.items() if case not in reasons]
    for row in surprises:
        print(f"DIFFERS {row['file']} {row['id']} ({row['shows']})\n    {row['what']}")
    mended = sorted(set(reasons) - set(differing))
    for case in mended:
        print(f"LISTED BUT EQUAL {case}: take it out of tests/oracle/exceptions.json ({reasons[case]})")
    for case in sorted(set(reasons) & set(differing)) if show_listed else ():
        print(f"listed {case}: {reasons[case]}\n    {differing[case]['what']}")
    failed = len(surprises) + len(mended)
    print(f"oracle: {report['score']} passed, {failed} failed, {len(set(reasons) & set(differing))} skipped")
    return 1 if failed else 0


def ids_of(path: Path) -> set[str]:
    """The cases of a file; its first line is the setup, which has no id."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {row["id"] for row in rows if "id" in row}


if __name__ == "__main__":
    sys.exit(main())
