"""Reads extents from Redis into the caller's memory, layer by layer."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_file import runs
from reprise.cache.storage.extent_format import ExtentHeader
from reprise.cache.storage.extent_reader import Landed, in_turn
from reprise.cache.storage.redis.extents import FIELD_BYTES, RedisExtents
from reprise.cache.storage.redis.resp import RedisConnection, RedisFailed, RedisRefusal, WrongLength

_FIELDS_AHEAD = 8  # fields asked for before they are read: ten MiB that Redis may have to hold for us


class _Stream:
    """The bytes of one extent, received in order, of which some blocks are wanted."""

    def __init__(self, store: RedisExtents, name: bytes, header: ExtentHeader, places: Sequence[int]) -> None:
        self.name, self.header, self.places = name, header, list(places)
        self.key, self.server = store.key_of(name), store.server_of(name)
        self._sizes = header.segment_bytes
        totals = [size * len(header.blocks) for size in self._sizes]
        self._starts = [0, *accumulate(totals)]
        self._size = self._starts[-1]
        self.coming: deque[int] = deque()  # fields that were asked for
        self._planned = -1  # the last field that was planned
        self.asked = -1  # the last field that was asked for
        self._held: deque[tuple[int, memoryview]] = deque()  # received and not wanted yet, by place in the stream

    def fields(self, layer: int) -> Iterator[int]:
        """Yield the numbers of the fields (pieces of FIELD_BYTES, as Redis stores them) that this layer needs and no
        earlier call has yielded."""
        for start, stop in self._pieces(layer):
            for field in range(start // FIELD_BYTES, (stop - 1) // FIELD_BYTES + 1):
                if field > self._planned:
                    self._planned = field
                    yield field

    def plan_again(self) -> None:
        """Make `fields` yield again those fields that it has yielded but that were not yet requested from Redis."""
        self._planned = self.asked

    def _pieces(self, layer: int) -> Iterator[tuple[int, int]]:
        size = self._sizes[layer]
        for first, stop in runs(self.places):
            begin = self._starts[layer] + self.places[first] * size
            yield begin, begin + (stop - first) * size

    def bounds(self, field: int) -> tuple[int, int]:
        begin = field * FIELD_BYTES
        return begin, min(begin + FIELD_BYTES, self._size)

    def take(self, layer: int, out: memoryview, receive: "_Receiver") -> None:
        """Fill `out` with the wanted segments of a layer."""
        for start, stop in self._pieces(layer):
            while start < stop:
                taken = self._held_part(start, out[: stop - start]) or receive(self, start, out[: stop - start])
                start, out = start + taken, out[taken:]

    def _held_part(self, at: int, out: memoryview) -> int:
        """Copy into `out` bytes that were received earlier than wanted and kept. at: offset of `out` in the extent's
        bytes. Returns how many bytes were copied; 0 if the byte at `at` was not kept."""
        while self._held:
            begin, data = self._held[0]
            if begin + len(data) <= at:
                self._held.popleft()
                continue
            if begin > at:
                return 0
            taken = min(len(out), begin + len(data) - at)
            out[:taken] = data[at - begin : at - begin + taken]
            return taken
        return 0

    def hold(self, begin: int, data: memoryview) -> None:
        if len(data):
            self._held.append((begin, data))


class _Receiver:
    """A receiver of fields (an extent's bytes in pieces of FIELD_BYTES), which requests the following fields ahead of
    their use."""

    def __init__(self, plan: Sequence[tuple[_Stream, int]], connections: dict[int, RedisConnection]) -> None:
        self._plan, self._connections = deque(plan), connections
        self._scratch = memoryview(bytearray(FIELD_BYTES))
        self._under_way: deque[_Stream] = deque()

    def __call__(self, stream: _Stream, at: int, out: memoryview) -> int:
        """Receive the next field of `stream` and copy its bytes from `at` on, an offset in the extent's bytes, into
        `out`. Returns how many bytes were copied."""
        self._ask()
        if not self._under_way or self._under_way[0] is not stream:
            raise BlockMissing("a field of another extent comes next", reason="format")
        begin, end = stream.bounds(stream.coming[0])
        if not begin <= at < end:
            raise BlockMissing("a field that is not wanted comes next", reason="format")
        taken = min(end - at, len(out))
        rest = memoryview(bytearray(end - at - taken))
        self._receive([self._scratch[: at - begin], out[:taken], rest])
        stream.hold(at + taken, rest)
        return taken

    def keep_rest(self) -> None:
        """Receive and store the fields that were requested and are not wanted yet, and request no more."""
        self._plan.clear()
        while self._under_way:
            stream = self._under_way[0]
            begin, end = stream.bounds(stream.coming[0])
            data = memoryview(bytearray(end - begin))
            self._receive([data])
            stream.hold(begin, data)

    def _ask(self) -> None:
        while self._plan and len(self._under_way) < _FIELDS_AHEAD:
            stream, field = self._plan.popleft()
            self._connections[id(stream.server)].send((b"HGET", stream.key, b"%d" % field))
            stream.coming.append(field)
            stream.asked = field
            self._under_way.append(stream)

    def _receive(self, targets: Sequence[memoryview]) -> None:
        stream = self._under_way.popleft()
        field = stream.coming.popleft()
        self._ask()  # ask ahead: Redis is never idle while we receive
        try:
            is_there = self._connections[id(stream.server)].read_into(targets)
        except RedisRefusal as refusal:
            problem = f"extent {stream.name.hex()}: {refusal}"
            raise BlockMissing(problem, reason="io", extent_id=stream.name) from refusal
        except WrongLength as error:
            problem, reason = f"extent {stream.name.hex()}: {error}", error.reason
            raise BlockMissing(problem, reason=reason, extent_id=stream.name) from error
        if not is_there:
            problem = f"extent {stream.name.hex()} has no field {field}"
            raise BlockMissing(problem, reason="missing", extent_id=stream.name)


class RedisReader:
    """A reader of blocks of several extents, used by one thread at a time. It requests fields (pieces of an extent's
    bytes) ahead of the layer that needs them, and stores their bytes of later layers until those are read."""

    def __init__(self, store: RedisExtents, wanted: Sequence[tuple[bytes, Sequence[int]]]) -> None:
        """Read the headers. wanted: names of extents, and for each the indices of the wanted blocks, ascending. Raises
        BlockMissing."""
        found, missing = store.headers([name for name, _ in wanted])
        for error in missing.values():
            raise error
        self._store = store
        for name, places in wanted:
            if not all(0 <= place < len(found[name].blocks) for place in places):
                raise BlockMissing(f"extent {name.hex()} has no such block", reason="format", extent_id=name)
        self._streams = [_Stream(store, name, found[name], places) for name, places in wanted]
        self._next_layer = 0

    def checksums(self, extent: int, place: int, key: BlockKey) -> tuple[bytes, ...]:
        """Return the checksums, by layer, of a block. extent: index into the wanted extents. place: index of the block
        in it. Raises BlockMissing if the block there has another key."""
        stream = self._streams[extent]
        if stream.header.blocks[place].key != key:
            problem = f"extent {stream.name.hex()} has another block {place}"
            raise BlockMissing(problem, reason="format", extent_id=stream.name, block=place)
        return stream.header.checksums_of(place)

    def land(self, first_layer: int, outs: Sequence[memoryview], landed: Landed) -> int:
        """Fill each of `outs` with one layer, beginning with `first_layer`, without verifying anything; a layer is the
        wanted blocks' segments back to back. Layers must be read in order. landed: called as in `ExtentReader.land`.
        Returns how many layers were read. Raises BlockMissing; nothing is written to `outs` afterwards."""
        layers = range(first_layer, first_layer + len(outs))
        if first_layer != self._next_layer:
            raise ValueError("layers come in order")
        plan = [(stream, field) for layer in layers for stream in self._streams for field in stream.fields(layer)]
        with self._connected() as connections:
            receive = _Receiver(plan, connections)

            def bring(at: int, number: int) -> None:
                for layer, out in zip(layers[at : at + number], outs[at : at + number], strict=True):
                    begin = 0
                    for stream in self._streams:
                        end = begin + len(stream.places) * stream.header.segment_bytes[layer]
                        stream.take(layer, out[begin:end], receive)
                        begin = end

            count = in_turn(len(outs), bring, landed)
            receive.keep_rest()
            for stream in self._streams:
                stream.plan_again()
        self._next_layer += count
        return count

    def read(self, layer: int, outs: Sequence[memoryview]) -> None:
        """Fill outs[i] with the segment of the i-th wanted block in this layer, and verify it. Raises BlockMissing."""
        size = sum(map(len, outs))
        whole = memoryview(bytearray(size))
        self.land(layer, [whole], lambda count: 0)
        begin = 0
        blocks = [(stream, place) for stream in self._streams for place in stream.places]
        for (stream, place), out in zip(blocks, outs, strict=True):
            part = whole[begin : begin + len(out)]
            if not stream.header.matches(layer, place, part):
                self._store.tell_damage(stream.name, f"layer {layer} of block {place} was altered")
                problem = f"block {place} of extent {stream.name.hex()} was altered"
                raise BlockMissing(problem, reason="checksum", extent_id=stream.name, block=place)
            out[:] = part
            begin += len(out)

    @contextmanager
    def _connected(self) -> Iterator[dict[int, RedisConnection]]:
        """Lend a connection to every server that has an extent. Raises BlockMissing."""
        servers = {id(stream.server): stream.server for stream in self._streams}
        try:
            with ExitStack() as stack:
                yield {number: stack.enter_context(server.lease()) for number, server in servers.items()}
        except RedisFailed as error:
            raise BlockMissing(f"Redis: {error}", reason=error.reason) from error
