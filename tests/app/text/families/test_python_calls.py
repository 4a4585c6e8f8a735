import json

import pytest

from reprise.app.text.families.python_calls import json_of_source


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("+1", 1),
        ("'a\"b'", 'a"b'),
        ("'it\\'s'", "it's"),
        ("'''a\nb'''", "a\nb"),
        ("'a\nb'", "a\nb"),  # a line broken inside quotes
        ("'a' 'b'", "ab"),
        (r"'\d'", r"\d"),
        ("[1, (2, 'x'), None]", [1, [2, "x"], None]),
        ("{'a': True, 1: false}", {"a": True, "1": False}),
        ("null", None),
        ("{}", {}),
    ],
)
def test_literals(source: str, value: object) -> None:
    assert json.loads(json_of_source(source)) == value


@pytest.mark.parametrize(
    "source",
    ["__import__('os')", "open", "f'{1}'", "1 + 1", "b'x'", "...", "1j", "1e999", "{**a}", "{[]: 1}", "'open",
     "(" * 500, "lambda: 0", "[x for x in y]", "a.b", "9" * 5000],
)  # fmt: skip
def test_all_else_is_the_text_of_its_source(source: str) -> None:
    assert json.loads(json_of_source(f" {source} ")) == source
