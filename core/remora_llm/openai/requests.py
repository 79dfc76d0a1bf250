"""Decoder of chats, completions, tokenize and detokenize. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remora.messages import Buffer
from remora_llm.generation import Generation
from remora_llm.generation.parameters import parse_parameters
from remora_llm.generation.tasks import MAX_CHOICES, ParameterError, Task
from remora_llm.openai.fields import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    TOKENIZE,
    describe,
    is_ids,
    read_body,
)
from remora_llm.openai.tools import ToolUse, closed, read_tools, with_form

Prompt = str | tuple[int, ...]

_TABLES = {"chat": CHAT, "completions": COMPLETION, "tokenize": TOKENIZE, "detokenize": DETOKENIZE}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MAX_STOPS = 4
_MAX_ANSWERS = 1024
"""Maximum number of answers to all prompts of a request."""
_COUNTS = ("tokenize", "detokenize", "input_tokens")
MAX_COUNTED_TOKENS = 1 << 16
"""Tokens that tokenize and detokenize convert, or the model's context if that is larger."""
_PASSED_ON = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("n", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "skip_special_tokens"),
    *("priority", "structured_outputs", "prompt_logprobs"),
)


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages of a chat and how the template renders them."""

    messages: Sequence[Mapping[str, Any]]
    tools: ToolUse | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """Role of the answer: that of the last message if the template begins no new one."""
        return "assistant" if self.add_generation_prompt else str(self.messages[-1]["role"])

    @property
    def echoed(self) -> str:
        """Text of the last message if it has the role of the answer, else empty."""
        last = self.messages[-1]
        if last["role"] != self.role:
            return ""
        content = last["content"]
        if isinstance(content, str):
            return content
        texts = (part.get("text") if isinstance(part, dict) else part for part in content)
        return "\n".join(text for text in texts if isinstance(text, str))


@dataclass(frozen=True, slots=True)
class Query:
    """Meaning of a request.

    Attributes:
        action: of the route.
        model: name of the model, empty if there is none.
        chat: messages; None for plain prompts.
        prompts: of a completion: texts or token ids.
        parameters: sampling parameters under vLLM's names.
        renamed: names of parameters in the request, by the names under which the engine knows them, for errors.
        stream, usage, continuous_usage: of a stream, with usage at its end and in each chunk.
        echo: the answer begins with the prompt of a completion, or the last message of a chat if it has the same role.
        token_ids: the answer has token ids.
        prompt_scores: the answer has the log probabilities of the prompt's tokens.
        add_special: special tokens are added around a prompt.
        ignored: names of unknown fields.
        response: members of a response object that repeat the request.
    """

    action: str
    model: str = ""
    chat: Chat | None = None
    prompts: tuple[Prompt, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    stream: bool = False
    usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    token_ids: bool = False
    prompt_scores: bool = False
    add_special: bool = True
    ignored: Sequence[str] = ()
    response: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_constrained(self) -> bool:
        """True if a grammar has to be compiled."""
        return "structured_outputs" in self.parameters


def decode(action: str, body: Buffer, *, ignore_unknown: bool = False) -> Query:
    """Return the query of a body.

    Raises:
        ParameterError: a parameter is wrong.
        InvalidArgumentError: the body is not JSON.
    """
    fields, ignored = read_body(body, _TABLES[action], ignore_unknown=ignore_unknown)
    model = fields.get("model", "")
    if action == "detokenize":
        return Query(action, model, prompts=(tuple(_needed(fields, "tokens")),), ignored=ignored)
    if action == "tokenize":
        return _tokenize(fields, model, ignored)
    if action == "chat":
        return chat_query(action, fields, ignored)
    shared = _shared(fields, ignored)
    prompts = _read_prompts(_needed(fields, "prompt"))
    parameters = {**_parameters(fields), **_completion_parameters(fields)}
    if len(prompts) * parameters.get("n", 1) > _MAX_ANSWERS:
        raise ParameterError("prompt", f"{len(prompts)} prompts ask for more than {_MAX_ANSWERS} answers: send fewer")
    return Query(action, model, None, prompts, parameters, renamed=_renamed(fields, None), **shared)


def chat_query(action: str, fields: Mapping[str, Any], ignored: Sequence[str]) -> Query:
    """Return the query of a chat's fields. Raises ParameterError."""
    parameters = _parameters(fields)
    chat = _with_form(_read_chat(fields), parameters.get("structured_outputs"), fields)
    parameters |= _chat_parameters(fields, chat)
    shared = _shared(fields, ignored)
    renamed = _renamed(fields, chat)
    return Query(action, fields.get("model", ""), chat, parameters=parameters, renamed=renamed, **shared)


