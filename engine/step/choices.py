"""The choices under way."""

from collections.abc import Iterator

from engine.step.running_choice import RunningChoice


class RunningChoices:
    """Every choice that runs or waits, by the id of its sequence and by the app's request. Single-threaded."""

    def __init__(self) -> None:
        self._by_sequence: dict[str, RunningChoice] = {}
        self._sequences: dict[str, list[str]] = {}  # the app's request id -> its unfinished sequences

    def __getitem__(self, sequence_id: str) -> RunningChoice:
        return self._by_sequence[sequence_id]

    def __len__(self) -> int:
        return len(self._by_sequence)

    def __iter__(self) -> Iterator[RunningChoice]:
        """As they are now: they may be removed meanwhile."""
        return iter(list(self._by_sequence.values()))

    def get(self, sequence_id: str) -> RunningChoice | None:
        return self._by_sequence.get(sequence_id)

    def of_request(self, request_id: str) -> list[RunningChoice]:
        """The unfinished ones; none of a request nobody knows."""
        return [self._by_sequence[sequence_id] for sequence_id in self._sequences.get(request_id, ())]

    def add(self, choice: RunningChoice) -> None:
        sequence_id = choice.sequence.request_id
        self._by_sequence[sequence_id] = choice
        self._sequences.setdefault(choice.request_id, []).append(sequence_id)

    def remove(self, choice: RunningChoice) -> None:
        sequence_id = choice.sequence.request_id
        del self._by_sequence[sequence_id]
        remaining = self._sequences[choice.request_id]
        remaining.remove(sequence_id)
        if not remaining:
            del self._sequences[choice.request_id]
