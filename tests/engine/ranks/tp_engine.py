"""Runs an engine in a process of its own, because its ranks are for the process: `python tp_engine.py < JSON`.

The JSON says which model, what of the config is changed, and what is asked, one after the other: of one engine, or of
several on the same directory, each started when the one before has ended. What is written to stdout is JSON again:
every answer's tokens, and how many of its prompt came from which tier.
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
    said: dict[str, Any] = {"answers": []}
    for asks in order["engines"]:
        driver = Driver(Path(order["model"]), **order["changes"])
        # Tiers are always worth a load.
        driver.cache.rates.load_s = lambda direction, num_bytes: 0.0  # type: ignore[method-assign]
        driver.cache._loads._worth_waiting_s = lambda load: math.inf  # type: ignore[method-assign]
        driver.cache._loads.is_fetch_late = lambda context: False  # type: ignore[method-assign]
        said["answers"].append([told(driver, f"r{number}", ask) for number, ask in enumerate(asks)])
        said["processes"] = len(psutil.Process().children())
        said["is_connected"] = dist.is_initialized()
        driver.close()
        if dist.is_initialized():
            dist.destroy_process_group()  # a process of the product ends with its engine
    said["knows_ranks"] = "reprise.engine.ranks.group" in sys.modules
    json.dump(said, sys.stdout)


def told(driver: Driver, request_id: str, ask: dict[str, Any]) -> dict[str, Any]:
    """Ask, and return the answer and where its prompt came from."""
    answer = driver.ask(
        request_id, ask["prompt"], session=ask["session"], max_tokens=ask["max_tokens"], ignore_eos=True
    )
    assert answer.report is not None, answer.error
    report = answer.report
    return {
        "token_ids": answer.token_ids,
        "prompt_tokens": report.prompt_tokens,
        "history_tokens": report.history_tokens,
        "hbm": report.hbm_tokens,
        "dram": report.dram_tokens,
        "disk": report.disk_tokens,
    }


if __name__ == "__main__":
    main()
