"""Tests of ``remora_llm.generation.templates``."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.errors import ConfigError
from remora_llm.generation.tasks import ParameterError
from remora_llm.generation.templates import JinjaTemplate
from remora_llm.generation.tokenizing import TokenizerFile, read_tokenizer
from support.models.generation_models import tiny

pytest.importorskip("jinja2")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
START, END = 1, 2


@cache
def tokens() -> TokenizerFile:
    return read_tokenizer(tiny(Path(mkdtemp())) / "tokenizer.json", "tiny")


def template(source: str = CHATML, now: Any = None) -> JinjaTemplate:
    return JinjaTemplate(source, tokens(), {"bos_token": "<|endoftext|>"}, "m", now or (lambda: 0), lambda form: "2026")


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_chat_becomes_the_tokens_of_its_text() -> None:
    made = template()
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert made.render_text(user("Hello")) == text
    assert made.render(user("Hello")) == tokens().encode(text)


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>system", "Hello ", "\ufdd0", "<|", "\n", "é"]), max_size=6))
def test_special_tokens_in_a_message_stay_text(parts: list[str]) -> None:
    text = "".join(parts)
    found = template().render(user(text))
    assert found.count(START) == 2
    assert found.count(END) == 1
    body = found[found.index(START) + 1 : found.index(END)]
    assert tokens().decode(body, skip_special=False) == "user\n" + text
    if "<|im_" not in text:
        assert found == tokens().encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


def test_special_tokens_in_tools_and_arguments_stay_text() -> None:
    made = template("{{ tools | tojson }}{{ mood }}{{ messages[0].content }}")
    found = made.render(user("x"), tools=[{"name": "<|im_end|>"}], arguments={"mood": "<|im_start|>"})
    assert not {START, END} & set(found)


def test_a_template_may_refuse_with_its_own_words() -> None:
    made = template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ParameterError, match="roles must alternate") as raised:
        made.render(user("x"))
    assert raised.value.parameter == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].role + 1 }}",
        "{{ missing.name }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        text = template(source).render_text(user("x"))
    except ParameterError as error:
        assert error.parameter == "messages"  # noqa: PT017  # both ends are safe
    else:
        assert "class" not in text


def test_output_and_time_are_limited() -> None:
    long = "{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(ParameterError, match="too long"):
        template(long).render(user("x" * 1000))
    clock = itertools.count(0, 1_000_000_000)
    with pytest.raises(ParameterError, match="too long"):
        template("{% for i in range(100) %}{{ messages[0].content }}{% endfor %}", lambda: next(clock)).render(
            user("x")
        )


def test_parts_of_a_message_are_joined_unless_the_template_takes_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template("{{ messages[0].content }}").render_text(user(parts)) == "a\nb"
    own = template(
        "{% for part in messages[0].content %}{% if part.type == 'text' %}[{{ part.text }}]{% endif %}{% endfor %}"
    )
    assert own.render_text(user(parts)) == "[a][b]"
    with pytest.raises(ParameterError, match="'image_url'"):
        own.render_text(user([{"type": "image_url", "image_url": {"url": "x"}}]))


def test_the_last_message_can_be_continued() -> None:
    chat = [*user("Hi"), {"role": "assistant", "content": "I am "}]
    text = template().render_text(chat, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nI am"
    with pytest.raises(ParameterError, match="exclude each other"):
        template().render_text(chat, continue_final_message=True)
    with pytest.raises(ParameterError, match="no text"):
        template().render_text(user(""), add_generation_prompt=False, continue_final_message=True)


def test_a_request_cannot_bring_a_template() -> None:
    with pytest.raises(ParameterError, match="must not have chat_template"):
        template().render(user("x"), arguments={"chat_template": "{{ 1 }}"})


def test_what_templates_of_the_ecosystem_use_is_there() -> None:
    source = (
        "{{ bos_token }}{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}"
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content | tojson }}{% endfor %}"
    )
    assert template(source).render_text([*user("a"), *user('é"<')]) == '<|endoftext|>2026"é\\"<"'


def test_a_syntax_error_is_found_at_load() -> None:
    with pytest.raises(ConfigError, match="model 'm': its chat template, line 2"):
        template("a\n{% for %}")


def test_messages_that_are_too_deep_are_refused() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = {"a": deep}
    with pytest.raises(ParameterError, match="deeper"):
        template().render([{"role": "user", "content": "x", "more": deep}])


def test_messages_that_cannot_fit_are_refused_before_their_template_runs() -> None:
    made = template("{{ raise_exception('rendered') }}")
    with pytest.raises(ParameterError, match="there are 200 messages; at most 100"):
        made.render(user("a") * 200, most=100)
    with pytest.raises(ParameterError, match=f"more than {100 * tokens().longest} characters"):
        made.render(user("a" * (tokens().longest * 99)) + user("b" * tokens().longest * 2), most=100)
    with pytest.raises(ParameterError, match="rendered"):
        made.render(user("a" * 100), most=100)


def test_messages_made_of_special_tokens_are_refused_once_they_cannot_fit() -> None:
    made = template("{% for m in messages %}{{ '<|im_end|>' * 1000 }}{{ m.content }}{% endfor %}")
    with pytest.raises(ParameterError, match="more than 100 tokens; at most 50"):
        made.render(user("<|im_end|>"), most=50)


def test_a_special_token_is_found_wherever_it_stands() -> None:
    made = template()
    for before in (0, (1 << 16) - 5, 1 << 16, (1 << 17) - 1):
        found = made.render(user("a" * before + "<|im_end|>"))
        assert found.count(END) == 1
