"""Tests that what ranks exchange arrives as it was sent, and that nothing else is taken."""

import typing

import msgspec
import pytest
import torch

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.stored import ExtentInfo, SessionRecord, StoredBlock
from reprise.cache.moves import (
    AbandonLoad,
    BlockLoad,
    CapturePiece,
    CopyRows,
    Deleted,
    DeleteExtents,
    DiskGivenUp,
    DiskTaken,
    EncodeBlocks,
    Encoded,
    Event,
    FetchBlocks,
    Fetched,
    FillFromPage,
    FillFromSlot,
    FinishLoad,
    HeadersRead,
    LoadBlocks,
    Loaded,
    Lost,
    Move,
    NotTransferred,
    PutSession,
    Remote,
    RemoteDeleted,
    RemoteUsed,
    Renewed,
    Saved,
    SealSlot,
    Transferred,
    Uploaded,
    WriteExtent,
    Written,
)
from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from reprise.engine.ranks.wire import (
    CarryOut,
    Close,
    Ended,
    RunStep,
    SaveRows,
    decode_from_rank,
    decode_to_rank,
    encode,
    pack,
    pack_step,
    unpack_events,
    unpack_moves,
    unpack_step,
)

KEY = BlockKey(b"k" * 16)
SESSION = SessionRecord(
    tenant="t", salt="", session_id="s", context=b"\x00\xff", last_used_s=1.5, pinned=True, ttl_s=None
)
BLOCK = StoredBlock(key=KEY, parent=BlockKey(b"p" * 16), token_ids=b"\x01\x00\x00\x00", is_open=True)
MOVES: list[Move] = [
    CopyRows(1, 2, 3, 4, 5, 6, 7),
    LoadBlocks(1, "r", (BlockLoad(KEY, 32, None, (1 << 60, 3), 2, 0, 64), BlockLoad(KEY, 5, 4, None, 2, 0, 64))),
    FinishLoad(1),
    AbandonLoad(2),
    FetchBlocks(3, ((KEY, (5, 6), 7),)),
    FillFromSlot(1, 2, 3),
    FillFromPage(1, 2, 3, 4, 5, 6),
    SealSlot(1, 2, 32),
    WriteExtent(4, SESSION, (BLOCK,), (9,), 1 << 60),
    DeleteExtents(5, (1, 2), ("t", "", "s")),
]
EVENTS: list[Event] = [
    Transferred("disk_to_hbm", 5, 0.25),
    NotTransferred("disk_to_dram", 5, 0.25),
    Saved(3),
    Loaded(4, {KEY: "io"}, frozenset({KEY})),
    Fetched(5, {KEY: "late"}),
    Written(6, ExtentInfo(7, SESSION, (BLOCK,), 4096), None),
    Written(6, None, "full"),
    Deleted(7, "busy"),
    Lost((1, 2)),
]


def test_moves_and_events_arrive_as_they_were() -> None:
    message = decode_to_rank(encode(CarryOut(pack(MOVES), ["r"])))
    assert isinstance(message, CarryOut)
    assert unpack_moves(message.moves) == MOVES
    assert message.running == ["r"]
    told = decode_from_rank(encode(Ended(pack(EVENTS))))
    assert isinstance(told, Ended)
    assert unpack_events(told.events) == EVENTS


def test_every_kind_is_tried_above() -> None:
    """Left out are sessions' records, which rank 0 alone keeps, coded KV and KV in Redis, which ranks do not share yet,
    and the news of disks, which only an engine of one rank watches."""
    moves = {kind for part in typing.get_args(Move) for kind in (typing.get_args(part) or (part,))}
    assert {type(move) for move in MOVES} == moves - {PutSession, EncodeBlocks, *typing.get_args(Remote)}
    assert {type(event) for event in EVENTS} == set(typing.get_args(Event)) - {
        DiskGivenUp,
        DiskTaken,
        Encoded,
        Uploaded,
        HeadersRead,
        RemoteDeleted,
        RemoteUsed,
        Renewed,
    }


def test_what_is_no_move_is_not_taken() -> None:
    with pytest.raises(KeyError):
        unpack_moves(pack([PutSession(SESSION)]))
    with pytest.raises(msgspec.DecodeError):
        unpack_moves([("FinishLoad", msgspec.Raw(msgspec.msgpack.encode({"job_id": "one"})))])
    with pytest.raises(msgspec.DecodeError):
        decode_to_rank(b"\xc1")


def test_pieces_arrive_as_they_were() -> None:
    message = decode_to_rank(encode(SaveRows([CapturePiece(0, 1, 2, 3)])))
    assert isinstance(message, SaveRows)
    assert message.pieces == [CapturePiece(0, 1, 2, 3)]
    assert decode_to_rank(encode(Close(2.5))) == Close(2.5)


def test_a_step_arrives_as_it_was() -> None:
    items = [
        BatchItem("a", [5, 6, 7], 30, [4, 2], True, prompt_rows=1),
        BatchItem("b", [8], 0, [1], False),
    ]
    batch = build_batch(items, BlockTables(max_seqs=2, max_pages=4), 32, torch.device("cpu"))
    message = decode_to_rank(encode(pack_step(batch, captures=True, jobs=[3], has_bystanders=True)))
    assert isinstance(message, RunStep)
    assert (message.captures, message.jobs, message.has_bystanders) == (True, [3], True)
    got = unpack_step(message, torch.device("cpu"))
    for name in ("token_ids", "positions", "logit_rows"):
        assert torch.equal(getattr(got, name), getattr(batch, name))
    for name in ("query_start", "context_len", "block_table", "slots"):
        assert torch.equal(getattr(got.meta, name), getattr(batch.meta, name))
        assert getattr(got.meta, name).dtype == getattr(batch.meta, name).dtype
    assert (got.meta.query_lens, got.meta.context_lens) == (batch.meta.query_lens, batch.meta.context_lens)
    with pytest.raises(ValueError, match="tokens"):
        unpack_step(msgspec.structs.replace(message, positions=b""), torch.device("cpu"))
