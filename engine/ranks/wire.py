"""Defines the msgspec structs that rank 0 of a tensor-parallel engine and its other ranks exchange, over one ZeroMQ
pair each.

Rank 0 decides everything and sends it in the order in which it does the same itself. Messages hold a step's integers,
the cache's moves and their results: never pickle, and no KV.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from reprise.cache.moves import (
    AbandonLoad,
    CapturePiece,
    CopyRows,
    Deleted,
    DeleteExtents,
    Event,
    FetchBlocks,
    Fetched,
    FillFromPage,
    FillFromSlot,
    FinishLoad,
    LoadBlocks,
    Loaded,
    Lost,
    Move,
    NotTransferred,
    Saved,
    SealSlot,
    Transferred,
    WriteExtent,
    Written,
)
from reprise.engine.config import EngineConfig
from reprise.engine.model.batch import BatchInput
from reprise.kernels.attention.ragged_batch import AttentionMeta

MAX_MESSAGE_BYTES = 64 << 20  # the largest are a step's block tables and the ids of all extents
HIGH_WATER_MARK = 1_000  # messages per direction; a full socket makes its sender wait
SEND_TIMEOUT_MS = 30_000  # a rank that takes nothing for that long is as good as dead

Tagged = tuple[str, msgspec.Raw]
"""The name of a class of `reprise.cache.moves`, and a value of that class, encoded."""

_MOVES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(CopyRows, LoadBlocks, FinishLoad, AbandonLoad, FetchBlocks),
        *(FillFromSlot, FillFromPage, SealSlot, WriteExtent, DeleteExtents),
    )
}
_EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Transferred, NotTransferred, Saved, Loaded, Fetched, Written, Deleted, Lost)
}


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The order to start a rank: its number, where to connect, and the settings. It is the only frame on the rank's
    stdin, after its length (4 bytes, big endian). Stdin then stays open for as long as rank 0 lives."""

    rank: int
    endpoint: str  # ZeroMQ, bound by rank 0
    rendezvous: str  # file in which the ranks find each other
    config: EngineConfig  # its source is a directory


# --- from rank 0 ------------------------------------------------------------------------------------------------------


class MakeTiers(msgspec.Struct, frozen=True, tag="make_tiers"):
    """The order to make tiers of these sizes. Sent in answer to Probed; answered by TiersMade."""

    fingerprint: bytes  # fingerprint of the whole model
    room: msgspec.Raw  # `reprise.engine.build.room.Room`


class CarryOut(msgspec.Struct, frozen=True, tag="carry_out"):
    """Carry out these moves of KV, as `Transfer.carry_out` does. running: ids of the requests that take part in the
    next step; the step waits for their loads layer by layer."""

    moves: list[Tagged]
    running: list[str]


class RunStep(msgspec.Struct, frozen=True, kw_only=True, tag="run_step"):
    """Run a forward pass together with all ranks. Arrays are little-endian, those of tokens int64, others int32."""

    token_ids: bytes
    positions: bytes
    logit_rows: bytes
    slots: bytes
    query_lens: list[int]
    context_lens: list[int]
    block_table: bytes  # block table with as many rows as query_lens
    captures: bool  # whether SaveRows may follow
    jobs: list[int] = []  # loads that it stands on; if there are any, StepEnded answers
    has_bystanders: bool = False  # sequences that stand on none


class SaveRows(msgspec.Struct, frozen=True, tag="save_rows"):
    """The order to save KV rows of the step that ran last. pieces: runs of adjacent rows of the batch, each with the
    slot of this rank's DRAM that receives it."""

    pieces: list[CapturePiece]


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The order to finish the work that was sent before, and to end."""

    timeout_s: float


ToRank = MakeTiers | CarryOut | RunStep | SaveRows | Close

# --- to rank 0 --------------------------------------------------------------------------------------------------------


class RankRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Reports that a rank cannot be built. The message is for people."""

    message: str


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    """The answer of a rank that has loaded its part of the model and checked that it runs."""

    fingerprint: bytes  # fingerprint of the part


