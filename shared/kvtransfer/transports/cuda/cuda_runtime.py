"""The calls of the CUDA runtime that links between processes need: memory that another process can map, and pinning.

torch's allocator cuts its blocks into parts and may use virtual memory, which has no IPC handle. So slots come from
plain cudaMalloc. Tests run whole links over a fake of `CudaRuntime`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shared.device_threads import DeviceThreads
from shared.errors import LinkError

_HANDLE_NBYTES = 64
_LAZY_PEER_ACCESS = 1
_REGISTER_DEFAULT = 0
_RANGE_SIZE = 12
"""CU_POINTER_ATTRIBUTE_RANGE_SIZE: how many bytes are mapped around an address. The runtime cannot tell."""


class CudaRuntime:
    """The runtime that torch has loaded, and the driver below it, by ctypes. Each call raises LinkError. Any thread.

    Each call makes the device current first: a slot is freed on the thread that drops its last reference, which may
    touch no device otherwise.
    """

    def __init__(
        self, device: torch.device, threads: DeviceThreads, library: Any = None, driver: Any = None
    ) -> None:
        """Take another `library` and `driver` where this process's are not meant. LinkError: there are none."""
        self._device = device
        self._enter = threads.enter
        library, driver = (
            library or loaded_library(Path("/proc/self/maps").read_text()),
            driver or _library("libcuda.so.1"),
        )
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self._forget_error = library.cudaGetLastError
        self._error_string = library.cudaGetErrorString
        self._error_string.restype, self._error_string.argtypes = ctypes.c_char_p, (ctypes.c_int,)
        self._malloc = library.cudaMalloc
        self._malloc.argtypes = (ctypes.POINTER(address), size)
        self._free = library.cudaFree
        self._free.argtypes = (address,)
        self._get_handle = library.cudaIpcGetMemHandle
        self._get_handle.argtypes = (ctypes.POINTER(_Handle), address)
        self._open_handle = library.cudaIpcOpenMemHandle
        self._open_handle.argtypes = (ctypes.POINTER(address), _Handle, ctypes.c_uint)
        self._close_handle = library.cudaIpcCloseMemHandle
        self._close_handle.argtypes = (address,)
        self._register = library.cudaHostRegister
        self._register.argtypes = (address, size, ctypes.c_uint)
        self._unregister = library.cudaHostUnregister
        self._unregister.argtypes = (address,)
        self._get_attribute = driver.cuPointerGetAttribute
        self._get_attribute.argtypes = (ctypes.POINTER(size), ctypes.c_int, address)

    def malloc(self, nbytes: int) -> int:
        """Address of new device memory that other processes can map."""
        address = ctypes.c_void_p()
        self._call(f"cudaMalloc of {nbytes} bytes", self._malloc, ctypes.byref(address), nbytes)
        assert address.value is not None
        return address.value

    def free(self, address: int) -> None:
        """Free what `malloc` gave. No process has it mapped."""
        self._call("cudaFree", self._free, address)

    def ipc_handle(self, address: int) -> bytes:
        """What another process maps the memory with."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", self._get_handle, ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> torch.Tensor:
        """Map another process's memory, all of it, as uint8. So its size is no word of the peer's."""
        if len(handle) != _HANDLE_NBYTES:
            raise LinkError(f"the peer sent an IPC handle of {len(handle)} bytes")
        address, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
        what = _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        self._call("cudaIpcOpenMemHandle", self._open_handle, ctypes.byref(address), *what)
        assert address.value is not None
        try:
            attribute = ctypes.byref(nbytes), _RANGE_SIZE, address
            self._call("cuPointerGetAttribute", self._get_attribute, *attribute)
            return self.tensor(address.value, nbytes.value)
        except BaseException:
            self.close(address.value)
            raise

    def close(self, address: int) -> None:
        """Unmap what `open` mapped at this address."""
        self._call("cudaIpcCloseMemHandle", self._close_handle, address)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """The memory as uint8. The tensor does not own it."""
        # `torch.as_tensor` asks CUDA where memory is, and copies what another GPU has. This device reads it there.
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def register(self, memory: torch.Tensor) -> None:
        """Pin host memory that can be written, so that the device can copy from and to it at full speed."""
        what = memory.data_ptr(), memory.nbytes, _REGISTER_DEFAULT
        self._call(f"cudaHostRegister of {memory.nbytes} bytes", self._register, *what)

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`."""
        self._call("cudaHostUnregister", self._unregister, memory.data_ptr())

    def _call(self, name: str, function: Callable[..., int], *arguments: Any) -> None:
        self._enter()
        if error := function(*arguments):
            self._forget_error()  # or torch raises it when this thread next launches a kernel
            raise LinkError(f"{name}: {self._error_string(error).decode()}")


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_NBYTES),)


def loaded_library(maps: str) -> ctypes.CDLL:
    """The libcudart of a process with these /proc/PID/maps: another one would have another state.

    LinkError: there is none.
    """
    for line in maps.splitlines():
        path = "/" + line.partition("/")[2]
        if Path(path).name.startswith("libcudart.so"):
            return _library(path)
    raise LinkError("torch has loaded no libcudart")


def _library(name: str) -> ctypes.CDLL:
    """LinkError: it cannot be loaded."""
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise LinkError(str(error)) from None
