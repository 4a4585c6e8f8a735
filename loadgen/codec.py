"""Models how a codec changes the sizes and times of KV in the tiers that store it coded. Sizes are in tokens of raw KV.
Pure."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CodedKV:
    """The size and decoding rate of blocks that a codec has compressed, in relation to raw KV."""

    ratio: float = 1.0  # how many times smaller a coded block is; 1: nothing is coded
    decode_bytes_per_s: float = math.inf  # bytes of raw KV; a layer is decoded while the next is read

    def check(self) -> "CodedKV":
        """Return self. Raises ValueError if the ratio is below 1 or infinite, or the rate not above 0."""
        if not (1 <= self.ratio < math.inf and self.decode_bytes_per_s > 0):
            raise ValueError(f"no codec makes KV {self.ratio:g} times smaller at {self.decode_bytes_per_s:g} B/s")
        return self

    def room(self, num_tokens: int, *, raw_tokens: int) -> float:
        """Return the room that `num_tokens` tokens take when all but `raw_tokens` of them are compressed. The unit is
        the room of an uncompressed token."""
        return raw_tokens + (num_tokens - raw_tokens) / self.ratio

    def read_s(self, raw_bytes: float, bytes_per_s: float) -> float:
        """Return the seconds to read KV of this raw size over a link and to decode it. Its few uncompressed blocks
        count as compressed."""
        return max(raw_bytes / self.ratio / bytes_per_s, raw_bytes / self.decode_bytes_per_s)


RAW = CodedKV()
