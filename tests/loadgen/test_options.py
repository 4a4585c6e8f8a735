from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer
from typer.testing import CliRunner

from reprise.loadgen.options import grouped, refuse_given


@dataclass(frozen=True, slots=True)
class Size:
    panel: ClassVar = "How large"

    width: Annotated[int, typer.Option(min=1, help="In metres.")] = 3
    height: Annotated[float | None, typer.Option(help="None: flat.")] = None


cli = typer.Typer(add_completion=False)


@cli.command()
@grouped
def draw(context: typer.Context, what: Annotated[str, typer.Option()], size: Size, seed: int = 7) -> None:
    """Draw something."""
    refuse_given(context, {"height"}, "for what is flat")
    typer.echo((what, size, seed))


def test_a_group_is_made_of_what_was_given_and_of_defaults():
    done = CliRunner().invoke(cli, ["--what", "a house", "--width", "5"])
    assert done.stdout == f"{('a house', Size(width=5), 7)}\n"


def test_options_of_groups_are_checked_as_others_are():
    assert "--width" in CliRunner().invoke(cli, ["--what", "a house", "--width", "0"]).stderr
    refused = CliRunner().invoke(cli, ["--what", "a house", "--height", "2"])
    assert str(refused.exception) == "--height has no effect for what is flat"


def test_help_shows_the_panel_of_a_group():
    shown = CliRunner().invoke(cli, ["--help"], env={"COLUMNS": "100"}).stdout
    assert "Draw something." in shown
    assert shown.index("--seed") < shown.index("How large") < shown.index("--width")
