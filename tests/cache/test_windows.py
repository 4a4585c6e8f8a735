from hypothesis import given
from hypothesis import strategies as st

from cache.windows import prefetch_window, read_buffer_bytes, read_buffer_layers

BYTES = st.integers(0, 1 << 50)


def test_windows_worked_by_hand():
    assert prefetch_window(10_000, 3_000.0) == 3  # 3.33 sessions fit
    assert prefetch_window(2_999, 3_000.0) == 0  # no session fits


def test_nothing_stored_or_no_room_means_no_window():
    assert prefetch_window(10_000, 0.0) == 0
    assert prefetch_window(-5, 100.0) == 0  # more is leased than the free buffer leaves


@given(available=BYTES, more=BYTES, session=st.floats(1, 1e12))
def test_what_the_window_holds_fits_and_room_never_shortens_it(available, more, session):
    window = prefetch_window(available, session)
    assert window * session <= available * (1 + 1e-9)
    assert (window + 1) * session >= available * (1 - 1e-9)
    assert prefetch_window(available + more, session) >= window


def test_read_buffer_worked_by_hand():
    # 1,000 history tokens of 2,000 bytes at 1 MB/s: 2 ms each, 2 s to load. 100 new tokens at 5 ms: 0.5 s to compute.
    # 1.5 s would not be hidden, in which 1.5 MB arrive.
    terms = {"bandwidth": 1e6, "load_s_per_token": 2e-3, "history_tokens": 1_000, "load_bytes": 2_000_000}
    assert read_buffer_bytes(prefill_s_per_token=5e-3, new_tokens=100, **terms) == 1_500_000
    assert read_buffer_bytes(prefill_s_per_token=5e-3, new_tokens=400, **terms) == 0  # just hidden
    assert read_buffer_bytes(prefill_s_per_token=5e-3, new_tokens=900, **terms) == 0  # never negative
    terms["bandwidth"] = 2e6  # measured rates need not agree with each other: never more than there is
    assert read_buffer_bytes(prefill_s_per_token=5e-3, new_tokens=100, **terms) == 2_000_000


def test_layers_worked_by_hand():
    # 2 MB in 8 layers are 250,000 bytes each: 1.5 MB are 6 layers, and one byte more needs the 7th.
    assert read_buffer_layers(1_500_000, 2_000_000, 8, -1) == 6
    assert read_buffer_layers(1_500_001, 2_000_000, 8, -1) == 7
    assert read_buffer_layers(1_500_000, 2_000_000, 8, 5) == 5
    assert read_buffer_layers(1_500_000, 2_000_000, 8, 0) == 0  # the paper's PL-B0
    assert read_buffer_layers(0, 2_000_000, 8, -1) == 0
    assert read_buffer_layers(0, 0, 8, -1) == 0


@given(
    bandwidth=st.floats(1e3, 1e12),
    load=st.floats(0, 1),
    prefill=st.floats(0, 1),
    history=st.integers(0, 1 << 20),
    new=st.integers(0, 1 << 20),
    load_bytes=BYTES,
    num_layers=st.integers(1, 100),
    max_layers=st.integers(-1, 100),
)
def test_the_buffer_is_within_bounds(bandwidth, load, prefill, history, new, load_bytes, num_layers, max_layers):
    terms = {"bandwidth": bandwidth, "load_s_per_token": load, "prefill_s_per_token": prefill}
    size = read_buffer_bytes(**terms, history_tokens=history, new_tokens=new, load_bytes=load_bytes)
    assert 0 <= size <= load_bytes
    assert size >= read_buffer_bytes(**terms, history_tokens=history, new_tokens=new + 1, load_bytes=load_bytes)
    layers = read_buffer_layers(size, load_bytes, num_layers, max_layers)
    assert 0 <= layers <= num_layers
    if max_layers >= 0:
        assert layers <= max_layers
    else:
        assert layers * load_bytes >= size * num_layers  # the layers hold the buffer
        assert (layers - 1) * load_bytes < size * num_layers or size == 0  # and no layer is idle
