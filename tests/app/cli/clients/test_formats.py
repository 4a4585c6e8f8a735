import json
import tomllib
from typing import Any

import pytest

from reprise.app.cli.clients.formats import BEGIN, END, Format, Json, Lines, NotMerged, Toml, Variables, Yaml

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


def test_what_a_client_adds_between_the_marks_of_a_toml_file_is_kept() -> None:
    """Codex adds values after the last one and tables after the last one, which are ours."""
    once = Toml().merged("", OURS)
    added = once.replace("window = 8\n", 'window = 8\neffort = "high"\n', 1)
    added = added.removesuffix(f"{END}\n") + f'\n[projects."/x"]\ntrust = "yes"\n{END}\n'
    text = Toml().merged(added, {**OURS, "window": 9})
    assert tomllib.loads(text) == {**OURS, "window": 9, "effort": "high", "projects": {"/x": {"trust": "yes"}}}
    assert Toml().merged(text, {**OURS, "window": 9}) == text


@pytest.mark.parametrize("form", [Toml(), Toml(optional=("key",))])
def test_what_a_user_adds_to_a_table_of_ours_is_not_dropped(form: Toml) -> None:
    added = form.merged("", OURS).replace('url = "u"\n', 'url = "u"\nkey = "K"\n')
    if form.optional:
        assert tomllib.loads(form.merged(added, OURS)) == OURS, "it was ours, and is not any more"
    else:
        with pytest.raises(NotMerged, match=r"providers\.reprise\.key .* not ours"):
            form.merged(added, OURS)


def test_an_entry_that_a_user_adds_to_a_list_of_ours_is_not_dropped() -> None:
    ours = {"models": [{"name": "m", "at": "reprise"}]}
    added = Toml().merged("", ours).replace(END, '[[models]]\nname = "x"\nat = "else"\n' + END)
    with pytest.raises(NotMerged, match="not ours"):
        Toml().merged(added, ours)
    assert "n" in Toml().merged(Toml().merged("", ours), {"models": [{"name": "n", "at": "reprise"}]})


@pytest.mark.parametrize("line", ["theirs: 1\n", "  - name: x\n", "# mine\n"])
def test_lines_that_a_user_adds_to_yaml_of_ours_are_refused(line: str) -> None:
    ours = {"name": "y", "models": [{"name": "m"}]}
    added = Yaml().merged("", ours).replace(END, line + END)
    with pytest.raises(NotMerged, match="not ours"):
        Yaml().merged(added, ours)


def test_variables_that_a_user_adds_between_our_marks_are_kept() -> None:
    once = Variables().merged("A=1\n", {"B": "x"})
    text = Variables().merged(once.replace(END, f"C=3\n# why\n{END}"), {"B": "y"})
    assert text == f'A=1\nC=3\n# why\n{BEGIN}\nB="y"\n{END}\n'


@pytest.mark.parametrize("end", [END, f"{END}  "])
@pytest.mark.parametrize(("form", "ours"), [(Toml(), OURS), (Variables(), {"B": "x"})])
def test_an_editor_may_change_white_space_at_the_end_of_ours(form: Format, ours: Any, end: str) -> None:
    once = form.merged("", ours)
    changed = once.removesuffix(f"{END}\n") + end
    assert form.merged(changed, ours).strip() == once.strip()


def test_comments_between_the_marks_are_kept() -> None:
    once = Toml().merged("", OURS)
    noted = once.replace("window = 8\n", "# values\nwindow = 8\n").replace('url = "u"\n', 'url = "u"\n  # a table\n')
    text = Toml().merged(noted, {**OURS, "window": 9})
    assert tomllib.loads(text) == {**OURS, "window": 9}
    assert ("# values\n" in text, "  # a table\n" in text) == (True, True)
    assert Toml().merged(text, {**OURS, "window": 9}) == text


def test_a_mark_without_its_end_takes_no_comments_along() -> None:
    text = Toml().merged(Toml().merged(THEIRS, OURS).replace(f"{END}\n", "", 1), OURS)
    assert ("# mine\n" in text, 'url = "x"  # stays\n' in text) == (True, True)
    assert Toml().merged(text, OURS) == text
    assert text.count(BEGIN) == text.count(END) == 2


@pytest.mark.parametrize("value", ['"a\nB=2\n"', "'a\nB=2\n'", "`a\nB=2\n`", '"a\\\nB=2\n"'])
@pytest.mark.parametrize("name", ["B", "KEY", "export KEY"])
def test_variables_whose_values_have_several_lines_are_left_alone(name: str, value: str) -> None:
    with pytest.raises(NotMerged, match="several lines"):
        Variables().merged(f"A=1\n{name}={value}\n", {"B": "x"})
    assert "A='it'  # \"\n" in Variables().merged("A='it'  # \"\n", {"B": "x"})


@pytest.mark.parametrize("number", ["0.12345678901234567890123", "1e-400", "NaN", "1e400"])
def test_json_with_numbers_that_would_change_is_refused(number: str) -> None:
    with pytest.raises(NotMerged, match=r"rounded|no number"):
        Json().merged(f'{{"a": {number}}}', {"b": 1})
    assert json.loads(Json().merged('{"a": 0.1, "b": 1e3, "c": 12345678901234567890123}', {})) == {
        "a": 0.1, "b": 1000.0, "c": 12345678901234567890123,
    }  # fmt: skip


def test_a_line_after_an_empty_one_becomes_a_comment() -> None:
    assert '\n\n# model = "old"\n' in Toml().merged('# mine\n\nmodel = "old"\n', OURS)
    assert Variables().merged("A=1\n\nB=2\n", {"B": "x"}).startswith("A=1\n\n# B=2\n")


def test_entries_of_a_json_list_are_combined_with_those_of_the_same_server() -> None:
    old = {"models": [{"id": "m", "baseUrl": "u", "cost": 1, "n": 1}, {"temperature": 0}, {"id": None}]}
    ours = {"models": [{"id": "m", "baseUrl": "u", "n": 2}, {"roles": ["chat"]}]}
    assert json.loads(Json().merged(json.dumps(old), ours)) == {
        "models": [
            {"temperature": 0}, {"id": None}, {"id": "m", "baseUrl": "u", "cost": 1, "n": 2}, {"roles": ["chat"]},
        ],
    }  # fmt: skip


def test_an_entry_of_another_server_with_our_name_is_refused() -> None:
    old = {"models": [{"id": "m", "name": "M", "baseUrl": "https://else"}]}
    ours = {"models": [{"id": "m", "name": "m (Reprise)", "baseUrl": "u"}]}
    with pytest.raises(NotMerged, match="'m' already, which is not of this server"):
        Json().merged(json.dumps(old), ours)
    moved = {"models": [{"id": "m", "name": "m (Reprise)", "baseUrl": "u2"}]}
    assert json.loads(Json().merged(json.dumps(ours), moved)) == moved, "our server listens elsewhere now"
