"""Options of a command that only some of its modes use."""

from collections.abc import Collection

import typer


def refuse_given(context: typer.Context, names: Collection[str], where: str) -> None:
    """Refuse options that would have no effect, because their user expects one. Raises ValueError if any of these
    parameters were given on the command line. where: what makes them ineffective, such as `with --trace`."""
    given = []
    for parameter in context.command.params:
        if parameter.name is not None and parameter.name in names:
            source = context.get_parameter_source(parameter.name)
            if source is not None and source.name == "COMMANDLINE":
                given.append(parameter.opts[0])
    if given:
        raise ValueError(f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect {where}")
