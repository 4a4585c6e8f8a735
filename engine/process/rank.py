"""Runs a rank beyond 0 of a tensor-parallel engine, one of the processes that share its model (`python -m
reprise.engine.process.rank`); `reprise.engine.ranks.group` starts it.

It loads its part of the model and makes tiers for its heads, with as many blocks as rank 0's.
"""

import logging
import os
import signal
import sys
import time
from dataclasses import replace

import zmq

from reprise.cache.transfer.capture import CaptureSink
from reprise.engine.build.large_pages import move_into_large_pages
from reprise.engine.build.model import load, probe_model
from reprise.engine.build.shared import decode_room
from reprise.engine.build.tiers import build_tiers
from reprise.engine.lifeline import die_with_parent, read_frame
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.model.loading import ModelRefused
from reprise.engine.ranks.rank import Rank
from reprise.engine.ranks.wire import (
    HIGH_WATER_MARK,
    MAX_MESSAGE_BYTES,
    SEND_TIMEOUT_MS,
    MakeTiers,
    Probed,
    RankLaunch,
    RankRefused,
    TiersMade,
    decode_launch,
    decode_to_rank,
    encode,
)

REFUSED_S = 5.0  # time for rank 0 to read why; in the middle of a joint computation it never does
log = logging.getLogger(__name__)


def run() -> int:
    """Run the whole life of the process. Reads from stdin what to load. Returns the exit status."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    launch = decode_launch(read_frame(sys.stdin.fileno()))
    form = f"%(asctime)s %(levelname)s rank {launch.rank} %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
    die_with_parent(sys.stdin.fileno())
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(HIGH_WATER_MARK)
        socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.connect(launch.endpoint)
        try:
            return _serve(launch, socket)
        except Exception:
            log.critical("rank %d cannot go on", launch.rank, exc_info=True)
        return 1


def _serve(launch: RankLaunch, socket: "zmq.Socket[bytes]") -> int:
    try:
        rank = _built(launch, socket)
    except ModelRefused as refusal:
        log.critical("refused: %s", refusal)
        socket.send(encode(RankRefused(str(refusal))))
        time.sleep(REFUSED_S)
        return 1
    rank.serve()
    return 0


def _built(launch: RankLaunch, socket: "zmq.Socket[bytes]") -> Rank:
    """Build the rank's part of the engine. Raises ModelRefused."""
    loaded = load(launch.config, launch.rank, launch.rendezvous)
    probed = probe_model(loaded, launch.config)
    socket.send(encode(Probed(probed.fingerprint)))
    order = decode_to_rank(socket.recv())
    assert isinstance(order, MakeTiers)
    whole = replace(probed, fingerprint=order.fingerprint)
    tiers = build_tiers(launch.config, loaded, whole, decode_room(order.room))
    socket.send(encode(TiersMade({extent.extent_id: extent.size_bytes for extent in tiers.extents})))
    if loaded.device.type == "cpu":
        move_into_large_pages()
    sink = CaptureSink() if tiers.num_slots else None
    runner = ModelRunner(model=loaded.module, pages=tiers.pages, backend=probed.backend, sink=sink)
    return Rank(socket=socket, transfer=tiers.transfer, runner=runner, sink=sink, device=loaded.device)


if __name__ == "__main__":
    status = run()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
