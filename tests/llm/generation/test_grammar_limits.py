"""Tests of ``remora_llm.generation.grammar_limits``, some of which attack the compiler in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from remora_llm.generation.grammar_limits import MAX_SCHEMA_LEVELS, grammar_excess, schema_levels
from remora_llm.generation.tasks import Grammar
from support.models.generation_models import ROOT, tiny


def chain(length: int, link: str) -> dict[str, Any]:
    """Return a schema whose definitions refer to one another through ``link``."""
    made = {f"d{place}": json.loads(link % f'{{"$ref": "#/$defs/d{place + 1}"}}') for place in range(length)}
    return {"$defs": {**made, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


LINKS = {
    "property": '{"type": "object", "properties": {"a": %s}}',
    "reference": "%s",
    "items": '{"type": "array", "items": %s}',
    "all": '{"allOf": [%s]}',
    "any": '{"anyOf": [{"type": "null"}, %s]}',
    "one": '{"oneOf": [{"const": 1}, %s]}',
    "required": '{"type": "object", "properties": {"a": %s}, "required": ["a"]}',
    "more": '{"type": "object", "additionalProperties": %s}',
    "pattern": '{"type": "object", "patternProperties": {"^a": %s}}',
    "prefix": '{"type": "array", "prefixItems": [%s]}',
    "siblings": '{"type": "object", "allOf": [%s], "description": "d"}',
}
ATTACKS = {
    **{
        f"chain-{name}": Grammar("json_schema", json.dumps(chain(n, link)))
        for name, link in LINKS.items()
        for n in [3000]
    },
    "nested": Grammar("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000),
    "embedded": Grammar("lark", "start: %json " + json.dumps(chain(1500, LINKS["property"]))),
    "rules": Grammar("lark", "start: r0\n" + "".join(f'r{n}: "x" r{n + 1}\n' for n in range(10_000)) + 'r10000: "x"'),
    "plain-rules": Grammar("lark", "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(10_000)) + 'r10000: "x"'),
    "terminals": Grammar("lark", "start: T0\n" + "".join(f'T{n}: "x" T{n + 1}\n' for n in range(9_000)) + 'T9000: "x"'),
    "brackets": Grammar("lark", "start: " + "(" * 60_000 + '"x"' + ")" * 60_000),
    "braces": Grammar("lark", "start: %lark {\n" * 1900 + 'start: "x"\n' + "}\n" * 1900),
    "groups": Grammar("regex", "(" * 60_000 + "a" + ")" * 60_000),
    "optional-groups": Grammar("regex", "(" * 200 + "a" + ")?" * 200),
    "alternatives": Grammar("regex", "|".join(f"x{n}" for n in range(30_000))),
    "repetitions": Grammar("regex", "((a{1000}){1000}){1000}"),
    "choices": Grammar("choice", json.dumps([f"c{n} {n % 97}" for n in range(50_000)])),
    "properties": Grammar(
        "json_schema", json.dumps({"properties": {f"p{n}": {"type": "string"} for n in range(4000)}})
    ),
    "patterns": Grammar("json_schema", json.dumps({"patternProperties": {f"^p{n}$": {} for n in range(400)}})),
}


def deepest() -> dict[str, Grammar]:
    """Return grammars that are as deep as the limits permit."""
    found = {}
    for name, link in LINKS.items():
        levels = schema_levels(chain(200, link)) - schema_levels(chain(100, link))
        length = (MAX_SCHEMA_LEVELS - 10) * 100 // levels
        grammar = Grammar("json_schema", json.dumps(chain(length, link)))
        if name != "pattern":
            assert not grammar_excess(grammar.kind, grammar.text), name
        found[name] = grammar
    rules = "".join(f'r{n}: "x" r{n + 1}\n' for n in range(1990))
    found["rules"] = Grammar("lark", f'start: r0\n{rules}r1990: "x"')
    found["plain-rules"] = Grammar("lark", found["rules"].text.replace('"x" r', "r"))
    found["embedded"] = Grammar("lark", "start: %json " + json.dumps(chain(490, LINKS["property"])))
    found["references-in-lark"] = Grammar("lark", "start: %json " + json.dumps(chain(990, LINKS["reference"])))
    return found


SCRIPT = """
    import json, sys, time
    from remora_llm.generation.grammar import GrammarCompiler
    from remora_llm.generation.tasks import Grammar, ParameterError
    from remora_llm.generation.grammar_limits import GRAMMAR_STACK_BYTES
    from remora.system.threads import run_in_daemon

    compiler = GrammarCompiler(open(sys.argv[1]).read(), 512, {2})
    compiler.compile(Grammar("regex", "a"))

    def attack(grammar):
        matcher = compiler.compile(grammar)
        for _ in range(40):
            (tokens,) = matcher.allowed().nonzero()
            if not len(tokens) or tokens[0] == 2:
                break
            matcher.accept(int(tokens[len(tokens) // 2]))

    for name, kind, text in json.load(sys.stdin):
        begin = time.process_time()
        try:
            run_in_daemon(lambda: attack(Grammar(kind, text)), "step", stack_bytes=GRAMMAR_STACK_BYTES).result()
            what = "obeyed"
        except ParameterError as error:
            what = f"refused: {error}"
        print(json.dumps([name, what, time.process_time() - begin]), flush=True)
"""


def attacked(grammars: dict[str, Grammar], folder: Path) -> dict[str, tuple[str, float]]:
    """Return what became of each grammar in a child process, and the processor seconds that it took."""
    pytest.importorskip("llguidance")
    done = subprocess.run(
        [sys.executable, "-c", dedent(SCRIPT), str(tiny(folder) / "tokenizer.json")],
        input=json.dumps([[name, each.kind, each.text] for name, each in grammars.items()]),
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT / "core"), "PATH": ""},
    )
    found = {name: (what, spent_s) for name, what, spent_s in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, f"it ended with {done.returncode} after {list(found)}: {done.stderr[-500:]}"
    return found


def test_no_grammar_ends_the_process_or_costs_more_than_two_seconds(tmp_path: Path) -> None:
    found = attacked(ATTACKS, tmp_path)
    assert set(found) == set(ATTACKS)
    assert {name: spent_s for name, (_, spent_s) in found.items() if spent_s > 2} == {}
    refused = {name for name, (what, _) in found.items() if what.startswith("refused")}
    assert refused >= {name for name in ATTACKS if name.startswith("chain")}
    assert refused >= {"nested", "embedded", "rules", "choices", "properties", "patterns"}


def test_the_deepest_permitted_grammars_are_compiled_and_stepped(tmp_path: Path) -> None:
    grammars = deepest()
    found = attacked(grammars, tmp_path)
    assert set(found) == set(grammars)
    assert {name: spent_s for name, (_, spent_s) in found.items() if spent_s > 2} == {}


def test_the_levels_of_a_schema_count_references() -> None:
    assert schema_levels({}) == 1
    assert schema_levels({"items": {"items": {}}}) == 3
    assert schema_levels(chain(10, LINKS["reference"])) == 12 + 1
    shared = {"$defs": {"a": {"items": {}}}, "anyOf": [{"$ref": "#/$defs/a"}] * 50}
    assert schema_levels(shared) == 3 + 2
    recursive = {"$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"items": {"$ref": "#/$defs/a"}}}}
    assert schema_levels({**recursive, "$ref": "#/$defs/a"}) == 2 + 2 + 2
    assert schema_levels({"$ref": "#"}) == 1
    assert schema_levels({"properties": {"a~/b": {"$ref": "#/properties/a~0~1b/x"}, "c": [{"$ref": "#/1"}]}}) == 4


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("choice", json.dumps(["x"] * 2000)), "2000 choices; at most 1999"),
        (Grammar("lark", 'start: "a"' + '| "b"' * 2000), "2001 alternatives; at most 1999"),
        (
            Grammar("json_schema", json.dumps({"properties": {str(n): {} for n in range(499)}})),
            "499 optional properties",
        ),
        (Grammar("json_schema", json.dumps({"patternProperties": {str(n): {} for n in range(65)}})), "65 patternProp"),
        (Grammar("regex", "a" * (1 << 20)), "more than 262144 bytes"),
    ],
    ids=lambda each: each.kind if isinstance(each, Grammar) else "",
)
def test_a_grammar_beyond_a_limit_is_refused_with_both_numbers(grammar: Grammar, reason: str) -> None:
    assert reason in grammar_excess(grammar.kind, grammar.text)


def test_what_answers_need_is_within_the_limits() -> None:
    names = [f"p{n}" for n in range(2000)]
    wide = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    assert not grammar_excess("json_schema", json.dumps(wide))
    assert not grammar_excess("json_schema", json.dumps({"enum": names * 5}))
    assert not grammar_excess("json_schema", json.dumps(chain(400, LINKS["property"])))
    assert not grammar_excess("choice", json.dumps(names[:1999]))
