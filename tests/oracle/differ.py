"""Asks a real Triton and `remora serve` the same, and shows where they differ.

Recorded requests are changed a little (`mutated`), and so are expressions over ``pb_utils`` (`probed`).

    python tests/oracle/differ.py --oracle DIR [--seconds 60] [--seed 0] [--report FILE] [FILE ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from mutated import Accepted, Difference, Fuzz, accepted_differences
from probed import NAME as PROBES
from probed import Probes
from run import FILES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--oracle", type=Path, required=True, help="the folder of the recordings and of run_triton.sh")
    parser.add_argument("--seconds", type=float, default=60, help="for each file")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--report", type=Path, help="write every difference there, as JSON lines")
    parser.add_argument(
        "files",
        nargs="*",
        default=(*FILES, PROBES),
        help="cases/errors, grpc_cases/grpc_infer ..., pb_utils; all of them without",
    )
    options = parser.parse_args()
    sys.path.insert(0, str(options.oracle))
    import replay

    accepted = accepted_differences()
    report = options.report.open("a", encoding="utf-8") if options.report else None
    found = 0
    for name in options.files:
        if name == PROBES:
            probes = Probes(replay, options.oracle, options.seed)
            found += judged(probes, accepted + probes.accepted(), options.seconds, report)
        else:
            fuzz = Fuzz(replay, options.oracle, options.oracle / f"{name}.jsonl", options.seed)
            found += judged(fuzz, accepted, options.seconds, report)
    print(f"differ: {found} kinds of differences")
    return 1 if found else 0


def judged(fuzz: Fuzz | Probes, accepted: list[Accepted], seconds: float, report: TextIO | None) -> int:
    """Print one difference of each kind that is not accepted; return the number of kinds."""
    kinds: set[tuple[str, str]] = set()
    known = 0
    for difference in fuzz.differences(seconds):
        if any(row.covers(difference) for row in accepted):
            known += 1
            continue
        if difference.kind not in kinds:
            kinds.add(difference.kind)
            show(difference)
        if report:
            print(json.dumps({"file": fuzz.path.stem} | asdict(difference)), file=report, flush=True)
    found = f"{len(kinds)} kinds of differences, {known} accepted, {fuzz.deaths} deaths or silences of Triton"
    print(f"{fuzz.path.stem}: {fuzz.asked} asked, {found}", flush=True)
    return len(kinds)


def show(difference: Difference) -> None:
    print(f"DIFFERS {difference.case}: {difference.what[:160]}\n    asked  {difference.asked[:500]!r}")
    print(f"    triton {difference.theirs[:260]!r}\n    remora {difference.ours[:260]!r}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
