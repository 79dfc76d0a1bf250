"""Command `remora cost`, which computes the savings of scale to zero from a request log."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from remora.cli.arguments import bind
from remora.cli.output import UsageError, columns
from remora_tools.scale_to_zero import LogError, Rates, Replay, best, break_even_gap_s, read_arrivals, replay


def add_cost(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora cost`."""
    parser.description = (
        "Replay the arrivals of a request log against one instance and print the cost of several "
        "retention times of an idle instance. You pass the prices; remora knows no price list."
    )
    parser.add_argument(
        "log",
        metavar="LOG",
        help="request log of lines that begin with a time, or of JSON lines; - reads standard input",
    )
    parser.add_argument(
        "--price", type=_amount, required=True, metavar="MONEY", help="price of an instance per hour, in any currency"
    )
    parser.add_argument(
        "--cold-start",
        type=_amount,
        required=True,
        metavar="S",
        help="seconds until a new instance answers: the result of remora bench coldstart plus the platform's part",
    )
    parser.add_argument(
        "--busy", type=_amount, default=0.0, metavar="S", help="duration of a request, in seconds (default %(default)g)"
    )
    parser.add_argument(
        "--delayed",
        type=_amount,
        default=0.0,
        metavar="MONEY",
        help="cost of a request that waits for a cold start, in the same currency (default %(default)g)",
    )
    parser.add_argument(
        "--most-delayed",
        type=_amount,
        default=5.0,
        metavar="PERCENT",
        help="maximum share of requests that may wait for a cold start, in percent (default %(default)g)",
    )
    parser.add_argument(
        "--per-request",
        type=_amount,
        default=None,
        metavar="MONEY",
        help="price per request of a platform that bills by request, for comparison",
    )
    parser.add_argument("--json-out", action="store_true", help="print the result as JSON")
    bind(parser, cost)


def cost(options: argparse.Namespace) -> int:
    """Print the result. Raises UsageError for an invalid log, OSError for an unreadable file."""
    try:
        if options.log == "-":
            arrivals = read_arrivals(sys.stdin)
        else:
            with open(options.log, encoding="utf-8", errors="replace") as lines:
                arrivals = read_arrivals(lines)
    except LogError as error:
        raise UsageError(f"{options.log}: {error}") from error
    rates = Rates(options.price, options.cold_start, options.busy, options.delayed)
    cheapest, tried = best(arrivals, rates, options.most_delayed / 100)
    document = _document(arrivals, rates, cheapest, tried, options.per_request)
    print(json.dumps(document, indent=2) if options.json_out else _text(document))
    return 0


def _document(
    arrivals: list[float], rates: Rates, cheapest: Replay, tried: list[Replay], per_request: float | None
) -> dict[str, Any]:
    always = replay(arrivals, math.inf, rates)
    gap_s = break_even_gap_s(rates)
    document: dict[str, Any] = {
        "requests": len(arrivals),
        "span_s": always.billed_s,
        "break_even_gap_s": gap_s if math.isfinite(gap_s) else None,
        "always_on": _figures(always, len(arrivals)),
        "best": _figures(cheapest, len(arrivals)),
        "tried": [_figures(each, len(arrivals)) for each in tried],
    }
    if per_request is not None:
        document["per_request"] = {"cost": per_request * len(arrivals)}
        if per_request and always.billed_s:
            # Below this rate, billing by request is cheaper than an instance that is always on.
            document["per_request"]["break_even_requests_per_hour"] = rates.per_hour / per_request
    return document


def _figures(each: Replay, requests: int) -> dict[str, Any]:
    return {
        "retention_s": each.retention_s if math.isfinite(each.retention_s) else None,
        "cost": each.cost,
        "cost_per_1000": each.cost / requests * 1000,
        "billed_s": each.billed_s,
        "starts": each.starts,
        "delayed": each.delayed,
    }


def _text(document: dict[str, Any]) -> str:
    requests, span_s = document["requests"], document["span_s"]
    always, cheapest = document["always_on"], document["best"]
    rows = [("idle instance stays", "cost", "per 1000", "instance hours", "starts", "delayed")]
    for each in document["tried"]:
        stays = "always" if each["retention_s"] is None else f"{each['retention_s']:.0f} s"
        mark = "  <- cheapest" if each == cheapest else ""
        hours, share = each["billed_s"] / 3600, each["delayed"] / requests
        money = (f"{each['cost']:.4g}", f"{each['cost_per_1000']:.4g}")
        rows.append((stays, *money, f"{hours:.2f}", str(each["starts"]), f"{each['delayed']} ({share:.2%}){mark}"))
    gap = document["break_even_gap_s"]
    lines = [
        f"{requests} requests in {span_s / 3600:.2f} h",
        "",
        columns(rows),
        "",
        f"always on      {always['cost']:.4g}",
        f"cheapest       {cheapest['cost']:.4g}, {_saved(always['cost'], cheapest['cost'])}",
    ]
    if gap is not None:
        lines.append(
            f"break-even     a pause of {gap:.0f} s that one request ends: shorter ones are cheaper waited out"
        )
    if "per_request" in document:
        by = document["per_request"]
        rate = by.get("break_even_requests_per_hour")
        more = f"; always on is cheaper from {rate:.0f} requests an hour" if rate else ""
        lines.append(f"by the request {by['cost']:.4g}{more}")
    return "\n".join(lines)


def _saved(always: float, cheapest: float) -> str:
    if not always or cheapest >= always:
        return "nothing saved: keep it on"
    return f"{1 - cheapest / always:.0%} less"


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a non-negative number, got {text!r}")
    return value
