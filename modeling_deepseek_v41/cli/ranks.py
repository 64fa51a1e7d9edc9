# SPDX-License-Identifier: Apache-2.0
"""Running a command on many ranks of this machine: as processes that it starts itself, or as one of those that torchrun starts.

One process decides what a run is (``prepare``): it reads the texts and draws the seeds. All ranks then do the same work
(``execute``), so they take the same decisions; rank 0 prints, the others stay silent. The first rank that fails says so, in one
message, and the others end with it: those that wait for it in an exchange lose the connection.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ..config import load_config
from ..errors import RequestError
from ..layout import Layout
from ..parallel import Parallel, connect, unconnected
from .failures import explained
from .layout_options import chosen_layout

Prepare = Callable[[Any], Any]
Execute = Callable[[Any, Parallel], int]

FAILURE = "first failure"
"""The key under which the ranks' store keeps it: exit code and message."""
PATIENCE = 1.0
"""Seconds that a rank without a connection waits for the one that broke it to say why."""
GRACE = 10.0
"""Seconds that the other ranks get to end by themselves after one has failed."""


class Place(NamedTuple):
    """One rank of a run, the store that all of them share, and where it may say why it fails."""

    rank: int
    size: int
    store: Any
    stderr: TextIO


def on_ranks(args: Any, prepare: Prepare, execute: Execute) -> int:
    """Runs a command and returns its exit code. ``args``: its options, those of ``add_layout_arguments`` among them.

    ``prepare(args)`` runs once and gives a job, which can be pickled; ``execute(job, parallel)`` runs in every rank. Without
    --world-size and torchrun there is one rank, this process. Raises the package's errors for what cannot be used.
    """
    if torch.distributed.is_torchelastic_launched():
        return _joined(args, prepare, execute)
    layout = _layout(args, 1 if args.world_size is None else args.world_size)
    job = prepare(args)
    return execute(job, unconnected(layout, 0)) if layout.world_size == 1 else _start(job, layout, execute)


def is_silent() -> bool:
    """Whether this process is a rank of torchrun's that leaves the talking to rank 0."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    known = torch.distributed.is_torchelastic_launched() and rank.isdecimal() and size.isdecimal()
    return known and 0 < int(rank) < int(size)


def _layout(args: Any, size: int) -> Layout:
    return chosen_layout(args, load_config(args.model_path), size)


def _check_environment() -> None:
    """Raises RequestError where the variables that torchrun sets are not what it sets."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        found = os.environ.get(name)
        if found is None or not found.isdecimal():
            raise RequestError(f"{name}: expected a number from torchrun, found {found!r}; start the ranks with torchrun")
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if int(rank) >= int(size):
        raise RequestError(f"RANK: expected 0 to WORLD_SIZE - 1, found {rank} of {size}; start the ranks with torchrun")


def _joined(args: Any, prepare: Prepare, execute: Execute) -> int:
    """One of torchrun's ranks."""
    _check_environment()
    store, rank, size = next(iter(rendezvous("env://")))
    if args.world_size not in (None, size):
        raise RequestError(f"world_size: expected {size}, the processes that torchrun started, found {args.world_size}")
    layout = _layout(args, size)

    def shared(parallel: Parallel) -> int:
        jobs = [prepare(args) if rank == 0 else None]
        torch.distributed.broadcast_object_list(jobs, 0)
        return execute(jobs[0], parallel)

    return _run(Place(rank, size, store, _quiet(rank)), layout, shared)


def _start(job: Any, layout: Layout, execute: Execute) -> int:
    """Starts all ranks of ``layout`` and waits for them. They are forked from a process that has done the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([execute.__module__])
    size = layout.world_size
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=_started, args=(rank, store.port, job, layout, execute), daemon=True) for rank in range(size)
    ]
    try:
        for process in ranks:
            process.start()
        _watch(ranks, store)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    failure = _failure(store)
    return failure[0] if failure is not None else next((code for code in (rank.exitcode for rank in ranks) if code), 0)


def _watch(ranks: list[Any], store: Any) -> None:
    """Returns when all ``ranks`` have ended, or the rest had GRACE seconds after one failed."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    deadline = None
    while running and (deadline is None or time.monotonic() < deadline):
        for sentinel in wait(list(running), timeout=None if deadline is None else max(0.0, deadline - time.monotonic())):
            rank = running.pop(sentinel)
            ranks[rank].join()
            code = ranks[rank].exitcode
            if code:
                deadline = deadline or time.monotonic() + GRACE
            if code < 0:
                cause = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
                words = f"ended by signal {-code} ({signal.Signals(-code).name}){cause}"
                _tell(Place(rank, len(ranks), store, sys.stderr), 1, words)


def _started(rank: int, port: int, job: Any, layout: Layout, execute: Execute) -> None:
    """One of ``_start``'s ranks; the process that started it answers to the keyboard for all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    size = layout.world_size
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    place = Place(rank, size, TCPStore("127.0.0.1", port), _quiet(rank))
    sys.exit(_run(place, layout, lambda parallel: execute(job, parallel)))


def _run(place: Place, layout: Layout, work: Callable[[Parallel], int]) -> int:
    """``work`` as one rank; its exit code, which is rank 0's alone, or that of the first failure."""
    try:
        store = PrefixStore("ranks", place.store)
        torch.distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
        code = work(connect(layout))
        sys.stdout.flush()
        torch.distributed.destroy_process_group()
    except BaseException as error:
        code, words = explained(error)
        if code == 1 and "gloo" in words:
            words = "lost the connection to another rank"
            _wait_for_failure(place.store)
        return _tell(place, code, words)
    return code if place.rank == 0 else 0


def _tell(place: Place, code: int, words: str) -> int:
    """Says ``words`` unless another rank failed before; the first failure's exit code."""
    mine = json.dumps([place.rank, code, words])
    if place.store.compare_set(FAILURE, "", mine).decode() == mine and words:
        print(f"error: rank {place.rank}: {words}", file=place.stderr, flush=True)
    failure = _failure(place.store)
    return code if failure is None else failure[0]


def _failure(store: Any) -> tuple[int, str] | None:
    if not store.check([FAILURE]):
        return None
    _, code, words = json.loads(store.get(FAILURE))
    return code, words


def _wait_for_failure(store: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while _failure(store) is None and time.monotonic() < deadline:
        time.sleep(0.05)


def _quiet(rank: int) -> TextIO:
    """Ends all output of other ranks than 0; a stream to stderr that still works."""
    stderr = os.fdopen(os.dup(2), "w", errors="backslashreplace")
    if rank:
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nothing, stream)
    return stderr
