"""How far the hierarchy looks ahead: windows over the queue (AttentionStore §3.3) and the HBM read buffer (§3.2.1)."""

import math


def prefetch_window(available_bytes: int, session_bytes: float) -> int:
    """L_pw = C_mem / S_kv: how many of the next turns may have their KV fetched from disk into DRAM.

    available_bytes: the DRAM available for prefetching; session_bytes: the mean KV of a session in the hierarchy. While
    nothing is stored (session_bytes 0) there is nothing to fetch, and the window is empty.
    """
    if available_bytes <= 0 or session_bytes <= 0:
        return 0
    return int(available_bytes / session_bytes)


def read_buffer_bytes(
    *,
    bandwidth: float,
    load_s_per_token: float,
    prefill_s_per_token: float,
    history_tokens: int,
    new_tokens: int,
    load_bytes: int,
) -> int:
    """S_buf = B * (T_load * L_hist - T_pref * L_new): the bytes that must be in HBM before a batch starts, so that the
    rest arrives behind its computation.

    bandwidth: bytes per second into HBM; history_tokens (to load) and new_tokens (to compute) are summed over the
    batch, load_bytes is all that it loads. Between 0 (all hidden without a buffer) and load_bytes.
    """
    exposed_s = load_s_per_token * history_tokens - prefill_s_per_token * new_tokens
    return max(0, min(load_bytes, math.ceil(bandwidth * exposed_s)))


def read_buffer_layers(buffer_bytes: int, load_bytes: int, num_layers: int, max_layers: int) -> int:
    """How many leading layers of a load of `load_bytes` the read buffer covers, rounded up: a layer arrives whole or
    stalls. max_layers: `cache.read_buffer_layers`, -1 for no bound."""
    if buffer_bytes <= 0 or load_bytes <= 0:
        return 0
    layers = min(num_layers, -(-buffer_bytes * num_layers // load_bytes))
    return layers if max_layers < 0 else min(layers, max_layers)
