"""A proxy relays what it is given, and has exactly the faults that it was told to have."""

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.fleet.cuttable_proxy import CuttableProxy, Faults, cuttable_proxy


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)


@pytest.fixture(params=["tcp", "unix"])
def proxy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CuttableProxy]:
    class Tcp(socketserver.ThreadingTCPServer):
        daemon_threads = True

    class Unix(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    path = str(tmp_path / "s")
    server = Unix(path, Echo) if request.param == "unix" else Tcp(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    target = Path(path) if request.param == "unix" else ("127.0.0.1", server.server_address[1])
    try:
        with cuttable_proxy(target) as proxy:
            yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def connect(proxy: CuttableProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=60)


def receive(client: socket.socket, size: int) -> bytes:
    """Return so many bytes, fewer at the end of the connection."""
    got = b""
    while len(got) < size and (piece := client.recv(size - len(got))):
        got += piece
    return got


def echoed(client: socket.socket, data: bytes) -> bytes:
    threading.Thread(target=client.sendall, args=(data,)).start()
    return receive(client, len(data))


DATA = bytes(range(256)) * 4096


def test_it_relays_whatever_comes_on_every_connection(proxy):
    with connect(proxy) as one, connect(proxy) as other:
        assert echoed(one, b"one") == b"one"
        assert echoed(other, DATA) == DATA
        assert echoed(one, b"again") == b"again"
    assert proxy.flipped == 0


def test_replies_come_late(proxy):
    with connect(proxy) as client, proxy.faulty(Faults(delay_s=0.3)):
        began = time.monotonic()
        assert echoed(client, b"one") == b"one"
        assert time.monotonic() - began >= 0.3
    with connect(proxy) as client:
        assert echoed(client, b"two") == b"two"


def test_all_connections_share_a_narrow_line(proxy):
    with connect(proxy) as one, connect(proxy) as other, proxy.faulty(Faults(bytes_per_s=4e6)):
        began = time.monotonic()
        threading.Thread(target=one.sendall, args=(DATA,)).start()
        assert echoed(other, DATA) == DATA
        assert receive(one, len(DATA)) == DATA
        assert time.monotonic() - began >= 2 * len(DATA) / 4e6


def test_nothing_leaves_a_hole_until_it_is_closed(proxy):
    with connect(proxy) as client:
        assert echoed(client, b"before") == b"before"
        with proxy.faulty(Faults(is_hole=True)), connect(proxy) as late:
            for one in (client, late):
                one.sendall(b"in it")
                one.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    one.recv(1)
        client.settimeout(60)
        assert receive(client, 5) == b"in it"


def test_a_connection_is_reset_in_the_middle_of_a_reply(proxy):
    with proxy.faulty(Faults(reset_after=100_000)), connect(proxy) as client:
        threading.Thread(target=send, args=(client, DATA)).start()
        got, is_reset = until_reset(client)
        assert is_reset
        assert len(got) <= 100_000
        assert got == DATA[: len(got)]
    with connect(proxy) as client:
        assert echoed(client, DATA) == DATA


def send(client: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        client.sendall(data)


def until_reset(client: socket.socket) -> tuple[bytes, bool]:
    """Return what comes, and whether a reset is the end of it."""
    got = b""
    try:
        while piece := client.recv(1 << 16):
            got += piece
    except ConnectionResetError:
        return got, True
    return got, False


def test_whoever_connects_is_refused(proxy):
    with connect(proxy) as client:
        assert echoed(client, b"before") == b"before"
        with proxy.faulty(Faults(refuses=True)):
            assert until_reset(client) == (b"", True)
            # The reset may come before the call that connects has returned.
            with suppress(ConnectionResetError), connect(proxy) as another:
                assert until_reset(another) == (b"", True)
    with connect(proxy) as client:
        assert echoed(client, b"after") == b"after"


def test_a_cut_ends_the_connections_that_are_there(proxy):
    with connect(proxy) as client:
        assert echoed(client, b"before") == b"before"
        proxy.cut()
        assert until_reset(client) == (b"", True)
    with connect(proxy) as client:
        assert echoed(client, b"after") == b"after"


def test_bits_of_replies_are_flipped(proxy):
    with connect(proxy) as client, proxy.faulty(Faults(flip_every=1000)):
        got = echoed(client, DATA)
    assert len(got) == len(DATA)
    different = sum((one ^ other).bit_count() for one, other in zip(got, DATA, strict=True))
    assert different == proxy.flipped > len(DATA) / 2000


def test_a_server_that_is_not_there_closes_the_connection(tmp_path):
    with cuttable_proxy(tmp_path / "nobody") as proxy, connect(proxy) as client:
        assert until_reset(client)[0] == b""
