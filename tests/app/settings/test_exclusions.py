"""Tests every pair of settings that exclude each other, with every value of both."""

from itertools import product
from typing import Any

import pytest

from reprise.app.settings.exclusions import EXCLUSIONS, Exclusion, When, clashes
from reprise.app.settings.settings import Settings
from reprise.app.settings.sources import SettingsError, load_settings

NEEDED = {"cache.redis_gib": {"cache.redis_url": "redis://127.0.0.1:6379/0"}}
"""Setting -> what it cannot be without."""
ALONE = [side for row in EXCLUSIONS for side in (row.one, row.other)]


def examples(side: When) -> list[Any]:
    return list(side.values) if side.above is None else [side.above + 2]


def load(given: dict[str, Any]) -> Settings:
    needed = {name: value for setting in given for name, value in NEEDED.get(setting, {}).items()}
    flags = {name: str(value) for name, value in {**needed, **given}.items()}
    return load_settings(flags=flags, environ={}, config=None)


@pytest.mark.parametrize("row", EXCLUSIONS, ids=lambda row: f"{row.one.setting} {row.other.setting}")
def test_settings_that_exclude_each_other_are_refused_with_both_names_and_why(row: Exclusion):
    for one, other in product(examples(row.one), examples(row.other)):
        with pytest.raises(SettingsError) as error:
            load({row.one.setting: one, row.other.setting: other})
        said = str(error.value)
        assert row.why in said
        assert f"{row.one.setting} {str(one).lower()}" in said
        assert row.other.setting in said


@pytest.mark.parametrize("side", dict.fromkeys(ALONE), ids=lambda side: f"{side.setting} {side.values or side.above}")
def test_each_side_alone_is_accepted(side: When):
    for value in examples(side):
        settings = load({side.setting: value})
        assert side.holds(settings)
        assert not list(clashes(settings))
