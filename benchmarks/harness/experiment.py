"""One run of a benchmark, whichever: its options, its arms in rounds, its progress, its result file, what must hold.

A benchmark is a module with an `EXPERIMENT`: how to measure (`measure` returns what the result file says), how to show
it, and its own options. Everything else is the same for all:

    --rounds N     how often every arm is measured
    --name NAME    of the result file, benchmarks/results/NAME.json
    --no-result    write no result file
    --quick        the small form, for `benchmarks.harness.quick`; its result goes to build/quick/

A result to be committed comes from sources without changes. The exit status is 1 if something under `held` in the
result does not hold, and 2 if nothing was measured.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.harness.result_files import QUICK, RESULTS, commit, write_result
from benchmarks.harness.servers import STARTED

Arm = TypeVar("Arm")
Item = TypeVar("Item")
Result = Mapping[str, Any]
WIDTH = 140


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a benchmark's result that its small form (--quick) measures too. read: takes it from a result.
    tolerance: the factor by which it may be worse than the committed one."""

    label: str
    read: Callable[[Result], float | None]
    tolerance: float  # now / committed, or the inverse where more is better, may be that much
    more_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Quick:
    """The small form of a benchmark (--quick). options: defaults that take the place of those of its options. figures:
    those that are compared with the committed result. holds: whether the result's `held` is judged too; False if so few
    samples cannot show it."""

    options: Mapping[str, Any]
    figures: Sequence[Figure] = ()
    holds: bool = True


class Run:
    """The arguments of one run, and the tools that `measure` uses. Single-threaded; `directory` is deleted after the
    run."""

    def __init__(
        self, *, arguments: argparse.Namespace, console: Console, stack: ExitStack, directory: Path,
        write: Callable[[Result], None],
    ) -> None:  # fmt: skip
        self.arguments, self.console, self.directory = arguments, console, directory
        self._stack, self._write = stack, write
        self._bar: TaskID | None = None

    @cached_property
    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
        return self._stack.enter_context(Progress(*columns, console=self.console))

    def expect(self, total: float, description: str) -> None:
        """Begin a progress bar of `total` steps. A run may have several bars, one after the other."""
        self._bar = self._progress.add_task(description, total=total)

    def describe(self, description: str) -> None:
        """Show `description`, which says what is being done now, beside the progress bar."""
        if self._bar is not None:
            self._progress.update(self._bar, description=description)

    def advance(self, steps: float = 1) -> None:
        if self._bar is not None:
            self._progress.advance(self._bar, steps)

    def track(self, items: Sequence[Item], description: str) -> Iterator[Item]:
        """Yield the items one by one, and show a progress bar of how many are done. description: stands beside the
        bar."""
        self.expect(len(items), description)
        for item in items:
            yield item
            self.advance()

    def rounds(
        self, arms: Sequence[Arm], rounds: int | Sequence[int], label: str = "round"
    ) -> Iterator[tuple[int, Iterator[Arm]]]:
        """Yield (number, the arms in the order of this round) for each round. The first arm of a round is the last one
        of the next round. rounds: how many rounds, numbered from 0, or the numbers of the rounds. label: shown beside
        the progress bar."""
        numbers = range(rounds) if isinstance(rounds, int) else rounds
        self.expect(len(numbers) * len(arms), "starting")
        for place, number in enumerate(numbers):
            shown = number + 1 if isinstance(rounds, int) else number
            yield number, self._in_order(turned(arms, place), f"{label} {shown}")

    def _in_order(self, arms: Sequence[Arm], label: str) -> Iterator[Arm]:
        for arm in arms:
            self.describe(f"{label}, {arm if isinstance(arm, str) else ' '.join(map(str, arm))}")  # type: ignore[call-overload]
            yield arm
            self.advance()

    def random_model(self, **changes: int) -> Path:
        """Return the directory that `--model` names, or else that of a random model of the 125 M shape, which is made
        at the first call. changes: fields of the shape to replace."""
        from benchmarks.harness.make_model import SHAPES, make_model  # loads torch, which not every benchmark needs

        if self.arguments.model is not None:
            return Path(self.arguments.model)
        made = self.directory / "model"
        if not made.exists():
            make_model(made, replace(SHAPES["125m"], **changes), seed=0)
        return made

    def keep(self, result: Result) -> None:
        """Write the result as far as it is known, so that it is not lost if the run ends early."""
        self._write(result)


