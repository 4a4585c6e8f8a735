"""Handles options of commands: in groups that belong together, and options that only some modes of a command use."""

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_args

import typer


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take its options in groups, which typer does not know. A group is a dataclass whose fields are
    options; its class variable `panel`, if there is one, is the heading above them in the help."""
    parameters = inspect.signature(command).parameters
    groups: dict[str, Any] = {name: p.annotation for name, p in parameters.items() if is_dataclass(p.annotation)}

    @wraps(command)
    def ungrouped(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    options: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        options += _options(groups[name]) if name in groups else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
    ungrouped.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # where typer finds the options
    return ungrouped


def _options(group: Any) -> Iterator[inspect.Parameter]:
    """Yield each field as a parameter, and put it under the panel of its group."""
    for field in fields(group):
        _, option = get_args(field.type)
        option.rich_help_panel = getattr(group, "panel", None)
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )


def refuse_given(context: typer.Context, names: Collection[str], where: str) -> None:
    """Raise ValueError if any of these parameters was given on the command line where it has no effect, so that its
    user is not misled. where: what makes them ineffective, such as `with --trace`."""
    given = []
    for parameter in context.command.params:
        if parameter.name is not None and parameter.name in names:
            source = context.get_parameter_source(parameter.name)
            if source is not None and source.name == "COMMANDLINE":
                given.append(parameter.opts[0])
    if given:
        raise ValueError(f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect {where}")
