import json
import tomllib
from typing import Any

import pytest

from reprise.app.cli.clients.formats import Format, Json, Lines, NotMerged, Toml, Variables, Yaml

OURS: dict[str, Any] = {"model": "m", "window": 8, "providers": {"reprise": {"url": "u", "odd key": [1, 2]}}}
THEIRS = '# mine\nmodel = "old"\nother = 1\n\n[providers.else]\nurl = "x"  # stays\n'


def test_toml_keeps_what_the_file_has_and_replaces_a_value() -> None:
    text = Toml().merged(THEIRS, OURS)
    assert tomllib.loads(text) == {
        "model": "m", "window": 8, "other": 1,
        "providers": {"else": {"url": "x"}, "reprise": {"url": "u", "odd key": [1, 2]}},
    }  # fmt: skip
    assert "# mine\n" in text
    assert '# model = "old"\n' in text
    assert "# stays" in text


def test_a_second_time_replaces_ours_alone() -> None:
    once = Toml().merged(THEIRS, OURS)
    assert Toml().merged(once, OURS) == once
    again = tomllib.loads(Toml().merged(once, {**OURS, "window": 9}))
    assert (again["window"], again["other"]) == (9, 1)


@pytest.mark.parametrize(
    "old",
    [
        "not toml",
        '[providers.reprise]\nurl = "mine"\n',
        'providers = { reprise = { url = "mine" } }\n',
        'model = """\nof\nlines"""\n',
    ],
)
def test_toml_that_cannot_take_ours_is_refused(old: str) -> None:
    with pytest.raises(NotMerged):
        Toml().merged(old, OURS)


def test_entries_of_a_toml_list_come_after_the_files_own() -> None:
    ours = {"models": [{"name": "m", "at": "reprise"}]}
    merged = tomllib.loads(Toml().merged('[[models]]\nname = "x"\n', ours))
    assert [model["name"] for model in merged["models"]] == ["x", "m"]
    with pytest.raises(NotMerged, match="already"):
        Toml().merged('[[models]]\nname = "m"\n', ours)


def test_json_combines_objects_and_lists_by_name() -> None:
    old = {"a": {"x": 1, "y": 2}, "models": [{"id": "m", "n": 1}, {"id": "other"}], "plugins": ["p"]}
    ours = {"a": {"x": 3}, "models": [{"id": "m", "n": 2}], "plugins": ["p", "q"]}
    assert json.loads(Json().merged(json.dumps(old), ours)) == {
        "a": {"x": 3, "y": 2}, "models": [{"id": "other"}, {"id": "m", "n": 2}], "plugins": ["p", "q"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("form", "old"),
    [(Json(), "{ // a comment\n}"), (Json(), "[]"), (Yaml(), "# mine\nname: x\n"), (Lines(), "text")],
)
def test_a_file_that_would_lose_something_is_refused(form: Format, old: str) -> None:
    with pytest.raises(NotMerged):
        form.merged(old, {"name": "y"})


def test_yaml_of_ours_is_written_anew() -> None:
    first = Yaml().merged("", {"name": "y"})
    assert Yaml().merged(first, {"name": "z"}) == first.replace('"y"', '"z"')


def test_variables_replace_those_that_the_file_sets() -> None:
    text = Variables().merged("A=1\nexport B=2", {"B": 'x "y"'})
    assert text.splitlines()[:2] == ["A=1", "# export B=2"]
    assert 'B="x \\"y\\""' in text
    assert Variables().merged(text, {"B": 'x "y"'}) == text
