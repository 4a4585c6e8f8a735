import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from reprise.app.cli.clients.formats import Json, Toml, Variables, Yaml
from reprise.app.cli.clients.served import Served
from reprise.app.cli.clients.table import CLIENTS, WORK_TOKENS, Client, word_on_agents, word_on_window

OPEN = Served("http://box:8001", "org/some-model", 65_536, 16_384, False, "")
LOCKED = Served("http://box:8001", "org/some-model", 65_536, 16_384, True, "MY_KEY")
# The clients whose configuration has a place for the window, and what stands there.
WINDOWS: dict[str, object] = {
    **dict.fromkeys(("codex", "opencode", "kilo", "qwen", "pi", "continue"), 65_536),
    "vibe": 65_536 - 16_384,
    "aider": 4096,
}


def parsed(client: Client, text: str) -> Any:
    """Parse a configuration as its client does."""
    match client.form:
        case Json():
            return json.loads(text)
        case Toml():
            return tomllib.loads(text)
        case Yaml():
            return yaml.safe_load(text)
        case Variables():
            return dict(line.split("=", 1) for line in text.splitlines())
    if "import os" in text or "import anthropic" in text or text.startswith("from "):
        ast.parse(text)
    elif not text.startswith("import {"):
        return shlex.split(text)
    return text


def leaves(value: Any) -> Iterator[object]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value


@pytest.mark.parametrize("served", [OPEN, LOCKED], ids=["open", "locked"])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_configuration_is_what_its_client_reads(name: str, served: Served) -> None:
    client = CLIENTS[name]
    text = client.form.text(client.config(served))
    config = parsed(client, text)
    if isinstance(config, dict):
        assert config == client.config(served) or isinstance(client.form, Variables)
    assert served.url in text
    assert served.model in text + client.run(served)
    if name in WINDOWS:
        assert WINDOWS[name] in list(leaves(config))
    assert bool(served.key_variable) == ("MY_KEY" in text + client.run(served))


def test_codex_has_a_provider_of_its_own() -> None:
    codex = CLIENTS["codex"]
    assert codex.form.text(codex.config(LOCKED)) == (
        'model = "org/some-model"\n'
        'model_provider = "reprise"\n'
        "model_context_window = 65536\n"
        "\n"
        "[model_providers.reprise]\n"
        'name = "Reprise"\n'
        'base_url = "http://box:8001/v1"\n'
        'wire_api = "responses"\n'
        'env_key = "MY_KEY"\n'
    )


def test_a_name_with_odd_characters_stays_one_word() -> None:
    odd = Served("http://box:8001", "a model; rm 'x' \"y\" é", 65_536, 16_384, False, "")
    for client in CLIENTS.values():
        assert parsed(client, client.form.text(client.config(odd)))
        assert odd.model in " ".join(shlex.split(client.run(odd))) or odd.model not in client.run(odd)
    assert odd.model in shlex.split(str(CLIENTS["cline"].config(odd)))


def test_every_agent_says_how_long_its_first_request_is() -> None:
    for client in CLIENTS.values():
        word = word_on_window(client, client.first_tokens)
        assert bool(word) == bool(client.first_tokens)
        if word:
            assert client.title in word
            assert f"{client.first_tokens:,}" in word
            assert "leaves 1 for" in word_on_window(client, client.first_tokens + 1)
        assert word_on_window(client, client.first_tokens + WORK_TOKENS) == ""


def test_a_small_window_is_said_with_the_largest_first_request() -> None:
    assert word_on_agents(8192) == (
        "window 8,192: too small for most coding agents; Qwen Code sends 19,000 tokens first"
    )
    assert word_on_agents(24_000) == "window 24,000: too small for Qwen Code; Qwen Code sends 19,000 tokens first"
    assert word_on_agents(32_768) == ""


def test_the_page_lists_every_client() -> None:
    from tests.test_docs import ROOT

    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE) == list(CLIENTS)


@pytest.mark.parametrize(("window", "own", "helps"), [(256, 8192, True), (8192, 8192, False), (8192, 0, False)])
def test_a_longer_window_is_advised_only_where_the_model_has_one(window: int, own: int, helps: bool) -> None:
    served = Served(
        url="http://x", model="m", window=window, own_window=own, output_tokens=64, thinks=False, key_variable=""
    )
    assert ("model.max_context" in served.way_to_longer) == helps
