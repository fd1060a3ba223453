"""A second device for tests on machines without a GPU.

Tensors on it hold their numbers in ordinary memory, but torch sees another device: mixing them with CPU tensors,
handing them to NumPy or drawing random numbers for them with a CPU generator fails as it does on a GPU. The results are
those of the CPU, up to the order of sums.

    with second_device() as device:
        agent.to(device)(torch.zeros(3, device=device))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
"""A device type that torch always has. Its usual tensors have no numbers; those of this module do."""

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default, aten.copy.default, aten._copy_from.default, aten.to.dtype_layout,
          aten.to.device}  # fmt: skip
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
"""The indices of a tensor on the device can be on the CPU."""
STRICT = {aten.cat.default, aten.stack.default}
"""Elsewhere, a CPU tensor without dimensions counts as a number."""


class DeviceError(RuntimeError):
    """CPU and device were mixed."""


class DeviceTensor(torch.Tensor):
    """A tensor on the second device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip
        tensor.inner = inner
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({self.inner})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        copy = DeviceTensor(self.inner.detach().clone())
        copy = torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A file has the numbers. torch.load decides where they go.
        return self.inner.detach().clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the numbers, after a check of the devices."""
    tensors = tensors_in((*args, *kwargs.values()))
    on_device = [each for each in tensors if isinstance(each, DeviceTensor)]
    wanted = kwargs.get("device")
    if any(each.is_meta for each in tensors if not isinstance(each, DeviceTensor)):
        raise DeviceError(f"{func}: a tensor on the device was created in a way that the stand-in does not know")
    check_devices(func, args, tensors, on_device)
    if wanted is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    out = func(*mapped(unwrap, args), **{key: mapped(unwrap, value) for key, value in kwargs.items()})
    if func is aten._to_copy.default and out is unwrap(args[0]):
        out = out.clone()
    goes_there = torch.device(wanted).type == DEVICE.type if wanted is not None else bool(on_device)
    if func in COPIES and wanted is None:
        goes_there = isinstance(args[0], DeviceTensor)
    if func._schema.returns and func._schema.returns[0].alias_info is not None:
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                return given  # an operator that changes its argument returns it
    return mapped(wrap, out) if goes_there else out


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Change the tensors in lists and tuples. torch's own function for this takes ten times as long."""
    return type(value)([mapped(change, each) for each in value]) if isinstance(value, list | tuple) else change(value)


def check_devices(func: Any, args: Any, tensors: list[Any], on_device: list[Any]) -> None:
    if not on_device or func in COPIES or len(on_device) == len(tensors):
        return
    if func in INDEXED and isinstance(args[0], DeviceTensor):
        tensors = [args[0], *args[2:3]]
    others = [each for each in tensors if not isinstance(each, DeviceTensor)]
    if any(each.dim() > 0 or func in STRICT for each in others):
        raise DeviceError(f"{func}: expected all tensors to be on the same device, found CPU and device")


def wrap(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, torch.Tensor) else value


def unwrap(value: Any) -> Any:
    return value.inner if isinstance(value, DeviceTensor) else value


class Operators(TorchDispatchMode):
    """Also sees operators without a tensor on the device: those that create one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Generator(torch.Generator):
    """A random number generator that knows its device."""

    label = torch.device("cpu")

    def __new__(cls, device: Any = "cpu") -> Generator:
        generator = super().__new__(cls)
        generator.label = torch.device(device)
        return generator

    @property
    def device(self) -> torch.device:
        return self.label


class Generators(TorchFunctionMode):
    """A generator must be on the device of the tensor that it fills."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None:
            place = kwargs.get("device")
            first = args[0] if args and isinstance(args[0], torch.Tensor) else None
            if place is None:
                place = "cpu" if first is None else first.device
            if torch.device(place).type != generator.device.type:
                raise DeviceError(f"expected a generator on {place}, found one on {generator.device}")
        if func == torch.Tensor.data.__set__ and isinstance(args[0], DeviceTensor):
            args[0].inner = unwrap(args[1])
            return None
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], DeviceTensor):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            indices = tuple(torch.tensor(each) if isinstance(each, list) else each for each in places)
            return func(args[0], indices, *args[2:])
        if func is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def moved(value: Any, device: torch.device) -> Any:
    """Nested data with all tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return type(value)((key, moved(each, device)) for key, each in value.items())
    return [moved(each, device) for each in value] if isinstance(value, list) else value


@contextmanager
def second_device() -> Iterator[torch.device]:
    """The device, while the block runs."""
    plain_load = torch.load

    def load(*args: Any, map_location: Any = None, **options: Any) -> Any:
        content = plain_load(*args, map_location="cpu", **options)
        device = torch.device(map_location or "cpu")
        return moved(content, device) if device.type == DEVICE.type else content

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", load)
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch, "inference_mode", torch.no_grad)  # inference mode cannot wrap tensors
        fused = sys.modules["torch.optim.optimizer"]  # torch.optim hides its modules
        patch.setattr(fused, "_get_fused_kernels_supported_devices", lambda: ["cpu", DEVICE.type])
        with Operators(), Generators():
            yield DEVICE
