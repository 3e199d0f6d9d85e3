"""A GPU whose memory is the host's: tests that will run on a GPU show on a CPU where they would mix devices.

`GPU` is the CPU by another name. While a `PretendGpu` is active, tensors made there are marked, and so is what is
computed from them. What torch refuses on a real GPU is refused here: an op of tensors on both sides, a generator of
the other side, numpy's view of a tensor on the device, and pinning there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map_only

GPU = torch.device("cpu", 0)
HOST = torch.device("cpu")
_TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class PretendGenerator(torch.Generator):
    """Stands for `torch.Generator`, which no mode sees."""

    def __new__(cls, device: torch.device | str = "cpu") -> PretendGenerator:
        generator: PretendGenerator = super().__new__(cls, device)
        generator.is_on_pretended_gpu = torch.device(device) == GPU
        return generator

    is_on_pretended_gpu: bool


class PretendGpu(TorchFunctionMode):
    """Within it, new tensors are on `default` unless they are asked for elsewhere."""

    def __init__(self, default: torch.device = GPU) -> None:
        super().__init__()
        self._default = default

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_gpu = any(map(is_on_gpu, given))
        if func == _DEVICE_OF:
            return GPU if on_gpu else HOST
        if func in _TO_NUMPY and on_gpu:
            raise TypeError("can't convert a tensor of the pretended GPU to numpy")
        asked = kwargs.get("device")
        if func in _device_constructors():
            on_gpu = torch.device(self._default if asked is None else asked) == GPU
            if on_gpu and kwargs.get("pin_memory"):
                raise RuntimeError("Only dense CPU tensors can be pinned")
            generator = kwargs.get("generator")
            if generator is not None and is_on_gpu(generator) != on_gpu:
                raise RuntimeError(f"{func.__name__}: the generator is on the other device")
        elif func in (torch.Tensor.to, torch.Tensor.cpu):
            target = HOST if func is torch.Tensor.cpu else _target(args[0], (*args[1:], *kwargs.values()))
            on_gpu = target == GPU
            # torch copies from the CPU to GPU, which it takes for another device.
            args, kwargs = tree_map_only(torch.device, lambda device: HOST, (args, kwargs))
        elif func is torch.Tensor.copy_:
            on_gpu = is_on_gpu(args[0])
        else:
            _require_one_side(func, args, given)
            on_gpu = on_gpu if asked is None else torch.device(asked) == GPU
        result = func(*args, **kwargs)
        if given and result is given[0]:
            if on_gpu == is_on_gpu(result):
                return result
            result = result.clone()  # a move to the other side
        return tree_map_only(torch.Tensor, partial(_on_side, on_gpu=on_gpu), result)


def is_on_gpu(made: torch.Tensor | torch.Generator) -> bool:
    """Whether a tensor or a generator was made on the pretended GPU."""
    return getattr(made, "is_on_pretended_gpu", False)


def _on_side(tensor: torch.Tensor, *, on_gpu: bool) -> torch.Tensor:
    tensor.is_on_pretended_gpu = on_gpu  # type: ignore[attr-defined]
    return tensor


def _target(tensor: torch.Tensor, words: Iterable[object]) -> torch.device:
    """Where `Tensor.to` brings a tensor: to a device, to that of another tensor, or nowhere."""
    for word in words:
        if isinstance(word, torch.Tensor):
            return GPU if is_on_gpu(word) else HOST
        if isinstance(word, str | torch.device):
            return torch.device(word)
    return GPU if is_on_gpu(tensor) else HOST


def _require_one_side(func: Any, args: tuple[Any, ...], given: Sequence[torch.Tensor]) -> None:
    """Raise RuntimeError where tensors of both sides meet. A number of the host may, and so may indices."""
    if func in _INDEXED and is_on_gpu(args[0]):
        by_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args[1]))
        given = [args[0], *(args[2:] if by_tensors and isinstance(args[-1], torch.Tensor) else ())]
    on_host = [tensor for tensor in given if not is_on_gpu(tensor) and tensor.dim()]
    if on_host and any(map(is_on_gpu, given)):
        raise RuntimeError(f"{func.__name__}: tensors on the host and on the pretended GPU")
