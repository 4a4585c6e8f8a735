"""Tells clients that ask for it how far the prompts that they wait for have been read."""

from reprise.engine.messages import Output, Progress, progress_output
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.scheduler.scheduler import Scheduler
from reprise.scheduler.sequence import SequenceState

TOLD_EVERY_S = 0.1
_EXPECTED = 8  # sequences at the front of the queue whose cached tokens are looked up while they wait


class PromptProgress:
    """A watcher of the prompts whose clients want to know of their progress (`RunningChoices.watched`). Called by the
    Engine, on its thread, in every turn of the loop; without such prompts it costs nothing."""

    def __init__(self, *, choices: RunningChoices, scheduler: Scheduler) -> None:
        self._choices, self._scheduler = choices, scheduler
        self._told: dict[str, Progress] = {}  # sequence id -> what was told of it last
        self._told_s = float("-inf")

    def take(self, now: float) -> list[Output]:
        """Return an output for each watched prompt whose progress has changed since the last look at it. Return nothing
        if that look was less than TOLD_EVERY_S ago."""
        watched = self._choices.watched
        if not watched or now - self._told_s < TOLD_EVERY_S:
            return []
        self._told_s = now
        places = self._scheduler.places()
        outputs, before, self._told = [], self._told, {}
        for sequence_id in watched:
            choice = self._choices[sequence_id]
            if choice.sequence.first_token_s is not None:
                continue
            self._told[sequence_id] = progress = self._progress(choice, places.get(sequence_id, 0))
            was = before.get(sequence_id)
            if was is None or _counts(was) != _counts(progress):
                outputs.append(progress_output(choice.request_id, choice.index, progress))
        return outputs

    def _progress(self, choice: RunningChoice, ahead: int) -> Progress:
        sequence = choice.sequence
        is_waiting = sequence.state is SequenceState.WAITING
        read, cached, left_s = sequence.computed_tokens, sequence.cached_tokens, None
        if not is_waiting:
            left_s = self._scheduler.prompt_s(sequence, read)
        elif ahead < _EXPECTED:
            read = 0
            cached, load_s = self._scheduler.expected(sequence)
            left_s = load_s + self._scheduler.prompt_s(sequence, cached)
        return Progress(
            prompt_tokens=sequence.prompt_tokens,
            read_tokens=min(read, sequence.prompt_tokens),
            cached_tokens=min(cached, sequence.prompt_tokens),
            ahead=ahead,
            left_ms=None if left_s is None else left_s * 1e3,
        )


def _counts(progress: Progress) -> tuple[int, int, int]:
    return progress.read_tokens, progress.cached_tokens, progress.ahead
