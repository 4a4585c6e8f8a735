from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from the_server import KEY, MODEL

HELLO: Any = [{"role": "user", "content": "Hello! Do you like music?"}]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


class GetWeather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=8)


def test_litellm(base_url: str) -> None:
    import litellm

    fields: Any = {"model": f"openai/{MODEL}", "api_base": f"{base_url}/v1", "api_key": KEY, "messages": HELLO}
    plain = litellm.completion(**fields, max_tokens=20, seed=1)
    chunks = litellm.completion(**fields, max_tokens=20, seed=1, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == plain.choices[0].message.content
    assert plain.usage.prompt_tokens_details.cached_tokens is not None
    answer = litellm.completion(**fields, max_tokens=120, response_format={"type": "json_schema", "json_schema": {
        "name": "person", "schema": {**Person.model_json_schema(), "additionalProperties": False}}})  # fmt: skip
    Person.model_validate_json(answer.choices[0].message.content)


def test_langchain(base_url: str) -> None:
    chat = ChatOpenAI(model=MODEL, base_url=f"{base_url}/v1", api_key=SecretStr(KEY), max_completion_tokens=150, seed=1)
    plain = chat.invoke("Hello!")
    assert plain.content == "".join(str(chunk.content) for chunk in chat.stream("Hello!"))
    assert isinstance(chat.with_structured_output(Person, method="json_schema").invoke("Who are you?"), Person)
    called = chat.bind_tools([GetWeather], tool_choice="GetWeather", parallel_tool_calls=False).invoke("Weather?")
    (call,) = called.tool_calls  # type: ignore[attr-defined]
    assert call["name"] == "GetWeather"
    result = ToolMessage(content="Sunny.", tool_call_id=call["id"])
    assert chat.bind_tools([GetWeather]).invoke([HumanMessage("Weather?"), called, result]).usage_metadata is not None
