"""Lists the clients whose configuration `reprise client` writes.

`first_tokens` is how long a client's first request is, its prompt and tools, by the tokenizer of SmolLM2. The requests
were recorded in November 2026, with the versions of then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from shlex import quote
from typing import Any, Literal

from reprise.app.cli.clients import snippets
from reprise.app.cli.clients.formats import Format, Json, Lines, Toml, Variables, Yaml
from reprise.app.cli.clients.served import NO_KEY, Served

Dialect = Literal["chat", "responses", "messages"]
PROVIDER = "reprise"
WORK_TOKENS = 8192  # what an agent needs after its first request: a file or two, and results of tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    name: str
    title: str
    dialect: Dialect
    first_tokens: int  # 0: the prompt is the user's own
    form: Format
    config: Callable[[Served], Any]  # returns what `form` writes
    path: str = ""  # its file; "": it has none of its own
    moved_by: tuple[str, str] = ("", "")  # a variable that names the file's folder, and the file in it
    run: Callable[[Served], str] = lambda _: ""  # a command that starts it with this configuration
    note: str = ""


def _codex(served: Served) -> dict[str, Any]:
    provider = {"name": "Reprise", "base_url": served.base, "wire_api": "responses"}
    if served.key_variable:
        provider["env_key"] = served.key_variable
    return {
        "model": served.model,
        "model_provider": PROVIDER,
        "model_context_window": served.window,
        "model_providers": {PROVIDER: provider},
    }


def _opencode(served: Served) -> dict[str, Any]:
    model = {
        "name": served.model,
        "tool_call": True,
        "reasoning": served.thinks,
        "limit": {"context": served.window, "output": served.output_tokens},
    }
    options = {"baseURL": served.base, "apiKey": f"{{env:{served.key_variable}}}" if served.key_variable else NO_KEY}
    return {
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Reprise",
                "options": options,
                "models": {served.model: model},
            }
        },
        "model": f"{PROVIDER}/{served.model}",
        "small_model": f"{PROVIDER}/{served.model}",
    }


def _qwen(served: Served) -> dict[str, Any]:
    variable = served.key_variable or "REPRISE_NO_KEY"
    model = {
        "id": served.model,
        "name": f"{served.model} (Reprise)",
        "baseUrl": served.base,
        "envKey": variable,
        "generationConfig": {"contextWindowSize": served.window},
    }
    config: dict[str, Any] = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": served.model},
        "modelProviders": {"openai": [model]},
    }
    return config if served.key_variable else {**config, "env": {variable: NO_KEY}}


def _pi(served: Served) -> dict[str, Any]:
    model = {"id": served.model, "contextWindow": served.window, "maxTokens": served.output_tokens}
    provider = {
        "baseUrl": served.base,
        "api": "openai-completions",
        "apiKey": served.key_variable or NO_KEY,  # it looks for a variable of this name first
        "models": [{**model, "reasoning": served.thinks}],
    }
    return {"providers": {PROVIDER: provider}}


def _continue(served: Served) -> dict[str, Any]:
    key = f"${{{{ secrets.{served.key_variable} }}}}" if served.key_variable else NO_KEY
    model = {
        "name": served.model,
        "provider": "openai",
        "model": served.model,
        "apiBase": served.base,
        "apiKey": key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": served.window, "maxTokens": served.output_tokens},
    }
    return {"name": "Reprise", "version": "1.0.0", "schema": "v1", "models": [model]}


def _vibe(served: Served) -> dict[str, Any]:
    provider = {
        "name": PROVIDER,
        "api_base": served.base,
        "api_key_env_var": served.key_variable,
        "api_style": "openai",
        "backend": "generic",
    }
    model = {"name": served.model, "provider": PROVIDER, "alias": PROVIDER}
    # It shortens the conversation before the window is full.
    model_limits = {"auto_compact_threshold": served.window - served.output_tokens}
    return {"active_model": PROVIDER, "providers": [provider], "models": [{**model, **model_limits}]}


def _aider(served: Served) -> dict[str, Any]:
    return {
        "model": f"openai/{served.model}",
        "openai-api-base": served.base,
        "max-chat-history-tokens": min(max(served.window // 16, 1024), 8192),
        "show-model-warnings": False,
    }


def _mini(served: Served) -> dict[str, Any]:
    return {
        "MSWEA_MODEL_NAME": f"openai/{served.model}",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "OPENAI_API_BASE": served.base,
        "OPENAI_API_KEY": f"${{{served.key_variable}}}" if served.key_variable else NO_KEY,
    }


def _cline(served: Served) -> str:
    model, base = quote(served.model), quote(served.base)
    return f"cline auth -p openai-compatible -k {served.shell_key} -m {model} -b {base}\n"


def _gptme(served: Served) -> str:
    return f"export OPENAI_BASE_URL={quote(served.base)} OPENAI_API_KEY={served.shell_key}\n"


CLIENTS = {
    client.name: client
    for client in (
        Client(
            name="codex",
            title="Codex",
            dialect="responses",
            first_tokens=9000,
            form=Toml(optional=("env_key",)),
            config=_codex,
            path="~/.codex/config.toml",
            moved_by=("CODEX_HOME", "config.toml"),
            run=lambda _: "codex",
            note="It warns that it has no metadata of the model, and takes the window from this file.",
        ),
        Client(
            name="opencode",
            title="opencode",
            dialect="chat",
            first_tokens=8000,
            form=Json(),
            config=_opencode,
            path="~/.config/opencode/opencode.json",
            run=lambda _: "opencode",
        ),
        Client(
            name="kilo",
            title="Kilo",
            dialect="chat",
            first_tokens=15_100,
            form=Json(),
            config=_opencode,
            path="~/.config/kilo/kilo.json",
            run=lambda _: "kilo",
        ),
        Client(
            name="qwen",
            title="Qwen Code",
            dialect="chat",
            first_tokens=19_000,
            form=Json(),
            config=_qwen,
            path="~/.qwen/settings.json",
            run=lambda _: "qwen",
        ),
        Client(
            name="pi",
            title="pi",
            dialect="chat",
            first_tokens=1800,
            form=Json(),
            config=_pi,
            path="~/.pi/agent/models.json",
            moved_by=("PI_CODING_AGENT_DIR", "models.json"),
            run=lambda served: f"pi --provider {PROVIDER} --model {quote(served.model)}",
        ),
        Client(
            name="cline",
            title="Cline",
            dialect="chat",
            first_tokens=6000,
            form=Lines(),
            config=_cline,
            run=lambda _: "cline",
            note="Its extension has the provider 'OpenAI Compatible' for this, and a field for the window.",
        ),
        Client(
            name="continue",
            title="Continue",
            dialect="chat",
            first_tokens=2300,
            form=Yaml(),
            config=_continue,
            path="~/.continue/config.yaml",
            run=lambda _: "cn",
        ),
        Client(
            name="vibe",
            title="Mistral Vibe",
            dialect="chat",
            first_tokens=8900,
            form=Toml(),
            config=_vibe,
            path="~/.vibe/config.toml",
            moved_by=("VIBE_HOME", "config.toml"),
            run=lambda _: "vibe",
        ),
        Client(
            name="aider",
            title="aider",
            dialect="chat",
            first_tokens=2400,
            form=Yaml(),
            config=_aider,
            path="~/.aider.conf.yml",
            run=lambda served: f"OPENAI_API_KEY={served.shell_key} aider",
            note="It calls no tools: it writes its changes as text.",
        ),
        Client(
            name="mini",
            title="mini-swe-agent",
            dialect="chat",
            first_tokens=1300,
            form=Variables(),
            config=_mini,
            path="~/.config/mini-swe-agent/.env",
            moved_by=("MSWEA_GLOBAL_CONFIG_DIR", ".env"),
            run=lambda _: "mini",
        ),
        Client(
            name="gptme",
            title="gptme",
            dialect="chat",
            first_tokens=10_100,
            form=Lines(),
            config=_gptme,
            run=lambda served: f"gptme -m {quote(f'local/{served.model}')} --tool-format tool",
        ),
        Client(
            name="ai-sdk",
            title="AI SDK",
            dialect="chat",
            first_tokens=0,
            form=Lines(),
            config=snippets.ai_sdk,
            note="Its packages on npm are ai and @ai-sdk/openai-compatible.",
        ),
        Client(
            name="openai-agents",
            title="OpenAI Agents",
            dialect="responses",
            first_tokens=0,
            form=Lines(),
            config=snippets.openai_agents,
            note="Its package on PyPI is openai-agents.",
        ),
        Client(
            name="langchain",
            title="LangChain",
            dialect="chat",
            first_tokens=0,
            form=Lines(),
            config=snippets.langchain,
            note="Its packages on PyPI are langchain and langchain-openai.",
        ),
        Client(
            name="anthropic",
            title="Anthropic's SDK",
            dialect="messages",
            first_tokens=0,
            form=Lines(),
            config=snippets.anthropic,
            note="Its package on PyPI is anthropic.",
        ),
    )
}


def word_on_window(client: Client, window: int) -> str:
    """Return a sentence that a context window is too small for a client; empty if it is not. window: in tokens."""
    room = window - client.first_tokens
    if not client.first_tokens or room >= WORK_TOKENS:
        return ""
    first = f"its first request has about {client.first_tokens:,} tokens"
    said = f"window {window:,}: too small for {client.title}: {first}"
    return said if room <= 0 else f"{said}, which leaves {room:,} for files and results of tools"


def word_on_agents(window: int) -> str:
    """Return a sentence that names the coding agents for which a context window is too small; empty if there are none.
    window: in tokens."""
    agents = [client for client in CLIENTS.values() if client.first_tokens]
    cramped = sorted((client for client in agents if word_on_window(client, window)), key=lambda one: -one.first_tokens)
    if not cramped:
        return ""
    largest = cramped[0]
    whom = "most coding agents" if 2 * len(cramped) > len(agents) else ", ".join(client.title for client in cramped)
    return f"window {window:,}: too small for {whom}; {largest.title} sends {largest.first_tokens:,} tokens first"
