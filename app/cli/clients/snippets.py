"""Writes the lines of a program that uses a library with a running server."""

import json

from reprise.app.cli.clients.served import NO_KEY, Served


def _python_key(served: Served) -> str:
    return f'os.environ["{served.key_variable}"]' if served.key_variable else f'"{NO_KEY}"'


def _imports(served: Served, *lines: str) -> str:
    return "".join(f"{line}\n" for line in (*(("import os", "") if served.key_variable else ()), *lines)) + "\n"


def ai_sdk(served: Served) -> str:
    key = f"process.env.{served.key_variable}" if served.key_variable else f'"{NO_KEY}"'
    return f"""import {{ createOpenAICompatible }} from "@ai-sdk/openai-compatible";

const reprise = createOpenAICompatible({{ name: "reprise", baseURL: {json.dumps(served.base)}, apiKey: {key} }});
// generateText and streamText take it as `model`; its window has {served.window} tokens.
export const model = reprise({json.dumps(served.model)});
"""


def openai_agents(served: Served) -> str:
    imports = _imports(
        served,
        "from agents import OpenAIResponsesModel, set_tracing_disabled",
        "from openai import AsyncOpenAI",
    )
    return f"""{imports}set_tracing_disabled(True)  # traces would go to OpenAI
client = AsyncOpenAI(base_url={json.dumps(served.base)}, api_key={_python_key(served)})
# Agent(...) takes it as `model`; its window has {served.window} tokens.
model = OpenAIResponsesModel(model={json.dumps(served.model)}, openai_client=client)
"""


def langchain(served: Served) -> str:
    imports = _imports(served, "from langchain_openai import ChatOpenAI")
    return f"""{imports}# create_agent(...) takes it as its model.
model = ChatOpenAI(
    model={json.dumps(served.model)},
    base_url={json.dumps(served.base)},
    api_key={_python_key(served)},
    stream_usage=True,
    profile={{"max_input_tokens": {served.window}}},
)
"""


def anthropic(served: Served) -> str:
    imports = _imports(served, "import anthropic")
    return f"""{imports}client = anthropic.Anthropic(base_url={json.dumps(served.url)}, api_key={_python_key(served)})
# The window has {served.window} tokens.
model = {json.dumps(served.model)}
"""