class TiersMade(msgspec.Struct, frozen=True, tag="tiers_made"):
    """The answer of a rank that has allocated its memory for KV. extents: for each extent (file with the KV of a turn)
    on its disk, its id and the bytes of the rank's part of it."""

    extents: dict[int, int]  # id -> bytes


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Events of a rank: which moves of KV between tiers have ended, and how."""

    events: list[Tagged]


class StepEnded(msgspec.Struct, frozen=True, tag="step_ended"):
    """The answer of a rank that has run a step with loads of KV. Loads that have ended are reported before it, by
    Ended."""

    late: list[int]  # loads that did not come in time here


FromRank = RankRefused | Probed | TiersMade | Ended | StepEnded

_encoder = msgspec.msgpack.Encoder()
_to_rank: "msgspec.msgpack.Decoder[ToRank]" = msgspec.msgpack.Decoder(ToRank)
_from_rank: "msgspec.msgpack.Decoder[FromRank]" = msgspec.msgpack.Decoder(FromRank)
_launch = msgspec.msgpack.Decoder(RankLaunch)


def encode(message: ToRank | FromRank | RankLaunch) -> bytes:
    return _encoder.encode(message)


def decode_to_rank(frame: bytes) -> ToRank:
    """Decode a message to a rank. Raises msgspec.DecodeError."""
    return _to_rank.decode(frame)


def decode_from_rank(frame: bytes) -> FromRank:
    """Decode a message from a rank. Raises msgspec.DecodeError."""
    return _from_rank.decode(frame)


def decode_launch(frame: bytes) -> RankLaunch:
    """Decode the frame on a rank's stdin. Raises msgspec.DecodeError."""
    return _launch.decode(frame)


# --- moves and events -------------------------------------------------------------------------------------------------


def pack(values: Sequence[Move] | Sequence[Event]) -> list[Tagged]:
    return [(type(value).__name__, msgspec.Raw(_encoder.encode(value))) for value in values]


def unpack_moves(tagged: Sequence[Tagged]) -> list[Move]:
    """Decode moves of KV. Raises msgspec.DecodeError, or KeyError for a move that only rank 0 makes."""
    return [msgspec.msgpack.decode(raw, type=_MOVES[name]) for name, raw in tagged]


def unpack_events(tagged: Sequence[Tagged]) -> list[Event]:
    """Decode events about moves of KV. Raises msgspec.DecodeError or KeyError."""
    return [msgspec.msgpack.decode(raw, type=_EVENTS[name]) for name, raw in tagged]


# --- steps ------------------------------------------------------------------------------------------------------------


def pack_step(batch: BatchInput, *, captures: bool, jobs: Sequence[int] = (), has_bystanders: bool = False) -> RunStep:
    """Encode a step for the ranks. Waits for the device, if the batch is on one. captures: whether KV rows of the step
    may be saved in DRAM afterwards, by SaveRows. jobs: ids of the loads that the step needs. has_bystanders: whether
    some sequences need no load."""
    return RunStep(
        token_ids=_bytes(batch.token_ids),
        positions=_bytes(batch.positions),
        logit_rows=_bytes(batch.logit_rows),
        slots=_bytes(batch.meta.slots),
        query_lens=batch.meta.query_lens,
        context_lens=batch.meta.context_lens,
        block_table=_bytes(batch.meta.block_table),
        captures=captures,
        jobs=list(jobs),
        has_bystanders=has_bystanders,
    )


def unpack_step(step: RunStep, device: torch.device) -> BatchInput:
    """Make the batch of a step. Raises ValueError if the sizes of its parts contradict each other."""
    starts = np.cumsum([0, *step.query_lens], dtype=np.int32)
    table = np.frombuffer(step.block_table, dtype=np.int32).reshape(len(step.query_lens), -1)
    token_ids, positions, slots, logit_rows = (
        np.frombuffer(data, dtype=np.int64) for data in (step.token_ids, step.positions, step.slots, step.logit_rows)
    )
    if not len(token_ids) == len(positions) == len(slots) == starts[-1]:
        raise ValueError(f"{len(token_ids)} tokens, {len(positions)} positions, {len(slots)} slots")

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy()).to(device)  # what a message holds cannot be written to

    return BatchInput(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        logit_rows=tensor(logit_rows),
        meta=AttentionMeta(
            query_lens=step.query_lens,
            context_lens=step.context_lens,
            query_start=tensor(starts),
            context_len=tensor(np.array(step.context_lens, dtype=np.int32)),
            block_table=tensor(table),
            slots=tensor(slots),
        ),
    )


def _bytes(x: Tensor) -> bytes:
    return x.cpu().contiguous().numpy().tobytes()
