"""Shows the progress of a run on one line, redrawn a few times a second by its own thread."""

from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
from rich.text import Text

from reprise.loadgen.measure.sender import TurnResult
from reprise.loadgen.measure.summary import Slo, is_good, tpot_s
from reprise.loadgen.percentile import percentile

_RECENT = 200  # number of latest requests that the figures cover


class ProgressLine:
    """The figures of a run's progress. Updated on the event loop and read by the drawing thread; appends and single
    reads need no lock."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._ttft_s: deque[float] = deque(maxlen=_RECENT)
        self._tpot_s: deque[float] = deque(maxlen=_RECENT)
        self._good: deque[bool] = deque(maxlen=_RECENT)
        self.sent = self.ended = self.failed = 0

    def on_sent(self) -> None:
        self.sent += 1

    def on_result(self, result: TurnResult) -> None:
        self.ended += 1
        self.sent -= result.retries  # every attempt was counted
        if result.interrupted:
            return
        self.failed += result.error is not None
        self._good.append(is_good(result, self._slo))
        ttft, gap = result.ttft_s, tpot_s(result)
        if ttft is not None:
            self._ttft_s.append(ttft)
        if gap is not None:
            self._tpot_s.append(gap)

    def line(self) -> str:
        """Return the line to show: how many requests run, TTFT, TPOT and the share of good answers of the latest
        requests, and how many failed."""
        ttft, tpot, good = self._ttft_s.copy(), self._tpot_s.copy(), self._good.copy()
        parts = [f"{self.sent - self.ended} running"]
        if ttft:
            parts.append(f"TTFT p50 {_ms(percentile(ttft, 0.5))} p95 {_ms(percentile(ttft, 0.95))}")
        if tpot:
            parts.append(f"TPOT p50 {_ms(percentile(tpot, 0.5))}")
        if good:
            parts.append(f"good {sum(good) / len(good):.0%}")
        if self.failed:
            parts.append(f"{self.failed} failed")
        return " · ".join(parts)


class _Figures(ProgressColumn):
    def __init__(self, live: ProgressLine) -> None:
        super().__init__()
        self._live = live

    def render(self, task: Task) -> Text:
        return Text(self._live.line())


def progress(console: Console, live: ProgressLine) -> Progress:
    return Progress(
        BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), _Figures(live),
        console=console, refresh_per_second=4,
    )  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"
