"""docs/results/scheduling.md and docs/classes.png: orders of the queue, simulated and on servers."""

from pathlib import Path
from typing import Any

from benchmarks.figures.panels import bars, held, panels, save_panels, table, titled
from benchmarks.harness.result_files import BLUE, GREY
from benchmarks.scheduling.simulated import PLACES
from benchmarks.scheduling.workloads import DEFAULT

COLORS = {"due": "#f59e0b", "car": BLUE, "car-hidden": "#16a34a", "priority": "#dc2626", "fcfs": GREY}
SAID = {"hbm": "in HBM", "new": "no history", "dram": "in DRAM", "disk": "on disk"}
MEASURES = ("mean", "p50", "p95")
SHOWN = ("due", "car", "car-hidden")  # the orders that a server has, in the tables of every setting
Result = dict[str, Any]


def draw(result: Result, out: Path) -> None:
    """Draw the figure of queue orders into `out`. Left: for each order but fcfs, the share of turns that were overtaken
    by at least so many turns that came later; the dotted line is the bound that the scheduler's window sets. Right: the
    longest wait for a first step, by where the turn's history was. Of the settings with the fastest loads, the one with
    the longest queues is drawn."""
    row = max(result["rows"], key=lambda row: (row["new_tokens"], -row["load_factor"], row["share"]))
    figure, axes = panels(2, (5.5, 3.8))
    passed, waits = axes
    longest_s: dict[str, list[float]] = {}
    for policy in (policy for policy in COLORS if policy in row["ttft_ms"]):
        values = row["ttft_ms"][policy]
        counts = {int(count): number for count, number in values["overtakes"].items()}
        places = range(max(counts) + 1)
        rest = [sum(n for c, n in counts.items() if c >= place) / values["turns"] for place in places]
        if policy != "fcfs":
            passed.step(places, rest, where="mid", color=COLORS[policy], label=f"{policy}: {max(counts)} at most")
        longest_s[policy] = [values["by_place"][place]["longest_wait"] / 1e3 for place in PLACES]
    bars(waits, longest_s, [COLORS[policy] for policy in longest_s])
    passed.axvline(row["window"] - 1, color="black", lw=0.8, ls=":")
    passed.annotate(" places of the window - 1", (row["window"] - 1, 0.5), fontsize=8)
    passed.set(
        yscale="log", xlabel="later arrivals that started first", ylabel="share of turns passed by so many or more",
        title="How often a turn is passed over",
    )  # fmt: skip
    waits.set(xticks=range(len(PLACES)), xticklabels=[SAID[place] for place in PLACES], ylabel="seconds",
              title="The longest wait for a first step, by where the history is")  # fmt: skip
    passed.legend(frameon=False, fontsize=8)
    waits.set_ylim(top=1.15 * max(map(max, longest_s.values())))
    waits.legend(frameon=False, fontsize=8, ncols=len(COLORS), loc="upper center")  # above the bars
    save_panels(figure, axes, out)


def simulated_section(result: Result, machine: str) -> list[str]:
    rows, workload = result["rows"], result["workload"]
    arms = [arm for arm in rows[0]["ttft_ms"] if arm in SHOWN]
    settings = [f"{row['lengths']} | {row['new_tokens']} | {row['load_factor']:g} | {row['share']:.0%}" for row in rows]
    head = "lengths | first prompts | load / new tokens | rate"
    ratios = (
        [setting, " / ".join(f"{row['ttft_ms']['fcfs'][measure]:.0f}" for measure in MEASURES),
         *(" / ".join(f"{row['ratios'][f'{arm}/fcfs'][measure][0]:.2f}" for measure in MEASURES) for arm in arms)]
        for setting, row in zip(settings, rows, strict=True)
    )  # fmt: skip
    costs = (
        [setting, *(" / ".join(f"{ratio:.2f}" for ratio in _costs(row, arm)) for arm in arms)]
        for setting, row in zip(settings, rows, strict=True)
    )
    return titled(
        "Orders of the queue, simulated",
        f"24 conversations return with 150 tokens, the one that spoke last likelier than others; "
        f"{workload['new_share']:.0%} of the turns begin others, with prompts of 1,000 or 200 tokens. These are means: "
        "lengths are log-normal (sigma 1), or drawn from Azure's recorded conversations. HBM and DRAM hold a third of "
        "the conversations; a load takes as long as the new tokens' computation, or six times as long. Rates are "
        f"shares of what `fcfs` works off in bursts. {result['rounds']} rounds of {workload['turns']} turns, each with "
        "arrivals that all orders share. `car` counts a load until it has ended (CaR §III-B-1), `car-hidden` no load "
        "that delays no step, `priority` is the classes without a window, `due-4` and `due-16` are `due` with such a "
        "patience. TTFT mean / p50 / p95 in units of `fcfs`:",
        table(" | ".join((head, "fcfs, ms", *arms)), ratios),
        "Over these rows, and in how many the 95 % interval (bootstrap over rounds) leaves out 1:",
        _verdicts(rows),
        "What an order costs those that wait: the mean of first turns / the longest wait / p95 of slowdown (TTFT over "
        "what the turn alone would take), in units of `fcfs`:",
        table(" | ".join((head, *arms)), costs),
        "![How often a turn is passed, and how long it waits](classes.png)",
        "First prompts of 1,000 tokens, short loads, 100 %.",
        held(result),
        machine,
    )


