# SPDX-License-Identifier: Apache-2.0
"""A release-format checkpoint, opened strictly and read piece by piece."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import torch

from ..config import ModelConfig, load_config
from ..errors import CheckpointError
from ..formats import decode_fp8
from ..progress import Progress
from .index import INDEX, find_tensors, some
from .shard import ShardReader, StoredTensor, map_bytes
from .spec import BLOCK, TensorSpec, expected_tensors, group_of, is_vision
from .values import TORCH_DTYPES, check_values

_SLICE = 64 << 20


class Checkpoint:
    """The tensors in ``folder``, which must be exactly those that ``config`` asks for.

    Opening reads the index and the headers and compares names, stored types and shapes both ways; data are read by
    ``tensor``, ``rows`` and ``mapped``, each of which checks the values. ``finish`` tells whether everything was used.
    Vision tensors may be there; nothing else may be missing or in excess. ``config`` is the folder's config.json by
    default. Everything that is wrong raises CheckpointError naming file and tensor (ConfigError for the config.json).

    Memory: a tensor that is handed out owns its bytes, so what the caller drops is freed; one file is open at a time.
    """

    def __init__(self, folder: str | Path, config: ModelConfig | None = None, progress: bool = False) -> None:
        self.folder = Path(folder)
        self.config = config if config is not None else load_config(self.folder)
        self._stored = find_tensors(self.folder)
        expected = expected_tensors(self.config)
        _check_names(self.folder, self._stored, expected)
        _check_dtypes(self._stored, expected)
        _check_shapes(self._stored, expected)
        self.tensors: dict[str, TensorSpec] = {
            name: TensorSpec(stored.dtype, stored.shape, group_of(name)) for name, stored in self._stored.items()
        }
        self.files: tuple[Path, ...] = tuple(sorted({stored.file for stored in self._stored.values()}))
        self.total_bytes: int = sum(stored.nbytes for stored in self._stored.values())
        self._reader = ShardReader()
        self._done: dict[str, int] = {}
        self._progress: Progress | None = None
        if progress:
            total = sum(stored.nbytes for name, stored in self._stored.items() if not is_vision(name))
            self._progress = Progress(total, "B", "loading checkpoint")

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor ``name`` as stored, in its stored shape, values checked, in memory of its own.

        BF16 gives bfloat16, F32 float32, F8_E4M3 float8_e4m3fn; F8_E8M0 (scale bytes) and I8 (two fp4 codes each, the low
        nibble first) give uint8.
        """
        return self._read(name, self._find(name), 0, None)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """``tensor(name)[start:stop]``, reading only those rows; 0 <= start <= stop <= the number of rows."""
        stored = self._find(name)
        rows = stored.shape[0] if stored.shape else 0
        if not 0 <= start <= stop <= rows:
            raise CheckpointError(f"{stored.file}: tensor {name!r}: rows {start}:{stop} are outside its {rows} rows")
        return self._read(name, stored, start, stop)

    def mapped(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of ``tensor(name)`` as a **read-only** memory map, for tables larger than memory; writing to it crashes.

        Scales are read once, slice by slice, to check them; other values are not, because that would read the whole file.
        """
        stored = self._find(name)
        rows = stored.shape[0]
        stop = rows if stop is None else stop
        if stored.dtype == "F8_E8M0":
            step = max(1, _SLICE * rows // max(1, stored.nbytes))
            for first in range(start, stop, step):
                self._read(name, stored, first, min(first + step, stop))
        self._count(name, stored.nbytes * (stop - start) // max(1, rows))
        return map_bytes(stored, TORCH_DTYPES[stored.dtype])[start:stop]

    def linear(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of the linear ``name``: ``name``.weight as stored, decoded to fp32 where it is fp8."""
        stored = self.rows(f"{name}.weight", start, stop)
        if f"{name}.scale" not in self._stored:
            return stored
        first = start // BLOCK
        return decode_fp8(stored, self.rows(f"{name}.scale", first, -(-stop // BLOCK)), skip=start - first * BLOCK)

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor ``name``."""
        return self._find(name).file

    def unread(self, prefixes: Sequence[str] = ("",)) -> list[str]:
        """The expected tensors (vision excepted) whose names begin with one of ``prefixes`` and of which nothing was read."""
        return [
            name for name in self._stored if name.startswith(tuple(prefixes)) and name not in self._done and not is_vision(name)
        ]

    def finish(self, unused: Callable[[str], bool] = is_vision) -> None:
        """Ends the reading: closes the open file and the progress bar and checks that every tensor had a use.

        Raises CheckpointError naming the tensors of which nothing was read and for which ``unused(name)`` is False. Vision
        tensors are always declared unused.
        """
        self.close()
        left = [name for name in self.unread() if not unused(name)]
        if left:
            raise CheckpointError(
                f"{self.folder}: {len(left)} tensors of the checkpoint were neither loaded nor declared unused: {some(left)};"
                " this is a fault of the loader, not of the files: please report it"
            )

    def close(self) -> None:
        """Closes the open file and the progress bar; tensors that were handed out stay valid."""
        self._reader.close()
        if self._progress is not None:
            self._progress.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _find(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise CheckpointError(f"{self.folder}: has no tensor {name!r}")
        return self._stored[name]

    def _read(self, name: str, stored: StoredTensor, start: int, stop: int | None) -> torch.Tensor:
        shape, begin, nbytes = stored.shape, stored.start, stored.nbytes
        if stop is not None:
            row = nbytes // max(1, shape[0])
            shape, begin, nbytes = (stop - start, *shape[1:]), begin + start * row, (stop - start) * row
        data = torch.empty(nbytes, dtype=torch.uint8)
        self._reader.read(stored.file, begin, data)
        values = data.view(TORCH_DTYPES[stored.dtype]).view(shape)
        check_values(values, stored.dtype, f"{stored.file}: tensor {name!r}", start)
        self._count(name, nbytes)
        return values

    def _count(self, name: str, nbytes: int) -> None:
        before = self._done.get(name, 0)
        self._done[name] = min(before + nbytes, self._stored[name].nbytes)
        if self._progress is not None and not is_vision(name):
            self._progress.update(self._done[name] - before)


def _check_names(folder: Path, found: dict[str, StoredTensor], expected: dict[str, TensorSpec]) -> None:
    where = folder / INDEX if (folder / INDEX).exists() else folder
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} tensors that the configuration asks for are missing: {some(missing)};"
            " use the config.json that belongs to these files, or download the checkpoint again"
        )
    unexpected = [name for name in found if name not in expected and not is_vision(name)]
    if unexpected:
        listed = some([f"{name} ({found[name].file.name})" for name in unexpected])
        raise CheckpointError(
            f"{where}: {len(unexpected)} tensors have no place in the model that the configuration describes: {listed};"
            " use the config.json that belongs to these files"
        )


def _check_dtypes(found: dict[str, StoredTensor], expected: dict[str, TensorSpec]) -> None:
    wrong = [name for name, spec in expected.items() if found[name].dtype != spec.dtype]
    _refuse("stored type", wrong, lambda name: (found[name].dtype, expected[name].dtype), found)
    unknown = [name for name, stored in found.items() if name not in expected and stored.dtype not in TORCH_DTYPES]
    _refuse("stored type", unknown, lambda name: (found[name].dtype, "one of " + ", ".join(TORCH_DTYPES)), found)


def _check_shapes(found: dict[str, StoredTensor], expected: dict[str, TensorSpec]) -> None:
    wrong = [name for name, spec in expected.items() if found[name].shape != spec.shape]
    _refuse("shape", wrong, lambda name: (list(found[name].shape), list(expected[name].shape)), found)


def _refuse(
    kind: str, wrong: Sequence[str], pair: Callable[[str], tuple[object, object]], found: dict[str, StoredTensor]
) -> None:
    if not wrong:
        return
    name = wrong[0]
    have, want = pair(name)
    more = f" (and {len(wrong) - 1} more tensors with another {kind}: {some(wrong[1:])})" if len(wrong) > 1 else ""
    raise CheckpointError(
        f"{found[name].file}: tensor {name!r}: {kind} {have}, expected {want}{more};"
        " use the config.json that belongs to these files, or a checkpoint in the release's format"
    )
