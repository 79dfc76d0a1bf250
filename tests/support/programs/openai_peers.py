"""Calls of OpenAI's routes by the clients that users have, run in a separate environment.

    python openai_peers.py CLIENT URL [MODEL]

prints what the client understood, as JSON. Each client is a function of the base URL and the name of the model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

CHAT: Any = [{"role": "user", "content": "What is two plus two?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER, "strict": True},
}


def openai_whole(url: str, model: str) -> Any:
    client = openai_client(url)
    answer = client.chat.completions.create(model=model, messages=CHAT, max_tokens=12, temperature=0, logprobs=True)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    return {
        "text": choice.message.content,
        "reason": choice.finish_reason,
        "tokens": answer.usage.completion_tokens,
        "scores": len(choice.logprobs.content),
        "models": [each.id for each in client.models.list()],
        "model": client.models.retrieve(model).id,
    }


def openai_stream(url: str, model: str) -> Any:
    from openai import OpenAI

    with OpenAI(base_url=url, api_key="none") as client:
        chunks = list(
            client.chat.completions.create(
                model=model, messages=CHAT, max_tokens=12, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        with client.chat.completions.stream(model=model, messages=CHAT, max_tokens=12, temperature=0) as stream:
            final = "".join(event.delta for event in stream if event.type == "content.delta")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return {"text": text, "final": final, "tokens": chunks[-1].usage.completion_tokens}


def openai_async(url: str, model: str) -> Any:
    from openai import AsyncOpenAI

    async def ask() -> Any:
        async with AsyncOpenAI(base_url=url, api_key="none") as client:
            stream = await client.chat.completions.create(
                model=model, messages=CHAT, max_tokens=12, temperature=0, stream=True
            )
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            prompts = ["a", "b", "c"]
            answers = await asyncio.gather(
                *(client.completions.create(model=model, prompt=each, max_tokens=3, seed=1) for each in prompts)
            )
            return {"text": streamed, "several": len({each.id for each in answers})}

    return asyncio.run(ask())


def openai_parse(url: str, model: str) -> Any:
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: Literal["Paris", "Rome"]
        sunny: bool

    client = openai_client(url)
    parsed = client.chat.completions.parse(model=model, messages=CHAT, max_tokens=60, response_format=Weather)
    called = client.chat.completions.create(
        model=model, messages=CHAT, max_tokens=60, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    calls = called.choices[0].message.tool_calls
    weather = parsed.choices[0].message.parsed
    return {
        "parsed": weather.model_dump() if weather is not None else None,
        "call": [calls[0].function.name, json.loads(calls[0].function.arguments)],
        "reason": called.choices[0].finish_reason,
    }


def openai_errors(url: str, model: str) -> Any:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    found = {}
    for name, request in {
        "unknown": {"model": "other"},
        "wrong": {"model": model, "temperature": -1},
        "dropped": {"model": model, "extra_body": {"no_such_field": 1}},
    }.items():
        try:
            client.chat.completions.create(messages=CHAT, **request)  # type: ignore[call-overload]
        except openai.APIStatusError as error:
            found[name] = [type(error).__name__, error.param, error.code]  # type: ignore[attr-defined]
    return found


TOO_LONG: Any = [{"role": "user", "content": "word " * 2000}]


def openai_overflow(url: str, model: str) -> Any:
    """The classes that the clients' own code finds for a request beyond the context."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    found = {}
    calls: Any = {
        "chat": lambda: client.chat.completions.create(model=model, messages=TOO_LONG),
        "completion": lambda: client.completions.create(model=model, prompt="word " * 2000),
        "response": lambda: client.responses.create(model=model, input="word " * 2000),
    }
    for name, call in calls.items():
        try:
            call()
        except openai.BadRequestError as error:
            found[name] = [error.code, bool(error.request_id)]
    return found


def litellm_overflow(url: str, model: str) -> Any:
    import litellm as library

    library.telemetry = False
    options: Any = {"model": f"openai/{model}", "api_base": url, "api_key": "none"}
    found = []
    for extra in ({}, {"stream": True}, {"max_tokens": 100_000}):
        try:
            library.completion(**options, messages=TOO_LONG, **extra)
        except Exception as error:
            found.append(type(error).__name__)
    fallback: Any = {"model_name": "long", "litellm_params": {**options}}
    short: Any = {"model_name": "short", "litellm_params": {**options, "mock_response": "from the fallback"}}
    router = library.Router(model_list=[fallback, short], context_window_fallbacks=[{"long": ["short"]}], num_retries=0)
    answer = router.completion(model="long", messages=TOO_LONG)
    return {"errors": found, "fallback": answer.choices[0].message.content}


def langchain_overflow(url: str, model: str) -> Any:
    from langchain_openai import ChatOpenAI

    found = []
    for extra in ({}, {"use_responses_api": True}, {"streaming": True}):
        chat = ChatOpenAI(model=model, base_url=url, api_key="none", store=None, **extra)  # type: ignore[arg-type]
        try:
            chat.invoke("word " * 2000)
        except Exception as error:
            found.append(type(error).__name__)
    return found


