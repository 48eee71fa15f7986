"""A pass of a model on shapes alone, and the bytes that it would keep (train.step_memory).

Operations run without memory for their numbers, while every storage that one makes is counted for
as long as it lives.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten: Any = torch.ops.aten
DEVICE: Any = torch.ops.prim.device.default  # asked of a FakeTensor by way of the modes
CPU = torch.device("cpu")

Made = tuple[type, list[int | tuple[Any, ...] | None]]
"""What an operation returned: one tensor, a tuple or a list. Of each tensor: None; the number of
the argument that it is; or argument whose storage it shares (None: its own), size, stride, offset,
dtype."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make under it: now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count what it returns, if it was not there before."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is not DEVICE:
            for tensor in tensors_in(out):
                self._note(tensor, args, kwargs)
        return out

    def _note(self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a tensor's storage until it dies, if no argument of the operation held it."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        if any(x.untyped_storage()._cdata == key for x in tensors_in((args, kwargs))):
            return

        def forget(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


class Shapes(TorchDispatchMode):
    """Operations run on shapes: numbers have no memory, integers are real.

    So which slots are supervised, and in which order, is worked out as in a real step, while no
    weight and no activation exists. What an operation makes of its arguments' shapes is worked out
    once (`remember` = False: every time).
    """

    def __init__(self, remember: bool = True) -> None:
        super().__init__()
        self.fake, self._remember = FakeTensorMode(), remember
        self._made: dict[Any, Made] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation for real where only integers come in, or where it makes some."""
        kwargs = kwargs or {}
        if func is DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        leaves = tensors_in((args, kwargs))
        if not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            if not leaves:
                with self.fake:
                    out = func(*args, **kwargs)
                if isinstance(out, Tensor) and out.is_floating_point():
                    return out
            return func(*args, **kwargs)
        args = _places(func, args)
        key = _key(func, args, kwargs) if self._remember else None
        if key in self._made:
            return self._again(self._made[key], tensors_in((args, kwargs)))
        fakes, fake_kwargs = tree_map(self._as_shape, (args, kwargs))
        with self.fake:
            out = func(*fakes, **fake_kwargs)
        made = _made(out, tensors_in((args, kwargs))) if key is not None else None
        if made is not None:
            self._made[key] = made
        return out

    def _as_shape(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
            return self.fake.from_tensor(leaf.detach())
        return leaf

    def _again(self, made: Made, given: list[Tensor]) -> Any:
        """What the operation made, of these arguments."""
        kind, parts = made
        outs: list[Any] = []
        for part in parts:
            if not isinstance(part, tuple):
                outs.append(None if part is None else given[part])
                continue
            source, size, stride, offset, dtype = part
            plain = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            if source is not None:
                offset += given[source].storage_offset()
                plain.set_(given[source].untyped_storage(), offset, size, stride)
            outs.append(FakeTensor(self.fake, plain, CPU))
        return outs[0] if kind is Tensor else kind(outs)


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in arguments or results of an operation."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for leaf in tree for tensor in tensors_in(leaf)]


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All that the shape of the result depends on."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            real = not isinstance(leaf, FakeTensor)
            offset = leaf.storage_offset() if func is aten.as_strided.default else 0
            return (real, leaf.shape, leaf.stride(), offset, leaf.dtype)
        if isinstance(leaf, tuple | list):
            return tuple(of(x) for x in leaf)
        return (type(leaf), leaf)

    return (func, of(args), tuple((name, of(leaf)) for name, leaf in kwargs.items()))


def _made(out: Any, given: list[Tensor]) -> Made | None:
    """How to make the result again; None if that is not simple."""
    storages = [x.untyped_storage()._cdata if isinstance(x, FakeTensor) else None for x in given]
    parts: list[Any] = []
    if not isinstance(out, Tensor | tuple | list):
        return None
    for tensor in (out,) if isinstance(out, Tensor) else out:
        if tensor is None:
            parts.append(None)
            continue
        if not isinstance(tensor, FakeTensor):
            return None
        same = [i for i, x in enumerate(given) if x is tensor]
        if same:
            parts.append(same[0])
            continue
        storage, size, stride = tensor.untyped_storage(), tensor.size(), tensor.stride()
        source = storages.index(storage._cdata) if storage._cdata in storages else None
        plain = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
        if source is None and plain.untyped_storage().nbytes() != storage.nbytes():
            return None
        offset = tensor.storage_offset()
        if source is not None:
            offset -= given[source].storage_offset()
        parts.append((source, size, stride, offset, tensor.dtype))
    return (Tensor if isinstance(out, Tensor) else type(out), parts)


def _places(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with real masks that index turned into places: how many is known."""
    if func not in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return args
    indices: list[Any] = []
    for index in args[1]:
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            indices += index.nonzero(as_tuple=True)
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])
