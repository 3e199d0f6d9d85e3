"""Makes torch record what it is asked to compute on DEVICE: real operations on CPU memory, run by a FakeGpu.

Code under test sees tensors whose device is `meta`, and calls torch as ever. Shapes are known at once, values when
the stream has run. What waits on CUDA waits here: `item`, and copies that are not `non_blocking`. Host memory counts
as pinned, so a copy reads and writes it when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sim.streams.device import Block, FakeGpu, Memory

DEVICE = torch.device("meta")
_aten = torch.ops.aten


class DeviceTensor(torch.Tensor):
    """A view of one block of a FakeGpu. `backing` is the CPU memory behind it."""

    backing: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, backing: torch.Tensor, block: Block) -> DeviceTensor:
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            backing.shape,
            strides=backing.stride(),
            storage_offset=backing.storage_offset(),
            dtype=backing.dtype,
            device=DEVICE,
        )
        tensor.backing, tensor.block = backing, block
        return tensor

    def __init__(self, backing: torch.Tensor, block: Block) -> None: ...

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the device, outside of FakeTorch")


class FakeTorch(TorchDispatchMode):
    """Sends operations on DEVICE to `gpu`; those of the host run at once."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu
        self._results: dict[Any, Any] = {}
        """The meta tensors that an operation returns, by the shapes of its arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is _aten.pin_memory.default:
            return args[0].clone()
        kwargs.pop("pin_memory", None)
        to_device = kwargs.get("device") == DEVICE
        if not to_device and not _has_device_tensor(args):
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        if func in (_aten.item.default, _aten._local_scalar_dense.default):
            self._synchronize()
            return args[0].backing.item()
        if func is _aten._to_copy.default and "device" in kwargs and args[0].device != kwargs["device"]:
            return self._copied_to(args[0], kwargs)
        if func is _aten.copy_.default and not all(isinstance(arg, DeviceTensor) for arg in args[:2]):
            return self._copy(*args, **kwargs)
        if to_device and not _has_device_tensor(args):
            return self._made(func, args, kwargs)
        kwargs.pop("device", None)
        if func.is_view:
            view = func(*_map(_backing, args), **kwargs)
            return _map(lambda of: DeviceTensor(of, args[0].block), view)
        if func._schema.is_mutable:
            self._launch(func, args, kwargs)
            return args[0]
        return self._computed(func, args, kwargs)

    def _allocate(self, backing: torch.Tensor) -> DeviceTensor:
        return DeviceTensor(backing, self._gpu.allocate(backing))

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = (func, _signature(args), _signature(kwargs))
        if key not in self._results:
            metas = _map(_meta, (args, kwargs))
            self._results[key] = func(*metas[0], **metas[1])
        outs = _map(
            lambda meta: self._allocate(torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)),
            self._results[key],
        )
        self._launch(func, args, kwargs, outs)
        return outs

    def _launch(self, func: Any, args: Any, kwargs: Any, outs: Any = ()) -> None:
        args_on_cpu, kwargs_on_cpu = _map(_backing, (args, kwargs))
        targets = [out.backing for out in _leaves(outs)]

        def run() -> None:
            results = _leaves(func(*args_on_cpu, **kwargs_on_cpu))
            for target, result in zip(targets, results, strict=False):
                target.copy_(result)

        self.launch(func.__name__, run, args, kwargs, outs)

    def launch(self, name: str, run: Callable[[], None], *tensors: Any) -> None:
        """Queue `run`, which uses the memory of `tensors`."""
        uses: dict[int, Memory] = {}
        for leaf in _leaves(tensors):
            if isinstance(leaf, DeviceTensor):
                uses[id(leaf.block)] = leaf.block.memory
            elif isinstance(leaf, torch.Tensor):
                assert not leaf.dim(), f"{name} mixes tensors of the host and of the device"
        self._gpu.launch(name, run, tuple(uses.values()))

    def _made(self, func: Any, args: Any, kwargs: Any) -> DeviceTensor:
        value = func(*args, **{**kwargs, "device": "cpu"})
        tensor = self._allocate(torch.empty_like(value))
        if func not in (_aten.empty.memory_format, _aten.empty_strided.default):
            self.launch(func.__name__, lambda backing=tensor.backing: backing.copy_(value), tensor)  # type: ignore[misc]
        return tensor

    def _copied_to(self, source: torch.Tensor, kwargs: Any) -> torch.Tensor:
        backing = torch.empty_like(_backing(source), dtype=kwargs.get("dtype") or source.dtype)
        target = self._allocate(backing) if kwargs["device"] == DEVICE else backing
        return self._copy(target, source, kwargs.get("non_blocking", False))

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        into, of = _backing(target), _backing(source)
        on_device = [tensor for tensor in (target, source) if isinstance(tensor, DeviceTensor)]
        self.launch("copy", lambda: into.copy_(of), *on_device)
        if not non_blocking:
            self._synchronize()
        return target

    def _synchronize(self) -> None:
        with self:  # other threads of the host go on meanwhile
            self._gpu.current().synchronize()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with each leaf changed. It is faster than torch's pytree, and most of what a simulation does."""
    if isinstance(value, list | tuple):
        return type(value)([_map(change, item) for item in value])
    if isinstance(value, dict):
        return {name: _map(change, item) for name, item in value.items()}
    return change(value)


def _has_device_tensor(args: Any) -> bool:
    return any(isinstance(leaf, DeviceTensor) for leaf in _leaves(args))


def _backing(leaf: Any) -> Any:
    return leaf.backing if isinstance(leaf, DeviceTensor) else leaf


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _signature(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return value.shape, value.stride(), value.dtype
        case list() | tuple():
            return tuple(map(_signature, value))
        case dict():
            return tuple((name, _signature(of)) for name, of in value.items())
    return type(value), value