def openai_fields(_url: str, _model: str) -> Any:
    """The fields of OpenAI's types, with which the tables of the routes are compared."""
    from openai.types import completion_create_params as completions
    from openai.types import embedding_create_params as embeddings
    from openai.types.chat import ChatCompletionStreamOptionsParam
    from openai.types.chat import completion_create_params as chats
    from openai.types.responses import ResponseTextConfigParam
    from openai.types.responses import response_create_params as responses
    from openai.types.shared_params import Reasoning

    def fields(*kinds: Any) -> list[str]:
        return sorted(
            {name for kind in kinds for each in kind.__mro__ for name in getattr(each, "__annotations__", {})}
        )

    def all_fields(module: Any) -> list[str]:
        names = ("CompletionCreateParamsBase", "CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming")
        return fields(*(getattr(module, name) for name in names))

    # a TypedDict has no bases at run time, but the annotations of all of them
    return {
        "chat": all_fields(chats),
        "completions": all_fields(completions),
        "embeddings": fields(embeddings.EmbeddingCreateParams),
        "stream_options": fields(ChatCompletionStreamOptionsParam),
        "responses": fields(
            responses.ResponseCreateParamsBase,
            responses.ResponseCreateParamsNonStreaming,
            responses.ResponseCreateParamsStreaming,
        ),
        "text": fields(ResponseTextConfigParam),
        "reasoning": fields(Reasoning),
        "response_stream_options": fields(responses.StreamOptions),
    }


def litellm(url: str, model: str) -> Any:
    import litellm as library

    library.telemetry = False
    options: Any = {
        "model": f"openai/{model}", "messages": CHAT, "api_base": url, "api_key": "none", "max_tokens": 12,
        "temperature": 0,
    }  # fmt: skip
    whole = library.completion(**options)
    chunks = library.completion(**options, stream=True)
    return {
        "text": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "tokens": whole.usage.completion_tokens,
    }


def langchain(url: str, model: str) -> Any:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city."""
        return city

    chat = ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, max_tokens=12)  # type: ignore[arg-type]
    whole = chat.invoke("What is two plus two?")
    streamed = "".join(str(chunk.content) for chunk in chat.stream("What is two plus two?"))
    longer = ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, max_tokens=80)  # type: ignore[arg-type]
    forced = longer.bind_tools([get_weather], tool_choice="get_weather").invoke("Weather?")
    return {"text": whole.content, "streamed": streamed, "call": forced.tool_calls[0]["name"]}


def instructor(url: str, model: str) -> Any:
    import instructor as library
    from pydantic import BaseModel

    class Answer(BaseModel):
        city: Literal["Paris", "Rome"]
        number: Literal[1, 2, 3]

    found = {}
    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA):
        client = library.from_openai(openai_client(url), mode=mode)
        answer = client.chat.completions.create(model=model, messages=CHAT, response_model=Answer, max_tokens=80)
        found[mode.name] = answer.model_dump()
    return found


def agents(url: str, model: str) -> Any:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    set_tracing_disabled(True)
    called: list[str] = []

    @function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather."""
        called.append("get_weather")
        return "sunny"

    engine = OpenAIChatCompletionsModel(model=model, openai_client=AsyncOpenAI(base_url=url, api_key="none"))
    plain = Agent(name="plain", model=engine, model_settings=ModelSettings(max_tokens=12, temperature=0))
    forced = Agent(
        name="forced",
        model=engine,
        tools=[get_weather],
        model_settings=ModelSettings(max_tokens=80, temperature=0, tool_choice="required"),
        tool_use_behavior="stop_on_first_tool",
    )

    class Place(BaseModel):
        city: Literal["Paris", "Rome"]

    typed = Agent(
        name="typed", model=engine, tools=[get_weather], output_type=Place,
        model_settings=ModelSettings(max_tokens=120, temperature=0), tool_use_behavior="stop_on_first_tool",
    )  # fmt: skip

    async def run() -> Any:
        final = (await Runner.run(typed, "Where?")).final_output
        placed = final.city if isinstance(final, Place) else final
        answer = await Runner.run(plain, "What is two plus two?")
        streamed = Runner.run_streamed(plain, "What is two plus two?")
        kinds = {event.type async for event in streamed.stream_events()}
        await Runner.run(forced, "Weather?")
        texts = {"text": answer.final_output, "streamed": streamed.final_output, "placed": placed}
        return {**texts, "kinds": sorted(kinds)}

    return {**asyncio.run(run()), "called": called}


def openai_responses(url: str, model: str) -> Any:
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: Literal["Paris", "Rome"]

    client = openai_client(url)
    options: Any = {"model": model, "input": CHAT, "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**options, instructions="Be brief")
    events = list(client.responses.create(**options, instructions="Be brief", stream=True))
    with client.responses.stream(model=model, input="Weather?", text_format=Weather, max_output_tokens=60) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    tool = {"type": "function", "strict": True, **{key: TOOL["function"][key] for key in ("name", "parameters")}}
    called = client.responses.create(
        model=model, input=CHAT, tools=[tool], tool_choice="required", max_output_tokens=60, parallel_tool_calls=False
    )
    (call,) = called.output
    again = [*CHAT, *called.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    plain = client.responses.create(model=model, input=CHAT, max_output_tokens=5)
    continued = client.responses.create(model=model, input=again, max_output_tokens=5)
    parsed = client.responses.parse(model=model, input="Weather?", text_format=Weather, max_output_tokens=60)
    return {
        "text": whole.output_text,
        "streamed": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "final": final.output_parsed.model_dump(),
        "kinds": sorted({*kinds, *(event.type for event in events)}),
        "numbers": [event.sequence_number for event in events],
        "tokens": whole.usage.output_tokens,
        "status": [whole.status, whole.incomplete_details.reason],
        "call": [call.name, json.loads(call.arguments)],
        "continued": continued.usage.input_tokens > plain.usage.input_tokens,
        "parsed": parsed.output_parsed.model_dump(),
    }


def openai_embeddings(url: str, model: str) -> Any:
    answer = openai_client(url).embeddings.create(model=model, input=["a", "bb", "aca"])
    return [row.embedding for row in answer.data]


def openai_client(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=url, api_key="none", max_retries=0)


if __name__ == "__main__":
    client, url, *model = sys.argv[1:]
    print(json.dumps(globals()[client](url, model[0] if model else "tiny")))
