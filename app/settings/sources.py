"""Reads the settings from their sources.

Weakest first: the defaults, a TOML file (`--config`), the environment (`REPRISE_SECTION__KEY`), flags (`--section.key
VALUE`). An unknown name or invalid value is refused, with the setting and its source.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from reprise.app.settings.hints import describe, nearest
from reprise.app.settings.removed import REMOVED, REMOVED_IN
from reprise.app.settings.settings import ENV_PREFIX, Settings

HIDDEN = "experiment"  # the section that is in no list


class SettingsError(Exception):
    """A setting that cannot be used. The message names the setting, its source and what is allowed."""


def known_settings() -> Iterator[tuple[str, FieldInfo]]:
    """Return (name, field) of every setting that is shown to users. The name is like "cache.mode"."""
    return ((name, field) for name, field in all_settings() if name.partition(".")[0] != HIDDEN)


def experiments(settings: Settings) -> Iterator[str]:
    """Yield the settings of `experiment` that are not at their defaults, with their values."""
    given = settings.experiment
    for key, field in type(given).model_fields.items():
        if (value := getattr(given, key)) != field.default:
            yield f"{HIDDEN}.{key} {value}"


def all_settings() -> Iterator[tuple[str, FieldInfo]]:
    """Yield (name, field) of every setting, also those of `experiment`, which are not shown to users."""
    for section, outer in Settings.model_fields.items():
        inner: type[BaseModel] = outer.annotation  # type: ignore[assignment]  # every field of Settings is a section
        for key, field in inner.model_fields.items():
            yield f"{section}.{key}", field


def load_settings(*, flags: Mapping[str, str], environ: Mapping[str, str], config: Path | None) -> Settings:
    """Return the settings merged from all sources. flags: "section.key" -> its text. Raises SettingsError."""
    return settings_and_origins(flags=flags, environ=environ, config=config)[0]


def settings_and_origins(
    *, flags: Mapping[str, str], environ: Mapping[str, str], config: Path | None
) -> tuple[Settings, dict[str, str]]:
    """Return what `load_settings` does, and where each setting comes from that is not at its default: "section.key" ->
    "flag", "environment" or "file NAME". Raises SettingsError."""
    # Names with a double underscore only: REPRISE_ANYTHING may belong to a wrapper script. `stray_variables` names it.
    variables = {name: text for name, text in environ.items() if name.startswith(ENV_PREFIX) and "__" in name}
    toml = _toml_source(config)
    # Own code, as the library passes over variables of unknown sections, and its errors do not name the source.
    origins = dict.fromkeys(_names(toml.toml_data), f"file {config}")
    origins |= {name.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1): "environment" for name in variables}
    origins |= dict.fromkeys(flags, "flag")
    known, fields = [name for name, _ in known_settings()], dict(all_settings())
    for name, origin in origins.items():
        if name in REMOVED:
            raise SettingsError(f"the setting {name} ({origin}) was removed in {REMOVED_IN}: {REMOVED[name]}")
        if name not in fields:
            meant = " or ".join(nearest(name, known))
            hint = f"did you mean {meant}?" if meant else "`reprise serve --help` lists them"
            raise SettingsError(f"unknown setting {name} ({origin}); {hint}")
    strongest_first = (_TextSource(flags, prefix="", delimiter="."), _TextSource(variables), toml)
    try:
        settings = Settings(_build_sources=(strongest_first, {}))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"][:2])
        problem = describe(fields[name], first["type"], first["input"]) if name in fields else ""
        problem = problem or first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{name} ({origins[name]}): {problem}" if name in origins else problem) from None
    _check_home(settings)
    return settings, origins


def _check_home(settings: Settings) -> None:
    """Raise SettingsError for a path below the home directory where this user has none, as in many containers."""
    for name, _ in all_settings():
        section, _, key = name.partition(".")
        value = getattr(getattr(settings, section), key)
        if isinstance(value, Path):
            try:
                value.expanduser()
            except RuntimeError:
                problem = f"there is no home directory for {value}: set {name} ({variable_of(name)}), or HOME"
                raise SettingsError(f"{name}: {problem}") from None


def stray_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each environment variable that looks like a setting but is not one, such as REPRISE_PORT."""
    known = [name for name, _ in known_settings()]
    for variable in environ:
        if variable.startswith(ENV_PREFIX) and "__" not in variable:
            meant = " or ".join(map(variable_of, nearest(variable.removeprefix(ENV_PREFIX).lower(), known)))
            hint = f"did you mean {meant}?" if meant else f"one is named {variable_of('section.key')}"
            yield f"the environment variable {variable} is no setting and changes nothing; {hint}"


def variable_of(name: str) -> str:
    """Return the name of the environment variable for a setting."""
    return ENV_PREFIX + name.replace(".", "__").upper()


def parse_flags(arguments: list[str]) -> dict[str, str]:
    """Return the flags of a command line, "section.key" -> VALUE. A flag is `--section.key VALUE` or
    `--section.key=VALUE`. Raises SettingsError."""
    flags: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            raise SettingsError(f"unexpected argument {argument!r}")
        name, equals, value = argument[2:].partition("=")
        if not equals:
            following = next(rest, None)
            if following is None or following.startswith("--"):
                raise SettingsError(f"the flag --{name} needs a value")
            value = following
        flags[name.replace("-", "_")] = value
    return flags


class _TextSource(EnvSettingsSource):
    """A source of settings given as text under their full names: the given variables, or flags. Never reads the real
    environment."""

    def __init__(self, texts: Mapping[str, str], *, prefix: str | None = None, delimiter: str | None = None) -> None:
        self._texts = texts
        super().__init__(Settings, env_prefix=prefix, env_nested_delimiter=delimiter)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): text for name, text in self._texts.items()}


def _toml_source(path: Path | None) -> TomlConfigSettingsSource:
    try:
        if path is not None and not path.is_file():  # the library passes over such a path
            raise SettingsError(f"cannot read {path}: no such file")
        return TomlConfigSettingsSource(Settings, path)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None


def _names(tables: Mapping[str, Any]) -> Iterator[str]:
    for section, table in tables.items():
        if isinstance(table, dict) and (table or section in Settings.model_fields):
            yield from (f"{section}.{key}" for key in table)
        else:
            yield section
