"""The committed results of `benchmarks.scheduling.classes` and `benchmarks.scheduling.classes_foretold`:
docs/classes.png and their tables.

python -m benchmarks.figures.classes
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.harness.result_files import BLUE, DOCS, GREY, load
from benchmarks.scheduling.classes_workload import PLACES, POLICIES

COLORS = {"car": BLUE, "car-hidden": "#16a34a", "priority": "#dc2626", "fcfs": GREY}
SAID = {"hbm": "in HBM", "new": "no history", "dram": "in DRAM", "disk": "on disk"}


def draw(row: dict[str, Any], out: Path) -> None:
    """What the window bounds: how often a turn is passed, and how long the unluckiest waits."""
    figure, (passed, waits) = plt.subplots(1, 2, figsize=(11, 3.8))
    for policy, values in row["ttft_ms"].items():
        counts = {int(count): number for count, number in values["overtakes"].items()}
        places = range(max(counts) + 1)
        rest = [sum(n for c, n in counts.items() if c >= place) / values["turns"] for place in places]
        if policy != "fcfs":
            passed.step(places, rest, where="mid", color=COLORS[policy], label=f"{policy}: {max(counts)} at most")
    passed.axvline(row["window"] - 1, color="black", lw=0.8, ls=":")
    passed.annotate(" places of the window - 1", (row["window"] - 1, 0.5), fontsize=8)
    passed.set(
        yscale="log", xlabel="later arrivals that started first", ylabel="share of turns passed by so many or more",
        title="How often a turn is passed over",
    )  # fmt: skip
    width = 0.8 / len(POLICIES)
    for number, policy in enumerate(POLICIES):
        by_place = row["ttft_ms"][policy]["by_place"]
        values = [(by_place[place]["longest_wait"] or 0.0) / 1e3 for place in PLACES]
        at = [place + (number - (len(POLICIES) - 1) / 2) * width for place in range(len(PLACES))]
        waits.bar(at, values, width, color=COLORS[policy], label=policy)
    waits.set(xticks=range(len(PLACES)), xticklabels=[SAID[place] for place in PLACES], ylabel="seconds",
              title="The longest wait for a first step, by where the history is")  # fmt: skip
    for axis in (passed, waits):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def table(rows: list[dict[str, Any]]) -> list[str]:
    said = " | ".join(SAID[place] for place in PLACES)
    lines = [
        f"| first prompts | load / new tokens | rate | policy | all | {said} | most passed |",
        "|---|---|---|---|---|" + "---|" * len(PLACES) + "---|",
    ]
    for row in rows:
        for policy, values in row["ttft_ms"].items():
            cells = " | ".join(_cell(v) for v in (values, *(values["by_place"][place] for place in PLACES)))
            leg = f"{row['new_tokens']} | {row['load_factor']:g} | {row['share']:.0%}"
            lines.append(f"| {leg} | {policy} | {cells} | {values['most_overtakes']} |")
    return lines


def _cell(values: dict[str, Any]) -> str:
    if not values["turns"]:
        return "-"
    times = " / ".join(f"{values[name]:.0f}" for name in ("mean", "p50", "p95"))
    return f"{times}, {values['longest_wait']:.0f}"


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    names = list(rows[0]["ratios"])
    lines = [
        "| first prompts | load / new tokens | rate | measure | " + " | ".join(names) + " |",
        "|---|---|---|---|" + "---|" * len(names),
    ]
    for row in rows:
        for measure in ("mean", "p50", "p95"):
            cells = (row["ratios"][name][measure] for name in names)
            shown = " | ".join(f"{value:.2f} ({low:.2f} to {high:.2f})" for value, low, high in cells)
            leg = f"{row['new_tokens']} | {row['load_factor']:g} | {row['share']:.0%}"
            lines.append(f"| {leg} | {measure} | {shown} |")
    return lines


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Between what each ratio lies over all rows, and in how many it is certainly a gain or a loss."""
    lines = []
    for name in rows[0]["ratios"]:
        said = []
        for measure in ("mean", "p50", "p95"):
            found = [row["ratios"][name][measure] for row in rows]
            values = [value for value, _, _ in found]
            better, worse = sum(high < 1 for _, _, high in found), sum(low > 1 for _, low, _ in found)
            said.append(f"{measure} {min(values):.2f} to {max(values):.2f} ({better} better, {worse} worse)")
        lines.append(f"- {name}: " + "; ".join(said))
    return lines


def section(foretold: dict[str, Any], machine: str) -> list[str]:
    workload = foretold["workload"]
    return [
        "## CaR's three classes at once, simulated",
        "",
        "24 conversations that were begun return, the one that spoke last likelier than others; "
        f"{workload['new_share']:.0%} of the turns begin others, with prompts of 1,000 or 200 tokens. Returning ones "
        "bring 150. HBM and DRAM hold a third of the conversations; a load takes as long as the new tokens' "
        "computation, or six times as long. Rates are shares of what FCFS works off in bursts. "
        f"{foretold['rounds']} rounds of {workload['turns']} turns, each with arrivals that all policies share. `car` "
        "counts a load until it has ended (CaR §III-B-1), `car-hidden` no load that holds nobody up, `priority` is the "
        "classes without a window.",
        "",
        "TTFT in ms: mean / p50 / p95, longest wait for a first step; by where a turn's history was when it came.",
        "",
        *table(foretold["rows"]),
        "",
        "TTFT of one in units of another, over all rounds (95 % interval by bootstrap over rounds):",
        "",
        *ratios(foretold["rows"]),
        "",
        f"Over the {len(foretold['rows'])} rows, and in how many the interval leaves out 1:",
        "",
        *verdicts(foretold["rows"]),
        "",
        "The default is `car-hidden`: of the two windows it has the lower mean and p95, though not the lower p50. By "
        "the paper's classes a new conversation, whose whole prompt is to be computed, goes ahead of a short turn "
        "whose load nobody would wait for. That is good for new conversations with short prompts, and for the "
        "median there; with long ones it makes many wait for one.",
        "",
        "![What the window bounds](classes.png)",
        "",
        "Drawn at first prompts of 1,000 tokens, loads as long as the new tokens' computation, 100 %: what the window "
        "is for. Without it (`priority`) nobody says how many may pass a request whose KV is on disk; with it, of "
        "those that came later, no more than its places less one.",
        "",
        machine,
        "",
    ]


def server_section(result: dict[str, Any], machine: str) -> list[str]:
    return [
        "### The same on servers",
        "",
        f"{result['rounds']} rounds of four servers turn about; where the history was is told as of admission, so what "
        "was fetched meanwhile counts as DRAM. TTFT in ms: mean / p50 / p95, longest wait.",
        "",
        *table(result["rows"]),
        "",
        machine,
        "",
    ]


def drawn(foretold: dict[str, Any]) -> dict[str, Any]:
    """The row with the longest queues where loads are no bottleneck."""
    return max(foretold["rows"], key=lambda row: (row["new_tokens"], -row["load_factor"], row["share"]))


def main() -> None:
    if (foretold := load("classes_foretold")) is not None:
        draw(drawn(foretold), DOCS / "classes.png")


if __name__ == "__main__":
    main()
