"""Runs one rank beyond 0 of a tensor-parallel engine. It carries out everything that rank 0 sends, in that order, and
decides nothing."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import zmq

from reprise.cache.blocks.stored import SessionRecord
from reprise.cache.moves import (
    Deleted,
    DeleteExtents,
    Event,
    FetchBlocks,
    Fetched,
    LoadBlocks,
    Loaded,
    Move,
    Saved,
    SealSlot,
    WriteExtent,
    Written,
)
from reprise.cache.transfer.capture import Captured, CaptureSink
from reprise.cache.transfer.transfer import Transfer
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.ranks.wire import (
    CarryOut,
    Close,
    Ended,
    FromRank,
    RunStep,
    SaveRows,
    StepEnded,
    ToRank,
    decode_to_rank,
    encode,
    pack,
    unpack_moves,
    unpack_step,
)
from reprise.engine.step.arrival import Arrival

MOVING_POLL_MS = 1  # poll interval while moves are under way, whose end rank 0 may wait for
POLL_MS = 200
ANSWERED = (LoadBlocks, FetchBlocks, SealSlot, WriteExtent, DeleteExtents)
ANSWERS = (Loaded, Fetched, Saved, Written, Deleted)
NOBODY = SessionRecord(tenant="", salt="", session_id="", context=b"", last_used_s=0.0, pinned=False, ttl_s=None)


class Rank:
    """A part of the engine that carries out what rank 0 sends, in the rank process's main thread. transfer, runner,
    sink: the parts of an engine, for this rank's share of the heads."""

    def __init__(
        self,
        *,
        socket: "zmq.Socket[bytes]",
        transfer: Transfer,
        runner: ModelRunner,
        sink: CaptureSink | None,
        device: torch.device,
    ) -> None:
        self._socket = socket
        self._transfer, self._runner, self._sink, self._device = transfer, runner, sink, device
        self._captured: Captured | None = None  # rows of the last step, until they are saved
        self._under_way = 0  # moves of which the end is to be reported

    def serve(self) -> None:
        """Carry out what rank 0 sends, until Close. Raises whatever a step raises: then all ranks have to end."""
        while True:
            if self._socket.poll(MOVING_POLL_MS if self._under_way else POLL_MS):
                message = decode_to_rank(self._socket.recv())
                if isinstance(message, Close):
                    self._transfer.close(message.timeout_s)
                    return
                self._obey(message)
                if isinstance(message, CarryOut) and message.running:
                    continue  # the next step places these loads, unless events are polled before
            self._report()

    def _obey(self, message: ToRank) -> None:
        match message:
            case CarryOut():
                moves: list[Move] = unpack_moves(message.moves)
                self._under_way += sum(isinstance(move, ANSWERED) for move in moves)
                self._transfer.carry_out(moves, message.running)
            case RunStep():
                self._run(message)
            case SaveRows():
                captured, self._captured = self._captured, None
                self._transfer.save(captured, message.pieces)
            case _:
                raise ValueError(f"{type(message).__name__} out of turn")

    def _run(self, step: RunStep) -> None:
        arrival = None
        if step.jobs:
            # When a load is dearer than to compute, rank 0 says so, of its own.
            jobs = {str(job): job for job in step.jobs}
            arrival = Arrival(self._transfer, jobs, patience_s=lambda _: math.inf, has_bystanders=step.has_bystanders)
        if self._sink is not None:
            self._sink.step = Captured() if step.captures else None
        self._runner.forward(unpack_step(step, self._device), arrival)
        if self._sink is not None:
            self._captured, self._sink.step = self._sink.step, None
        if arrival is not None:
            self._report()  # first, so that rank 0 hears of a failed load before the step's end
            self._send(StepEnded([int(job) for job in arrival.late]))

    def _report(self) -> None:
        events: Sequence[Event] = self._transfer.poll()
        if events:
            self._under_way -= sum(isinstance(event, ANSWERS) for event in events)
            self._send(Ended(pack([_without_content(event) for event in events])))

    def _send(self, message: FromRank) -> None:
        self._socket.send(encode(message))


def _without_content(event: Event) -> Event:
    """Return an event without the session and the blocks of its extent, which rank 0 knows already."""
    if isinstance(event, Written) and event.extent is not None:
        return replace(event, extent=replace(event.extent, session=NOBODY, blocks=()))
    return event