def _costs(row: Result, arm: str) -> tuple[float, float, float]:
    first: float = row["ratios_by_kind"]["first"][f"{arm}/fcfs"]["mean"][0]
    costs = row["costs"][f"{arm}/fcfs"]
    return first, costs["longest_wait"], costs["slowdown_p95"]


def _verdicts(rows: list[Result]) -> list[str]:
    """Return the range of each ratio over all rows, and in how many rows it is certainly a gain or a loss."""
    lines = []
    for name in rows[0]["ratios"]:
        said = []
        for measure in MEASURES:
            found = [row["ratios"][name][measure] for row in rows]
            values = [value for value, _, _ in found]
            better, worse = sum(high < 1 for _, _, high in found), sum(low > 1 for _, low, _ in found)
            said.append(f"{measure} {min(values):.2f} to {max(values):.2f} ({better} better, {worse} worse)")
        lines.append(f"- {name}: " + "; ".join(said))
    return lines


def served_section(result: Result, machine: str) -> list[str]:
    """Return the lines of the section about queue orders on servers: first tokens in each setting."""
    kinds = ("ttft", "first", "returning", "e2e")
    rows = (
        [f"{row['kv']} | {row['share']:.0%} | {arm}",
         *(" / ".join(f"{found[kind][figure]:.0f}" for figure in MEASURES) for kind in kinds),
         f"{found['ttft']['max']:.0f}", f"{found['tpot']['p50']:.1f}", f"{found['tokens_per_s']:.1f}"]
        for row in result["rows"]
        for arm, found in row["arms"].items()
    )  # fmt: skip
    over = (
        [f"{row['kv']} | {row['share']:.0%} | {arm}",
         *(" / ".join(f"{found[kind][figure]:.2f}" for figure in MEASURES) for kind in ("ttft", "e2e")),
         f"{found['tpot']['p50']:.2f}", f"{found['tokens_per_s']:.2f}"]
        for row in result["rows"]
        for arm, others in row["over"].items()
        if (found := others.get(DEFAULT)) is not None and arm != DEFAULT
    )  # fmt: skip
    return titled(
        "Orders of the queue, on servers",
        "{conversations} conversations a round by Poisson, {turns} turns of a random 125 M-shape model (bf16): first "
        "prompts of {first_tokens} tokens, then {more_tokens} more after each answer of {answer_tokens} and a pause of "
        "{pause:.0%} of the time in which conversations begin; these are means of log-normal lengths (sigma 1). Rates "
        "are shares of the turns a second that `fcfs` works off when all come at once, measured before each setting: "
        "{carried}. Where these differ, the shared machine had another speed. {seeds} seeds, which all servers play "
        "in turn. Times in ms.".format(
            **result["workload"], seeds=result["seeds"],
            carried=", ".join(f"{row['carried']:.1f} ({row['kv']}, {row['share']:.0%})" for row in result["rows"]),
        ),
        table("KV | rate | order | TTFT mean / p50 / p95 | first turns | returning turns | E2E | longest TTFT | "
              "TPOT p50 | tokens/s", rows),
        table(f"KV | rate | `{DEFAULT}` over | TTFT mean / p50 / p95 | E2E | TPOT p50 | tokens/s", over),
        # The table above shows the missed ones: naming each would take as many lines as it has numbers.
        f"{sum(result['held'].values())} of {len(result['held'])} aims are met: of each row mean, p50 and p95 of TTFT "
        "at most 1, mean and p95 of E2E at most 1, TPOT at most 1.02, tokens/s at least 0.99.",
        machine,
    )  # fmt: skip
