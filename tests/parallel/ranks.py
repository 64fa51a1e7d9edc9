# SPDX-License-Identifier: Apache-2.0
"""Runs a function in many processes that are the ranks of one torch.distributed world (gloo on this machine).

The processes are forked from one that has done the imports, so that 64 of them share the memory these take. Nothing hangs:
when one fails, or time is up, all are ended.
"""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed

IMPORTS = ["torch", "modeling_deepseek_v41", "modeling_deepseek_v41.loading", "modeling_deepseek_v41.runner"]
SECONDS = 300.0


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
    """What ``function(*args)``, of a module that can be imported, returns in each of ``world_size`` ranks, in their order.

    Raises RuntimeError with the traceback of a rank that failed, and where ``seconds`` are not enough.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, store.port, seconds, folder, function, args), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            _join(ranks, Path(folder), time.monotonic() + seconds)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world_size)]


def _join(ranks: list[Any], folder: Path, deadline: float) -> None:
    running = {process.sentinel: (rank, process) for rank, process in enumerate(ranks)}
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            raise RuntimeError(f"ranks {sorted(rank for rank, _ in running.values())} did not end in time")
        for sentinel in ended:
            rank, process = running.pop(sentinel)  # type: ignore[index]
            process.join()
            if process.exitcode:
                failure = folder / f"{rank}.txt"
                words = failure.read_text() if failure.exists() else f"exit code {process.exitcode}"
                raise RuntimeError(f"rank {rank} failed: {words}")


def _rank(
    rank: int, world_size: int, port: int, seconds: float, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=seconds)
    try:
        store = torch.distributed.TCPStore("127.0.0.1", port, timeout=limit)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        torch.save(function(*args), Path(folder) / f"{rank}.pt")
        torch.distributed.destroy_process_group()
    except BaseException:
        (Path(folder) / f"{rank}.txt").write_text(traceback.format_exc())
        sys.exit(1)