def tasks_of(query: Query, generation: Generation, seed: int) -> list[Task]:
    """Return a task for each prompt of a chat or completion.

    Args:
        query: its prompts and parameters.
        generation: of the model.
        seed: used where the request has none.

    Raises:
        ParameterError: a parameter is wrong, or the model cannot honour it.
    """
    facts = generation.engine.facts
    parameters = {**(generation.defaults or {}), **query.parameters}
    tasks = []
    for prompt in encode_prompts(query, generation):
        room = facts.context - len(prompt)
        if query.chat is not None and "max_tokens" not in parameters:
            limit = generation.default_max_tokens or room
            limited = {**parameters, "max_tokens": max(min(limit, room), 1)}
        else:
            limited = parameters
        tasks.append(parse_parameters(limited, prompt, seed=seed, room=room))
    return tasks


def encode_prompts(query: Query, generation: Generation) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt.

    Raises:
        ParameterError: the model has no chat template, the template refuses the messages, or a prompt is too long.
    """
    chat, most = query.chat, most_tokens(query, generation)
    if chat is None:
        encode = generation.tokens.encode
        return [
            prompt if isinstance(prompt, tuple) else encode(prompt, add_special=query.add_special, most=most)
            for prompt in query.prompts
        ]
    template = generation.chat
    if template is None:
        raise ParameterError(
            "messages", "the model has no chat template: use /v1/completions, or set the parameter chat_template"
        )
    messages = chat.messages
    if "developer" not in template.source:
        messages = [
            {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
        ]
    return [
        template.render(
            messages,
            tools=chat.tools.tools if chat.tools is not None else (),
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            arguments=chat.arguments,
            most=most,
        )
    ]


def most_tokens(query: Query, generation: Generation) -> int:
    """Return the number of tokens beyond which a prompt of this query is refused."""
    context = generation.engine.facts.context
    return max(context, MAX_COUNTED_TOKENS) if query.action in _COUNTS else context


def _needed(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise ParameterError(name, f"the parameter {name} is missing")
    return fields[name]


def _shared(fields: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    """Return the attributes of a query that chats and completions share."""
    stream = fields.get("stream", False)
    if "stream_options" in fields and not stream:
        raise ParameterError("stream_options", "stream_options needs stream to be true")
    if stream and "prompt_logprobs" in fields:
        raise ParameterError("prompt_logprobs", "prompt_logprobs needs stream to be false")
    options = fields.get("stream_options", {})
    return {
        "stream": stream,
        "usage": options.get("include_usage", False),
        "continuous_usage": options.get("continuous_usage_stats", False) and options.get("include_usage", False),
        "echo": fields.get("echo", False),
        "token_ids": fields.get("return_token_ids", False),
        "prompt_scores": "prompt_logprobs" in fields,
        "add_special": fields.get("add_special_tokens", True),
        "ignored": ignored,
    }


def _parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that chats and completions share, under vLLM's names."""
    found = {name: fields[name] for name in _PASSED_ON if name in fields}
    stops = found.get("stop")
    if isinstance(stops, list) and len(stops) > _MAX_STOPS:
        raise ParameterError("stop", f"stop has {len(stops)} texts; at most {_MAX_STOPS} are allowed")
    if isinstance(stops, str) and not stops:
        raise ParameterError("stop", "stop must not be empty")
    if fields.get("n", 1) > MAX_CHOICES:
        raise ParameterError("n", f"n is {fields['n']}; at most {MAX_CHOICES} answers are possible")
    user = fields.get("safety_identifier") or fields.get("user")
    if user:
        found["user"] = user
    if "max_tokens" in fields:
        found["max_tokens"] = fields["max_tokens"]
    constraint = _read_format(fields.get("response_format"))
    if constraint is not None:
        if "structured_outputs" in found:
            raise ParameterError("structured_outputs", "structured_outputs and response_format exclude each other")
        found["structured_outputs"] = constraint
    return found


def _renamed(fields: Mapping[str, Any], chat: Chat | None) -> dict[str, str]:
    names = {}
    if "max_completion_tokens" in fields:
        names["max_tokens"] = "max_completion_tokens"
    if "structured_outputs" in fields:
        names["response_format"] = "structured_outputs"
    elif chat is not None and chat.tools is not None and chat.tools.schema is not None:
        names["response_format"] = "tools"
    if "top_logprobs" in fields:
        names["logprobs"] = "top_logprobs"
    if chat is not None:
        names["prompt"] = "messages"
    elif fields.get("echo"):
        names |= {"prompt_logprobs": "logprobs", "tokens": "prompt"}
    return names


def _chat_parameters(fields: Mapping[str, Any], chat: Chat) -> dict[str, Any]:
    found: dict[str, Any] = {}
    limit = fields.get("max_completion_tokens", fields.get("max_tokens"))
    if limit is not None:
        if limit < 1:
            name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
            raise ParameterError(name, f"{name} is {limit}; it must be at least 1")
        found["max_tokens"] = limit
    top = fields.get("top_logprobs")
    if fields.get("logprobs", False):
        found["logprobs"] = top or 0
    elif top is not None:
        raise ParameterError("top_logprobs", "top_logprobs needs logprobs to be true")
    schema = chat.tools.schema if chat.tools is not None else None
    if schema is not None:
        found["structured_outputs"] = {"json": schema}
    return found


