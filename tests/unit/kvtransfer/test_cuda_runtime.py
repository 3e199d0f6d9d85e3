"""The real `CudaRuntime` over a libcudart that is made of Python functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shared.errors import LinkError
from shared.kvtransfer.transports.cuda_runtime import CudaRuntime

NOT_SUPPORTED = 801


class Library:
    """A libcudart whose calls all fail. The last error stays until it is asked for, as in CUDA."""

    def __init__(self) -> None:
        self.last_error = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        def fail(*arguments: object) -> int:
            self.last_error = NOT_SUPPORTED
            return NOT_SUPPORTED

        def get_last_error() -> int:
            error, self.last_error = self.last_error, 0
            return error

        def get_error_string(error: int) -> bytes:
            return b"operation not supported"

        return {"cudaGetLastError": get_last_error, "cudaGetErrorString": get_error_string}.get(name, fail)


@pytest.mark.parametrize(
    "call",
    [
        lambda runtime: runtime.malloc(1 << 20),
        lambda runtime: runtime.open(bytes(64)),
        lambda runtime: runtime.register(torch.zeros(8), read_only=True),
    ],
    ids=["malloc", "open", "register"],
)
def test_a_call_that_fails_leaves_no_error_for_torch(call: Callable[[CudaRuntime], object]) -> None:
    library = Library()
    with pytest.raises(LinkError, match="operation not supported"):
        call(CudaRuntime(torch.device("cuda", 0), library))
    assert library.last_error == 0
