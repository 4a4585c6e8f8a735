"""Runs an engine in a process of its own, because its ranks are for the process: `python tp_engine.py < JSON`.

The JSON says which model, what of the config is changed, and what is asked, one after the other. What is written to
stdout is JSON again: every answer's tokens, and how many of its prompt came from which tier.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from tests.engine.driver import Driver


def main() -> None:
    order: dict[str, Any] = json.load(sys.stdin)
    driver = Driver(Path(order["model"]), **order["changes"])
    # Tiers are always worth a load.
    driver.cache.rates.load_s = lambda direction, num_bytes: 0.0  # type: ignore[method-assign]
    driver.cache._loads._worth_waiting_s = lambda load: math.inf  # type: ignore[method-assign]
    driver.cache._loads.is_fetch_late = lambda context: False  # type: ignore[method-assign]
    told: list[dict[str, Any]] = []
    for number, ask in enumerate(order["asks"]):
        answer = driver.ask(
            f"r{number}", ask["prompt"], session=ask["session"], max_tokens=ask["max_tokens"], ignore_eos=True
        )
        assert answer.report is not None, answer.error
        report = answer.report
        told.append(
            {
                "token_ids": answer.token_ids,
                "prompt_tokens": report.prompt_tokens,
                "history_tokens": report.history_tokens,
                "hbm": report.hbm_tokens,
                "dram": report.dram_tokens,
                "disk": report.disk_tokens,
            }
        )
    processes = len(psutil.Process().children())
    is_connected = dist.is_initialized()
    driver.close()
    said = {
        "answers": told,
        "processes": processes,
        "is_connected": is_connected,
        "knows_ranks": "reprise.engine.ranks.group" in sys.modules,
    }
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
