"""Tests that each measure finds what its name says in a few sources, and nothing else."""

import ast
from pathlib import Path

from tools.house import (
    both_ways,
    both_ways_at_the_top,
    class_names,
    constructors,
    file_names,
    longest,
    untested,
    used_twice,
    widest,
)
from tools.import_graph import Module


def module(path: str, source: str = "") -> Module:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return Module(name, Path(path), ast.parse(source))


SHORT_AND_LONG = """
class Short:
    def method(self): ...

class Long:
    def __init__(self, first, *, second, third=3):
        def inner():
            return first
        self.inner = inner
"""


def test_the_longest_definitions_come_first_with_the_names_of_what_they_stand_in() -> None:
    parsed = [module("cache/a.py", SHORT_AND_LONG)]
    assert longest(parsed, ast.ClassDef) == ["    5 cache/a.py:5 Long", "    2 cache/a.py:2 Short"]
    assert longest(parsed, ast.FunctionDef) == [
        "    4 cache/a.py:6 Long.__init__",
        "    2 cache/a.py:7 Long.__init__.inner",
        "    1 cache/a.py:3 Short.method",
    ]


def test_parameters_of_constructors_are_counted_without_self() -> None:
    assert constructors([module("cache/a.py", SHORT_AND_LONG)]) == ["    3 cache/a.py:6 Long"]


def test_a_folder_is_as_wide_as_the_modules_directly_in_it() -> None:
    paths = ["cache/__init__.py", "cache/a.py", "cache/tiers/b.py", "cache/tiers/c.py"]
    assert widest(map(module, paths)) == ["    2 cache/tiers", "    1 cache"]


def test_names_used_twice_say_where() -> None:
    parsed = [
        module("cache/turn.py", "class Turn: ...\nclass _Part: ..."),
        module("engine/turn.py", "class Turn: ...\nclass _Part: ...\nclass Other: ..."),
        module("engine/__init__.py"),
        module("cache/__init__.py"),
    ]
    assert used_twice(class_names(parsed)) == ["Turn: cache/turn.py, engine/turn.py"]
    assert used_twice(file_names(parsed)) == ["turn.py: cache, engine"]


def test_folders_import_each_other_side_by_side_or_one_inside_the_other() -> None:
    parsed = [
        module("app/openapi.py", "from reprise.app.http import server"),
        module("app/errors.py"),
        module("app/http/server.py", "import reprise.app.errors\nfrom reprise.app.turn.service import Service"),
        module("app/turn/service.py", "from reprise.cache import table"),
        module("app/turn/ports.py", "def f():\n    from reprise.app.http.server import serve"),
        module("cache/table.py"),
    ]
    assert both_ways(parsed, nested=False) == [
        "app/http <-> app/turn: app.http.server -> app.turn.service, app.turn.ports -> app.http.server"
    ]
    assert both_ways(parsed, nested=True) == [
        "app <-> app/http: app.openapi -> app.http.server, app.http.server -> app.errors"
    ]


def test_top_folders_that_import_each_other_are_named_and_composition_roots_may() -> None:
    parsed = [
        module("app/main.py", "from reprise.fleet.replica import join"),
        module("app/cli/serve.py", "from reprise.fleet.gateway import server"),
        module("app/errors.py"),
        module("fleet/replica.py", "from reprise.app import errors"),
        module("fleet/gateway.py"),
    ]
    assert both_ways_at_the_top(parsed) == []
    assert both_ways(parsed, nested=False) == []
    parsed.append(module("app/turn/ports.py", "from reprise.fleet import replica"))
    assert both_ways_at_the_top(parsed) == [
        "app <-> fleet: app.turn.ports -> fleet.replica, fleet.replica -> app.errors"
    ]


def test_a_module_is_tested_by_a_file_of_its_name_in_the_same_folder_of_tests() -> None:
    parsed = [module(f"cache/{name}.py") for name in ("__init__", "table", "store", "rates", "keys")]
    tests = ["tests/cache/test_table.py", "tests/cache/test_store_recovery.py", "tests/engine/test_rates.py"]
    assert untested(parsed, tests) == ["cache/rates.py", "cache/keys.py"]
