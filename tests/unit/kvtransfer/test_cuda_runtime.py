"""The real `CudaRuntime` over a libcudart that is made of Python functions."""

from __future__ import annotations

import _ctypes
import ctypes
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvtransfer.transports.cuda.cuda_runtime import CudaRuntime, loaded_library

GPU = torch.device("cuda", 1)
ADDRESS, MAPPED_NBYTES = 0x7F00_0000_0000, 4096
NOT_SUPPORTED = 801


class Library:
    """A libcudart and a libcuda, of which some calls fail. The last error stays until it is asked for, as in CUDA."""

    def __init__(self, *failing: str) -> None:
        self.last_error = 0
        self.calls: list[str] = []
        self.given: dict[str, tuple[object, ...]] = {}
        """The arguments of the latest call of each function."""
        self.functions: dict[str, Any] = {}
        self._failing = failing

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            self.given[name] = arguments
            if name in self._failing:
                self.last_error = NOT_SUPPORTED
                return NOT_SUPPORTED
            value = {
                "cudaMalloc": ADDRESS,
                "cudaIpcOpenMemHandle": ADDRESS,
                "cuPointerGetAttribute": MAPPED_NBYTES,
            }
            if name in value:
                arguments[0]._obj.value = value[name]  # type: ignore[attr-defined]
            return 0

        def get_last_error() -> int:
            error, self.last_error = self.last_error, 0
            return error

        def get_error_string(error: int) -> bytes:
            return b"operation not supported"

        known = {"cudaGetLastError": get_last_error, "cudaGetErrorString": get_error_string}
        return self.functions.setdefault(name, known.get(name, call))

    def entered(self) -> None:
        """The calling thread has made its device current."""
        self.calls.append(f"{threading.current_thread().name} enters")


def new_runtime(library: Library, device: torch.device = GPU) -> CudaRuntime:
    return CudaRuntime(device, DeviceThreads(library.entered), library, library)


def test_no_address_or_size_is_passed_as_an_int_of_four_bytes() -> None:
    """Which ctypes does where it is not told the types."""
    library = Library()
    new_runtime(library)
    wide = {
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_size_t),
    }
    types = {name: getattr(one, "argtypes", ()) for name, one in library.functions.items()}
    of_numbers = types.keys() - {"cudaGetLastError", "cudaGetErrorString"}
    assert len(of_numbers) == 8
    assert [name for name in of_numbers if not wide & {*types[name]}] == []
    assert ctypes.c_size_t in types["cudaMalloc"] and ctypes.c_size_t in types["cudaHostRegister"]
    assert library.functions["cudaGetErrorString"].restype is ctypes.c_char_p


def test_cuda_is_asked_by_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of cuda.h and cuda_runtime_api.h: a fake knows no others."""
    at_address = torch.zeros(MAPPED_NBYTES, dtype=torch.uint8)
    monkeypatch.setattr(f"{__name__}.ADDRESS", at_address.data_ptr())
    library = Library()
    runtime = new_runtime(library, torch.device("cpu"))
    assert runtime.open(bytes(64)).nbytes == MAPPED_NBYTES
    assert library.given["cudaIpcOpenMemHandle"][2] == 1, "cudaIpcMemLazyEnablePeerAccess"
    assert library.given["cuPointerGetAttribute"][1] == 12, "CU_POINTER_ATTRIBUTE_RANGE_SIZE"
    memory = torch.zeros(24, dtype=torch.uint8)
    runtime.register(memory)
    assert library.given["cudaHostRegister"] == (memory.data_ptr(), 24, 0), "cudaHostRegisterDefault"


@pytest.mark.parametrize(
    ("failing", "call"),
    [
        ("cudaMalloc", lambda runtime: runtime.malloc(1 << 20)),
        ("cudaIpcOpenMemHandle", lambda runtime: runtime.open(bytes(64))),
        ("cudaHostRegister", lambda runtime: runtime.register(torch.zeros(8))),
    ],
)
def test_a_call_that_fails_leaves_no_error_for_torch(
    failing: str, call: Callable[[CudaRuntime], object]
) -> None:
    library = Library(failing)
    with pytest.raises(LinkError, match=f"{failing}.*operation not supported"):
        call(new_runtime(library))
    assert library.last_error == 0


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cudaFree", lambda runtime: runtime.free(ADDRESS)),
        ("cudaHostUnregister", lambda runtime: runtime.unregister(torch.zeros(8))),
    ],
)
def test_a_slot_that_ends_on_any_thread_is_freed_on_its_device(
    name: str, call: Callable[[CudaRuntime], object]
) -> None:
    library = Library()
    stranger = threading.Thread(target=call, args=(new_runtime(library),), name="stranger")
    stranger.start()
    stranger.join()
    assert library.calls == ["stranger enters", name]


MAPPED = "7f00-7f10 r-xp 00000000 08:01 12345  {}\n"


def test_the_library_is_the_one_that_is_mapped_whatever_its_folder_is_called(tmp_path: Path) -> None:
    path = tmp_path / "two words" / "libcudart.so.12"
    path.parent.mkdir()
    shutil.copy(_ctypes.__file__, path)
    maps = "7f20-7f30 rw-p 00000000 00:00 0 \n" + MAPPED.format("/usr/lib/libc.so.6") + MAPPED.format(path)
    library = loaded_library(maps)
    _ctypes.dlclose(library._handle)  # type: ignore[attr-defined]  # or other tests find a libcudart in this process
    assert library._name == str(path)


def test_a_library_that_cannot_be_loaded_leaves_the_next_transport() -> None:
    with pytest.raises(LinkError, match="cannot open shared object"):
        loaded_library(MAPPED.format("/gone/libcudart.so.12 (deleted)"))
    with pytest.raises(LinkError, match="torch has loaded no libcudart"):
        loaded_library(MAPPED.format("/libcudart.so.folder/libc.so.6"))


@pytest.mark.parametrize("failing", ["cuPointerGetAttribute", "torch"])
def test_memory_that_was_mapped_in_vain_is_unmapped(failing: str) -> None:
    """torch takes no address of a GPU that is not there."""
    library = Library(failing)
    with pytest.raises((LinkError, RuntimeError, AssertionError)):
        new_runtime(library).open(bytes(64))
    assert library.calls[-1] == "cudaIpcCloseMemHandle"


def test_memory_is_read_where_it_lies_by_the_device_of_the_runtime() -> None:
    """`torch.as_tensor` asks CUDA which GPU has the memory, and copies what another one has. No peer writes there."""
    memory = torch.zeros(64, dtype=torch.uint8)
    seen = new_runtime(Library(), torch.device("cpu")).tensor(memory.data_ptr(), 64)
    memory.fill_(7)
    assert seen.tolist() == [7] * 64
    assert seen.data_ptr() == memory.data_ptr()
