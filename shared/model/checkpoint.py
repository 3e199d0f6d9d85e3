"""The safetensors files of one checkpoint, mapped into memory.

A tensor of a file is a view of the file's mapping. Reading it makes pages of the file resident, and they count as
memory of this process while they are mapped. `copy_tensor` copies a tensor piece by piece and drops the pages of each
piece when it is copied, so that loading a model takes little more memory than the model.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from shared.errors import ModelError
from shared.host_memory import new_mapping
from shared.model.config_fields import decode_file
from shared.model.weight_source import TensorSpec

PIECE_NBYTES = 16 << 20
"""Most bytes of a file that are resident beside the copy that is made of them."""

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Checkpoint:
    """The files of a folder. A file is opened when a tensor of it is first needed.

    Raises ModelError, which names the file, when a file is missing or corrupt.
    """

    def __init__(self, folder: Path, *, piece_nbytes: int = PIECE_NBYTES) -> None:
        self._folder = folder
        self._piece_nbytes = piece_nbytes
        self._files: dict[Path, _File] = {}
        single = folder / _SINGLE_FILE  # comes before an index, as in transformers
        self._path_of = (
            dict.fromkeys(self._open(single).tensors, single) if single.is_file() else _shards(folder)
        )

    def check(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Raise ModelError unless the checkpoint has all these tensors, each in its shape and in one of its types."""
        missing = [name for name in tensors if name not in self._path_of]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            of_layer = missing[0].rpartition(".")[0] + "."
            others = ", ".join(sorted(name for name in self._path_of if name.startswith(of_layer)))
            have = f"; they have {others}" if others else ""
            raise ModelError(f"{self._folder}: the weights lack the tensor {missing[0]}{more}{have}")
        for name, (shape, types) in tensors.items():
            path, tensor = self._path_of[name], self._file_of(name).tensors.get(name)
            if tensor is None:
                raise ModelError(f"{path}: lacks {name}, which {_INDEX_FILE} says is there")
            if tensor.shape != shape:
                raise ModelError(f"{path}: {name} has shape {tensor.shape}; config.json makes it {shape}")
            if tensor.dtype not in types:
                raise ModelError(
                    f"{path}: {name} has dtype {tensor.dtype}; config.json makes it {' or '.join(types)}"
                )

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor. `check` must have run."""
        return _DTYPES[self._file_of(name).tensors[name].dtype]

    def mapped(self, name: str) -> torch.Tensor:
        """A read-only view of a tensor in its file. The file stays mapped while the tensor lives."""
        return self._file_of(name).view(name)

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """A copy of a tensor, or of a part of it, which should not be large: it is resident twice for a moment."""
        file = self._file_of(name)
        source = file.view(name)[part]
        out = new_mapping(source.nbytes).view(source.dtype).view(source.shape)
        if part:
            out.copy_(source)
            file.drop_resident(file.view(name))
        else:
            self.copy_tensor(name, out, lambda num_elements: None)
        return out

    def copy_tensor(self, name: str, out: torch.Tensor, on_copied: Callable[[int], None]) -> None:
        """Copy a tensor into `out`, converted to its type. `on_copied` gets the number of elements of each piece."""
        for first_row, piece in self.pieces(name):
            out[first_row : first_row + len(piece)].copy_(piece)
            on_copied(piece.numel())

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of its first row, rows) for pieces of a tensor, as read-only views of its file.

        The memory of a piece is dropped when the next piece is taken.
        """
        file = self._file_of(name)
        source = file.view(name)
        step = max(self._piece_nbytes // source[0].nbytes, 1)
        for first_row in range(0, len(source), step):
            piece = source[first_row : first_row + step]
            yield first_row, piece
            file.drop_resident(piece)

    def close(self) -> None:
        """Close the files and drop their resident memory. Tensors from `mapped` stay valid."""
        for file in self._files.values():
            file.drop_resident()
        self._files.clear()

    def _file_of(self, name: str) -> _File:
        return self._open(self._path_of[name])

    def _open(self, path: Path) -> _File:
        if path not in self._files:
            self._files[path] = _File(path)
        return self._files[path]


class _Tensor(msgspec.Struct):
    """A tensor's entry in a safetensors header. Offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _File:
    """One mapped safetensors file. Its pages are never written, so dropping them loses nothing."""

    def __init__(self, path: Path) -> None:
        with _naming(path):
            with safe_open(path, framework="pt"):
                pass  # opening it checks that the header describes the file
            with path.open("rb") as file:
                self._data_start = 8 + int.from_bytes(file.read(8), "little")
                header = msgspec.json.decode(file.read(self._data_start - 8), type=dict[str, msgspec.Raw])
                # torch warns of buffers that are not writable, and a private mapping is writable.
                self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        header.pop("__metadata__", None)
        self.tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in header.items()}
        for tensor in self.tensors.values():
            tensor.shape = tensor.shape or (1,)  # a scale without an axis

    def view(self, name: str) -> torch.Tensor:
        """A view of the mapping as a tensor."""
        tensor = self.tensors[name]
        offset = self._data_start + tensor.data_offsets[0]
        dtype, count = _DTYPES[tensor.dtype], math.prod(tensor.shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(tensor.shape)

    def drop_resident(self, piece: torch.Tensor | None = None) -> None:
        """Drop the resident memory of a contiguous piece, or of the whole mapping. Later uses read the file again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first, nbytes = 0, len(self._map)
        if piece is not None:
            start = piece.data_ptr() - self._address
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            nbytes = start + piece.nbytes - first
        self._map.madvise(mmap.MADV_DONTNEED, first, nbytes)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _shards(folder: Path) -> dict[str, Path]:
    """The file of each tensor, as the index says."""
    index = folder / _INDEX_FILE
    if not index.is_file():
        raise ModelError(
            f"{folder}: has neither {_SINGLE_FILE} nor {_INDEX_FILE} (other weight formats are not read)"
        )
    weight_map = decode_file(index, _Index).weight_map
    return {name: _shard(index, file_name) for name, file_name in weight_map.items()}


def _shard(index: Path, file_name: str) -> Path:
    if Path(file_name).name != file_name:
        raise ModelError(f"{index}: {file_name!r} is not the name of a file beside it")
    return index.parent / file_name


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn the errors of a safetensors file into a ModelError that names the file."""
    try:
        yield
    except FileNotFoundError as e:
        raise ModelError(f"{path}: {_INDEX_FILE} names this file, but it is missing") from e
    except (SafetensorError, msgspec.DecodeError, OSError) as e:
        raise ModelError(f"{path}: cannot be read as safetensors: {e}") from e
