"""Long prompts on OpenAI's routes, and the routes that convert tokens."""

from __future__ import annotations

import json
from functools import partial
from threading import get_ident
from typing import Any

from support.process.eventually import eventually_in_loop
from support.wire.openai_by_hand import Server, running


@running
async def test_texts_are_converted_up_to_a_limit_and_long_ones_in_another_thread() -> None:
    server = Server()
    threads: list[int] = []
    generation = server.model.generation
    assert generation is not None
    encode = generation.tokens.encode

    def noted(text: str, **options: Any) -> tuple[int, ...]:
        threads.append(get_ident())
        return encode(text, **options)

    generation.tokens.encode = noted  # type: ignore[method-assign]
    for size, status in ((1 << 16, 200), ((1 << 16) + 1, 400)):
        body = json.dumps({"model": "m", "prompt": "a" * size}).encode()
        _, exchange = server.ask(path="/tokenize", body=body)
        await eventually_in_loop(partial(len, exchange.answers))
        assert exchange.answers[0].status == status
        body = json.dumps({"model": "m", "tokens": [65] * size}).encode()
        _, exchange = server.ask(path="/detokenize", body=body)
        await eventually_in_loop(partial(len, exchange.answers))
        assert exchange.answers[0].status == status
    assert get_ident() not in threads


@running
async def test_a_long_prompt_is_refused_with_the_name_of_its_parameter() -> None:
    server = Server(chat=True)
    for path, fields in (
        ("/v1/completions", {"prompt": "a" * 500_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 5_000_000}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 20_000}),
    ):
        _, exchange = server.ask(path=path, body=json.dumps({"model": "m", "max_tokens": 4, **fields}).encode())
        await eventually_in_loop(partial(len, exchange.answers))
        (answer,) = exchange.answers
        error = json.loads(b"".join(answer.body))["error"]
        assert (answer.status, error["param"]) == (400, "messages" if "messages" in fields else "prompt"), error
    assert server.model.users == 0