def turned(arms: Sequence[Arm], by: int) -> tuple[Arm, ...]:
    """Return the arms rotated to the left by `by` places. With 0, 1, 2 and so on, each arm comes first once."""
    shift = by % len(arms) if arms else 0
    return (*arms[shift:], *arms[:shift])


@dataclass(frozen=True, slots=True)
class Experiment:
    """A benchmark program. about: its module's docstring. name: of its result file, or a function of the arguments that
    returns it."""

    name: str | Callable[[argparse.Namespace], str]
    about: str | None
    measure: Callable[[Run], Result]
    show: Callable[[Console, Any], None]
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    rounds: int | None = None  # the default of --rounds; None: it has none
    rounds_help: str | None = None
    arms: Sequence[str] = ()  # choices of --arms, all by default
    takes_model: bool = False  # `Run.random_model`
    quick: Quick | None = field(default=None)

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if self.takes_model:
            parser.add_argument("--model", help="directory of a model; default: the 125 M-shape random one, made anew")
        if self.rounds is not None:
            parser.add_argument("--rounds", type=int, default=self.rounds, help=self.rounds_help)
        if self.arms:
            parser.add_argument("--arms", nargs="+", choices=self.arms, default=list(self.arms))
        self.options(parser)
        parser.add_argument("--name", "--result", help="of the result file")
        parser.add_argument("--no-result", action="store_true", help="write no result file")
        if self.quick is not None:
            parser.add_argument("--quick", action="store_true", help="the small form; its result goes to build/quick/")
        return parser

    def parse(self, words: Sequence[str] | None) -> argparse.Namespace:
        """Return the parsed arguments. With --quick the options have the defaults of `quick`, unless they are given."""
        parser = self.parser()
        if self.quick is not None and parser.parse_known_args(words)[0].quick:
            parser.set_defaults(**self.quick.options)
        arguments = parser.parse_args(words)
        if self.arms:
            arguments.arms = [arm for arm in self.arms if arm in arguments.arms]
        return arguments

    def file_name(self, arguments: argparse.Namespace) -> str:
        if arguments.name is not None:
            return str(arguments.name)
        return self.name if isinstance(self.name, str) else self.name(arguments)

    def main(self, words: Sequence[str] | None = None) -> int:
        """Run the benchmark, write its result and show it. Returns the exit status: 0 if all that is `held` holds, 1 if
        not, 2 if the sources have changes. Raises what `measure` raises."""
        arguments = self.parse(words)
        console = Console() if Console().is_terminal else Console(width=WIDTH)
        folder = QUICK if getattr(arguments, "quick", False) else RESULTS
        file = folder / f"{self.file_name(arguments)}.json"
        if folder is RESULTS and not arguments.no_result and str(commit()).endswith("-dirty"):
            console.print("The sources have changes: commit them first, or measure with --no-result.")
            return 2

        def write(result: Result) -> None:
            if not arguments.no_result:
                servers = {"servers_started": dict(STARTED)} if STARTED else {}
                write_result(file, {**result, **servers})

        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"reprise-{file.stem}-")))
            run = Run(arguments=arguments, console=console, stack=stack, directory=directory, write=write)
            result = self.measure(run)
        write(result)
        self.show(console, result)
        held: Mapping[str, bool] = result.get("held", {})
        show_held(console, held)
        if not arguments.no_result:
            console.print(f"written: {file}", highlight=False)
        return 0 if all(held.values()) else 1


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a `type` for an option of argparse: a function that returns the names in a text, separated by commas.
    Raises ArgumentTypeError for a name that is not one of `names`."""

    def chosen(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(names):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        return text.split(",")

    return chosen


def show_held(console: Console, held: Mapping[str, bool]) -> None:
    """Print each claim, and whether it holds."""
    for line, holds in held.items():
        console.print(f"[green]held[/green]     {line}" if holds else f"[red]NOT held[/red] {line}")
