"""The moves the cache decides on. Plain values: `cache.transfer` carries them out, the simulator only counts them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyRows:
    """Copy KV rows of all layers inside HBM, from one page to another, before the step that reads them. Moves are
    carried out in order, so a source page may be reused by any later move or by the step itself."""

    source_page: int
    source_row: int
    target_page: int
    target_row: int
    num_rows: int


Move = CopyRows
