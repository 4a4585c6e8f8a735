"""Joins the events of all ranks about the same move into one. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.stored import ExtentInfo
from reprise.cache.moves import (
    NOT_ITS_COPY,
    Deleted,
    DeleteExtents,
    Event,
    Fetched,
    LoadBlocks,
    Loaded,
    Lost,
    Move,
    NotTransferred,
    Saved,
    Transferred,
    WriteExtent,
    Written,
)

Answer = Saved | Loaded | Fetched | Written | Deleted
"""An event that ends a move of KV; every rank reports one for each move."""


class JoinedEvents:
    """A merger of the ranks' events into the events of one engine, which the cache expects. A move of KV has ended when
    all ranks have reported its end, and a block that one rank has lost is lost. Reported bytes are those of one rank
    times the number of ranks, because every rank holds equally many. Called by the engine's thread of rank 0."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._answers: dict[tuple[type, int], dict[int, Answer]] = {}  # kind and number of a move -> by rank
        self._loads: dict[int, frozenset[BlockKey]] = {}  # blocks of the loads that have not ended
        self._writes: dict[int, WriteExtent] = {}  # writes that rank 0 makes now
        self._own_jobs = 0
        self.for_others: list[Move] = []
        """Writes of extents for the ranks beyond 0, after rank 0 has made its own and chosen the extent's id. The
        caller sends them and empties the list."""
        self.for_all: list[Move] = []
        """Deletions of extents that only some ranks have, which the cache never hears of. The caller carries them out
        and empties the list."""

    def note(self, moves: Iterable[Move]) -> None:
        """Remember the loads and disk writes among `moves`, which are being sent to the ranks. `add` needs the blocks
        of a load, and the order of a write, to join the ranks' answers."""
        for move in moves:
            if isinstance(move, LoadBlocks):
                self._loads[move.job_id] = frozenset(block.key for block in move.blocks)
            elif isinstance(move, WriteExtent):
                self._writes[move.job_id] = move

    def has_told(self, job_id: int) -> bool:
        """Return whether rank 0 has reported the end of a load that other ranks have not ended yet."""
        return 0 in self._answers.get((Loaded, job_id), ())

    def delete(self, extent_ids: Sequence[int]) -> None:
        """Order the deletion of extents that only some ranks have: adds it to `for_all`, the messages that the caller
        sends to every rank."""
        if extent_ids:
            self._own_jobs -= 1
            self.for_all.append(DeleteExtents(self._own_jobs, tuple(extent_ids), None))

    def add(self, rank: int, events: Iterable[Event]) -> list[Event]:
        """Take the events that `rank` has reported, and return the joined events for the cache."""
        joined: list[Event] = []
        for event in events:
            match event:
                case Saved() | Loaded() | Fetched() | Written() | Deleted():
                    joined += self._answer(rank, event)
                case Transferred():
                    if rank == 0:  # the ranks move at the same time
                        joined.append(replace(event, num_bytes=event.num_bytes * self._num_ranks))
                case NotTransferred():
                    joined.append(replace(event, num_bytes=event.num_bytes * self._num_ranks))
                case Lost():
                    self.delete(event.extent_ids)
                    joined.append(event)
        return joined

    def _answer(self, rank: int, answer: Answer) -> list[Event]:
        number = answer.ticket if isinstance(answer, Saved) else answer.job_id
        key = (type(answer), number)
        answers = self._answers.setdefault(key, {})
        answers[rank] = answer
        if isinstance(answer, Written) and rank == 0:
            move = self._writes.pop(number)
            if answer.extent is None:  # no other rank is asked
                del self._answers[key]
                return [answer]
            self.for_others.append(replace(move, extent_id=answer.extent.extent_id))
        if len(answers) < self._num_ranks:
            return []
        del self._answers[key]
        if number < 0:
            return []
        match answer:
            case Saved():
                return [answer]
            case Loaded():
                return [self._loaded(number, [a for a in answers.values() if isinstance(a, Loaded)])]
            case Fetched():
                failed = [a.failed for a in answers.values() if isinstance(a, Fetched)]
                return [Fetched(number, _union(failed))]
            case Written():
                first = answers[0]
                assert isinstance(first, Written)
                assert first.extent is not None
                return [self._written(number, first.extent, [a for a in answers.values() if isinstance(a, Written)])]
            case Deleted():
                problems = [a.problem for a in answers.values() if isinstance(a, Deleted) and a.problem is not None]
                return [Deleted(number, problems[0] if problems else None)]

    def _loaded(self, job_id: int, answers: Sequence[Loaded]) -> Loaded:
        blocks = self._loads.pop(job_id)
        failed = _union([answer.failed for answer in answers])
        if not failed:
            return Loaded(job_id)
        wholes = [answer.whole if answer.failed else blocks for answer in answers]
        return Loaded(job_id, failed, frozenset.intersection(*wholes).difference(failed))

    def _written(self, job_id: int, whole: ExtentInfo, answers: Sequence[Written]) -> Written:
        """Join the ranks' answers to a write of an extent. whole: the extent as rank 0 has reported it; the other ranks
        report only sizes."""
        sizes = [answer.extent.size_bytes for answer in answers if answer.extent is not None]
        if len(sizes) < len(answers):
            self.delete([whole.extent_id])
            return Written(job_id, None, next(answer.reason for answer in answers if answer.extent is None))
        return Written(job_id, replace(whole, size_bytes=sum(sizes)), None)


def _union(failed: Sequence[dict[BlockKey, str]]) -> dict[BlockKey, str]:
    """Return the blocks that failed on any rank, each with one reason. A reason that proves that the stored copy is bad
    (such as a wrong checksum) takes precedence over one that does not (such as a read error)."""
    joined: dict[BlockKey, str] = {}
    for blocks in failed:
        for key, reason in blocks.items():
            if joined.get(key) in (None, *NOT_ITS_COPY):
                joined[key] = reason
    return joined