def _with_form(chat: Chat, constraint: Any, fields: Mapping[str, Any]) -> Chat:
    """Return a chat whose answer has the form if the model calls no tool."""
    if chat.tools is None or chat.tools.must_call or not isinstance(constraint, Mapping):
        return chat
    parameter = "response_format" if "response_format" in fields else "structured_outputs"
    return replace(chat, tools=with_form(chat.tools, constraint, parameter))


def _completion_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    n, best_of = fields.get("n", 1), fields.get("best_of")
    if best_of is not None and best_of != n:
        raise ParameterError("best_of", f"best_of is {best_of}; only the number of answers (n, here {n}) is supported")
    if fields.get("max_tokens") == 0 and not fields.get("echo"):
        raise ParameterError("max_tokens", "max_tokens is 0, which needs echo to be true")
    if "logprobs" in fields:
        found["logprobs"] = fields["logprobs"]
        if fields.get("echo"):
            found["prompt_logprobs"] = fields.get("prompt_logprobs", fields["logprobs"])
    return found


def _read_format(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return vLLM's ``structured_outputs`` for a ``response_format``, None for plain text."""
    if value is None:
        return None
    name = "response_format"
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise ParameterError(name, f"{name}.type must be 'text', 'json_object' or 'json_schema', not {describe(kind)}")
    holder = value.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise ParameterError(name, f"{name}.json_schema.schema must be a JSON schema, not {describe(schema)}")
    return {"json": closed(schema)}


def _tokenize(fields: Mapping[str, Any], model: str, ignored: Sequence[str]) -> Query:
    names = fields.get("return_token_strs", False)
    if "messages" in fields:
        chat = _read_chat(fields)
        return Query("tokenize", model, chat, token_ids=names, ignored=ignored)
    if "prompt" not in fields:
        raise ParameterError("prompt", "the request has neither prompt nor messages")
    special = fields.get("add_special_tokens", True)
    prompts: tuple[Prompt, ...] = (fields["prompt"],)
    return Query("tokenize", model, prompts=prompts, add_special=special, token_ids=names, ignored=ignored)


def _read_prompts(value: Any) -> tuple[Prompt, ...]:
    """Return the prompts of a completion: a text, token ids, or a list of either."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if is_ids(value):
            return (tuple(value),)
        if all(isinstance(each, str) for each in value):
            return tuple(value)
        if all(map(is_ids, value)):
            return tuple(tuple(each) for each in value)
    raise ParameterError(
        "prompt", "prompt must be a text, a list of texts, a list of token ids or a list of such lists"
    )


def _read_chat(fields: Mapping[str, Any]) -> Chat:
    messages = _needed(fields, "messages")
    if not messages:
        raise ParameterError("messages", "messages is empty: give at least one message")
    arguments = dict(fields.get("chat_template_kwargs", {}))
    if "reasoning_effort" in fields:
        arguments.setdefault("reasoning_effort", fields["reasoning_effort"])
    return Chat(
        [_read_message(message, f"messages[{place}]") for place, message in enumerate(messages)],
        read_tools(fields),
        fields.get("add_generation_prompt", True),
        fields.get("continue_final_message", False),
        arguments,
    )


def _read_message(message: Any, path: str) -> Mapping[str, Any]:
    """Return a message for the template.

    It has no null members, and the arguments of its calls are objects.
    """
    if not isinstance(message, dict):
        raise ParameterError("messages", f"{path} must be an object, not {describe(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ParameterError("messages", f"{path}.role must be one of {', '.join(ROLES)}, not {describe(role)}")
    calls = message.get("tool_calls")
    refusal = message.get("refusal")
    if content is None:
        if role != "assistant" or not (calls or refusal or message.get("function_call")):
            raise ParameterError("messages", f"{path} has no content")
        content = refusal or ""
    elif not isinstance(content, str | list):
        raise ParameterError("messages", f"{path}.content must be a text or a list of parts, not {describe(content)}")
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise ParameterError("messages", f"{path}.{name} is not supported")
    found = {name: value for name, value in message.items() if value is not None}
    found["content"] = content
    if calls:
        found["tool_calls"] = _read_calls(calls, f"{path}.tool_calls")
    else:
        found.pop("tool_calls", None)
    return found


def _read_calls(calls: Any, path: str) -> list[Mapping[str, Any]]:
    if not isinstance(calls, list):
        raise ParameterError("messages", f"{path} must be a list, not {describe(calls)}")
    found: list[Mapping[str, Any]] = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ParameterError("messages", f"{path}[{place}] must have a function with a name")
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise ParameterError("messages", f"{path}[{place}].function.arguments is not JSON: {error}") from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found
