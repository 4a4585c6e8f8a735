"""Tests that imports are found wherever they stand, and circles of any length."""

import ast
from pathlib import Path

from tools.import_graph import Module, circles, import_graph


def test_a_circle_is_found_however_long_it_is():
    sources = {
        "cache.a": "from reprise.cache import b",
        "cache.b": "def f():\n    import reprise.cache.c",
        "cache.c": "from reprise.cache.a import x",
    }
    others = {"cache.d": "import reprise.cache.a", "cache.e": "from reprise.cache.d import y"}
    parsed = [Module(name, Path("x.py"), ast.parse(source)) for name, source in {**sources, **others}.items()]
    assert circles(import_graph(parsed)) == [["cache.a", "cache.b", "cache.c"]]
