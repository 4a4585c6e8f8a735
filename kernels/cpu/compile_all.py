"""Compiles the kernels of this machine into numba's cache, where all later processes find them.

    python -m reprise.kernels.cpu.compile_all

Without it, processes that start at the same time would each compile them.
"""

import logging

from reprise.kernels.cpu import available
from reprise.kernels.row_copies import save_kernels


def compile_all() -> None:
    """Compile all kernels that this processor can run, and check each once."""
    for kernels in (
        available.decode_kernels,
        available.load_kernels,
        available.prefill_kernels,
        available.expert_kernels,
        available.select_kernels,
        available.product_kernels,
        save_kernels,
    ):
        kernels()
    available.flash_kernels(True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    compile_all()
