"""Builds the parts of a tensor-parallel engine: rank 0's in this process, while the processes of the other ranks build
theirs."""

import functools
from dataclasses import replace

import msgspec

from reprise.engine.build.first_steps import WarmModel, warm_up
from reprise.engine.build.model import LoadedModel, ProbedModel, find_files, load, probe_model
from reprise.engine.build.room import Room, find_room
from reprise.engine.build.tiers import Tiers, build_tiers
from reprise.engine.config import EngineConfig
from reprise.engine.model.loading import check_split
from reprise.engine.ranks.group import RankGroup
from reprise.engine.ranks.shared_runner import SharedRunner
from reprise.engine.ranks.shared_transfer import SharedTransfer
from reprise.engine.ranks.wire import MakeTiers


def encode_room(room: Room) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(room))


def decode_room(encoded: msgspec.Raw) -> Room:
    """Decode the Room (window, pages and sizes of the tiers) that rank 0 has sent to this rank. Raises
    msgspec.DecodeError."""
    return msgspec.msgpack.decode(encoded, type=Room)


def build_shared(config: EngineConfig) -> tuple[LoadedModel, ProbedModel, Room, Tiers, WarmModel]:
    """Start the other ranks, load the model together with them, and have all ranks make tiers of the same size. Raises
    ModelRefused."""
    path = find_files(config)  # once, not by every rank
    check_split(path, config.model.tensor_parallel)
    local = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, source=str(path)))
    ranks = RankGroup(config=local, num_ranks=config.model.tensor_parallel)
    loaded = load(local, 0, ranks.rendezvous)
    probed = probe_model(loaded, config)
    probed = replace(probed, fingerprint=ranks.model_fingerprint(probed.fingerprint))
    room = find_room(local, loaded, probed)
    ranks.make_tiers(MakeTiers(probed.fingerprint, encode_room(room)))
    tiers = build_tiers(local, loaded, probed, room, functools.partial(SharedTransfer, ranks=ranks))
    extents, partial = ranks.common_extents(tiers.extents)
    assert isinstance(tiers.transfer, SharedTransfer)
    tiers.transfer.delete(partial)
    tiers = replace(tiers, extents=extents)
    make_runner = functools.partial(SharedRunner, ranks=ranks)
    warm = warm_up(local, loaded, probed, room, tiers, make_runner, remembered_in=local.cache.disk_dir)
    return loaded, probed, room, tiers, warm
