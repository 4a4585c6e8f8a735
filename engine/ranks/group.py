"""Starts the other ranks for rank 0, and has a socket to each of their processes."""

import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import msgspec
import zmq

from reprise.cache.blocks.keys import typed_fields
from reprise.cache.blocks.stored import ExtentInfo
from reprise.cache.moves import Event
from reprise.engine.config import EngineConfig
from reprise.engine.lifeline import FRAME_LENGTH
from reprise.engine.model.loading import ModelRefused
from reprise.engine.ranks.socket_directory import SocketDirectory, remove_abandoned
from reprise.engine.ranks.wire import (
    HIGH_WATER_MARK,
    MAX_MESSAGE_BYTES,
    SEND_TIMEOUT_MS,
    Close,
    Ended,
    FromRank,
    MakeTiers,
    Probed,
    RankLaunch,
    RankRefused,
    StepEnded,
    TiersMade,
    ToRank,
    decode_from_rank,
    encode,
    unpack_events,
)

RANK_COMMAND = (sys.executable, "-m", "reprise.engine.process.rank")
STEP_END_TIMEOUT_S = 30.0  # longest time from a step's last product to a rank's report
log = logging.getLogger(__name__)


class RankGroup:
    """A handle on the ranks beyond 0, the other processes that share the model: starts them and talks to them. They
    belong to the engine's process group, so killing that kills them, and they end with rank 0. If one of them ends,
    rank 0 ends at once too, and the whole engine is started anew. The engine's thread calls every method."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        num_ranks: int,
        command: Sequence[str] = RANK_COMMAND,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        """Start the processes of all ranks but this one, rank 0. config: its model has to be a local directory.
        command: starts a rank. end_process(status): ends this process at once."""
        self.num_ranks = num_ranks
        self._end_process = end_process
        self._is_closing = False
        remove_abandoned()
        self._directory = SocketDirectory()  # no other user can speak to the ranks
        self.rendezvous = str(self._directory.path / "rendezvous")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._told: list[tuple[int, list[Event]]] = []  # events by rank, received while another message was awaited
        for rank in range(1, num_ranks):
            self._start(rank, command, config)

    def _start(self, rank: int, command: Sequence[str], config: EngineConfig) -> None:
        endpoint = f"ipc://{self._directory.path}/{rank}"
        socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(HIGH_WATER_MARK)
        socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.bind(endpoint)
        self._sockets.append(socket)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=rank_environment(os.environ, rank))
        self._processes.append(process)
        launch = RankLaunch(rank=rank, endpoint=endpoint, rendezvous=self.rendezvous, config=config)
        frame = encode(launch)
        assert process.stdin is not None
        process.stdin.write(FRAME_LENGTH.pack(len(frame)) + frame)
        process.stdin.flush()  # it stays open: its end would end the rank
        threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        status = process.wait()
        if not self._is_closing:
            # The engine's thread may wait for this rank in the middle of a step, and nothing would wake it.
            log.critical("rank %d has ended with status %d: the engine ends too", rank, status)
            self._leave()

    def end(self, message: str) -> NoReturn:
        """End the engine process with this message in the log, because its ranks no longer agree."""
        log.critical("%s: the engine ends", message, exc_info=True)
        self._leave()
        raise SystemExit(1)  # where `end_process` returns, as in tests

    def _leave(self) -> None:
        logging.shutdown()
        self._directory.remove()
        self._end_process(1)

    # --- while the engine is built ------------------------------------------------------------------------------------

    def model_fingerprint(self, own: bytes) -> bytes:
        """Wait until all ranks have loaded their parts of the model. Returns the fingerprint of the whole. own: the
        fingerprint of rank 0's part. The result differs for each number of ranks, because the ranks store parts of
        heads and round sums differently. Raises ModelRefused."""
        parts = [own]
        for socket in self._sockets:
            message = self._receive(socket)
            assert isinstance(message, Probed)
            parts.append(message.fingerprint)
        return hashlib.blake2b(typed_fields("reprise-ranks", *parts), digest_size=16).digest()

    def make_tiers(self, message: MakeTiers) -> None:
        """Have every rank make its tiers. `common_extents` waits for the result."""
        for socket in self._sockets:
            self._post(socket, message)

    def common_extents(self, own: Sequence[ExtentInfo]) -> tuple[list[ExtentInfo], list[int]]:
        """Wait until all ranks have made their tiers. Returns (extents of which every rank has its part on disk, with
        the bytes of all parts; ids of all other extents). own: the extents of rank 0. Raises ModelRefused."""
        parts: list[dict[int, int]] = [{extent.extent_id: extent.size_bytes for extent in own}]
        for socket in self._sockets:
            message = self._receive(socket)
            assert isinstance(message, TiersMade)
            parts.append(message.extents)
        common = set(parts[0]).intersection(*parts[1:])
        whole = [
            replace(extent, size_bytes=sum(part[extent.extent_id] for part in parts))
            for extent in own
            if extent.extent_id in common
        ]
        return whole, sorted(set().union(*parts) - common)

    # --- while it runs ------------------------------------------------------------------------------------------------

    def send(self, message: ToRank) -> None:
        """Send a message to all ranks. Messages arrive in order."""
        frame = encode(message)
        for socket in self._sockets:
            self._post_frame(socket, frame)

    @property
    def has_news(self) -> bool:
        """Return whether reports from ranks wait for `take`."""
        return bool(self._told) or any(socket.poll(0) for socket in self._sockets)

    def take(self) -> list[tuple[int, list[Event]]]:
        """Return the reports of ranks that have arrived since `take` was last called, as (rank, events)."""
        for rank, socket in enumerate(self._sockets, 1):
            while socket.poll(0):
                message = self._decode(socket.recv())
                if not isinstance(message, Ended):
                    self.end(f"rank {rank} said {type(message).__name__} out of turn")
                self._told.append((rank, self._events(message)))
        told, self._told = self._told, []
        return told

    def step_ended(self) -> list[int]:
        """Wait until every rank has reported the end of a step with loads. Returns the job ids of the loads that were
        late on any rank."""
        late: list[int] = []
        for rank, socket in enumerate(self._sockets, 1):
            until = time.monotonic() + STEP_END_TIMEOUT_S
            while True:
                if not socket.poll(int(max(0.0, until - time.monotonic()) * 1000)):
                    self.end(f"rank {rank} does not say how its step has ended")
                message = self._decode(socket.recv())
                if isinstance(message, StepEnded):
                    late += message.late
                    break
                if not isinstance(message, Ended):
                    self.end(f"rank {rank} said {type(message).__name__} out of turn")
                self._told.append((rank, self._events(message)))
        return late

    def close(self, timeout_s: float) -> bool:
        """Wait, for at most `timeout_s`, until the ranks, to which Close was sent, have ended, and close their sockets.
        Returns whether all have ended."""
        until = time.monotonic() + timeout_s
        ended = True
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                ended = False
        for socket in self._sockets:
            socket.close()
        self._directory.remove()
        return ended

    def send_close(self, timeout_s: float) -> None:
        """Tell the ranks to finish their work within `timeout_s` and end."""
        self._is_closing = True
        self.send(Close(timeout_s))

    def _post(self, socket: "zmq.Socket[bytes]", message: ToRank) -> None:
        self._post_frame(socket, encode(message))

    def _post_frame(self, socket: "zmq.Socket[bytes]", frame: bytes) -> None:
        try:
            socket.send(frame)
        except zmq.Again:
            self.end(f"a rank has taken nothing for {SEND_TIMEOUT_MS // 1000} s")

    def _receive(self, socket: "zmq.Socket[bytes]") -> FromRank:
        """Wait for a message without a limit, because the app limits the start of an engine. Raises ModelRefused."""
        message = self._decode(socket.recv())
        if isinstance(message, RankRefused):
            raise ModelRefused(message.message)
        return message

    def _decode(self, frame: bytes) -> FromRank:
        try:
            return decode_from_rank(frame)
        except msgspec.DecodeError:
            self.end(f"{len(frame)} bytes of a rank are no message")

    def _events(self, message: Ended) -> list[Event]:
        try:
            return unpack_events(message.events)
        except (KeyError, msgspec.DecodeError):
            self.end("a rank told what nobody knows")


def rank_environment(base: Mapping[str, str], rank: int) -> dict[str, str]:
    """Return the environment of a rank's process. The engine's own environment is that of rank 0."""
    # transformers binds a process to the device of this number. Sums travel over the loopback interface only.
    return {"GLOO_SOCKET_IFNAME": "lo", **base, "LOCAL_RANK": str(rank)}
