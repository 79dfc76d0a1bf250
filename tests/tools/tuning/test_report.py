"""Results of a search as text, JSON and page."""

from __future__ import annotations

import html
import json
import math
import re

from remora_tools.tuning import Decision, Load, ModelSpace, Plan, Point, Runtime, Settings, System, describe
from remora_tools.tuning.report import Outcome, as_document, as_html, as_plot, as_table, as_text, pareto_front
from support.engine.served_model_formula import goal_of

OLD, NEW = Settings(8, True, (), 0, 1), Settings(32, True, (), 500, 2)
SYSTEM = System((ModelSpace("m", OLD, (), ()),), ((0,),), 4)
GOAL = goal_of(20)


def point(plan: Plan, rate: float, ms: float, connections: int = 8) -> Point:
    return Point(plan, Load(connections), rate, ms * 1e6, 100 << 20, 3)


POINTS = [point((OLD,), 100, 10), point((NEW,), 150, 12), point((NEW,), 220, 19, 16), point((NEW,), 230, 40, 32)]


def outcome(decision: Decision | None = None, **stanzas: str) -> Outcome:
    found = decision or Decision(POINTS[2], POINTS[0], True, ("m: batches of 32: <faster>",))
    return Outcome(SYSTEM, GOAL, POINTS, found, stanzas, 61.0)


def test_the_table_has_the_best_point_of_each_plan_first() -> None:
    lines = as_table(outcome()).splitlines()
    assert len(lines) == 3
    assert re.match(r"batches of 32, delay 500 us, 2 instances +16 connections +220\.0 +19\.00 +100 +3$", lines[1])
    assert re.match(r"batches of 8, 1 instance +8 connections +100\.0 +10\.00 ", lines[2])


def test_the_text_compares_the_best_with_the_present_and_ends_with_the_stanza() -> None:
    text = as_text(outcome(m="max_batch_size: 32\n"))
    assert "best for p99<=20ms: batches of 32, delay 500 us, 2 instances" in text
    assert "220.0 requests per second, p99 19.00 ms at 16 connections" in text
    assert "present: batches of 8, 1 instance" in text
    assert "the best one answers 2.20 times as many" in text
    assert "why: m: batches of 32" in text
    assert text.endswith("# m/config.pbtxt\nmax_batch_size: 32")


def test_present_settings_that_miss_the_objective_are_named() -> None:
    over = Decision(POINTS[2], POINTS[0]._replace(latency_ns=30e6), True, ())
    assert "does not hold the objective" in as_text(outcome(over))
    same = Decision(POINTS[0], POINTS[0], True, ())
    assert "these are the present settings" in as_text(outcome(same))


def test_the_plot_of_a_terminal_marks_the_best_the_present_and_the_objective() -> None:
    lines = as_plot(outcome()).splitlines()
    assert lines[0] == "p99 up to 42 ms, over requests per second up to 242"
    marks = {sign: (row, line.index(sign)) for row, line in enumerate(lines[1:-2]) for sign in "BPo" if sign in line}
    assert marks["B"][1] > marks["P"][1]
    assert marks["B"][0] < marks["P"][0]
    assert "o" in marks
    assert any(line.startswith("|---") for line in lines)
    assert max(map(len, lines[1:-1])) == 61
    assert "B best, P present" in lines[-1]


def test_measurements_that_failed_have_no_plot() -> None:
    failed = outcome()._replace(points=[POINTS[0]._replace(latency_ns=math.inf)])
    assert as_plot(failed) == "nothing was measured without failures"


def test_a_single_thing_is_named_in_the_singular() -> None:
    assert Load(1).text() == "1 connection"
    assert describe(Settings(8, True, (), 0, 1, Runtime(1))) == "batches of 8, 1 instance, 1 thread"
    assert describe(Settings(8, True, (), 0, 2, Runtime(2))) == "batches of 8, 2 instances, 2 threads"


def test_without_a_solution_the_closest_is_named() -> None:
    text = as_text(outcome(Decision(POINTS[3], None, False, ("no configuration holds p99<=20ms",))))
    assert "no configuration holds p99<=20ms\nclosest: batches of 32, delay 500 us, 2 instances: 230.0" in text
    assert "best for" not in text
    failed = POINTS[3]._replace(latency_ns=math.inf)
    assert "p99 with failures" in as_text(outcome(Decision(failed, None, False, ("none",))))


def test_the_document_is_json_with_the_same_figures() -> None:
    found = json.loads(json.dumps(as_document(outcome(m="max_batch_size: 32\n"))))
    assert found["holds"] is True
    assert found["best"]["models"]["m"]["max_queue_delay_microseconds"] == 500
    assert found["best"]["requests_per_s"] == 220
    assert found["present"]["latency_ms"] == 10
    assert len(found["measured"]) == 4
    assert found["config_pbtxt"] == {"m": "max_batch_size: 32\n"}
    empty = as_document(outcome(Decision(None, None, False, ("nothing was measured",))))
    assert empty["best"] is None


def test_no_point_of_the_front_is_exceeded() -> None:
    worse = point((OLD,), 90, 15)
    assert pareto_front([*POINTS, worse]) == POINTS


def test_the_page_shows_the_front_without_scripts_or_other_files() -> None:
    page = as_html("remora tune <models>", outcome())
    assert "remora tune &lt;models&gt;" in page
    assert page.count("<circle") == 4
    assert ">best</text>" in page
    assert ">present</text>" in page
    assert ">p99&lt;=20ms</text>" in page
    assert html.escape("<faster>") in page
    assert not re.search(r"<script|<link|https?://(?!www\.w3\.org/2000/svg)", page)


def test_several_models_are_named() -> None:
    system = System((*SYSTEM.models, ModelSpace("n", OLD, (), ())), ((0, 1),), 4)
    points = [point((OLD, NEW), 10, 5)]
    text = as_table(Outcome(system, GOAL, points, Decision(points[0], None, True, ()), {}, 1.0))
    assert "m: batches of 8, 1 instance; n: batches of 32, delay 500 us, 2 instances" in text
