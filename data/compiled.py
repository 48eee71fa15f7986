"""torch.compile for passes that are run again and again with few shapes."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from data.cache import KVCache
from recipes.errors import UserError

BACKENDS = ("aot_eager",)  # of torch.compile; they trace and need no compiler
NUM_SHAPES = 64  # of one pass; beyond, torch runs it as it is
NUM_WARM = 3  # runs of a new shape off the clock: compile, record a CUDA graph, replay it


class Compiling:
    """Seconds spent on first runs of new shapes: clocks of decoding leave them out."""

    seconds = 0.0


def compiled(run: Callable[..., Any], mode: str, key: str) -> Any:
    """torch.compile(run) for each shape, whose errors name the recipe's key.

    Args:
        mode: of torch.compile, or one of BACKENDS.
    """
    torch._dynamo.config.recompile_limit = NUM_SHAPES
    how: Any = {"backend": mode} if mode in BACKENDS else {"mode": mode}
    inner: Any = torch.compile(run, dynamic=False, **how)

    def call(*args: Any) -> Any:
        try:
            return inner(*args)
        except (InductorError, TorchDynamoException) as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"{key} is {mode!r}, but torch.compile does not work here ({first}); install a "
                f"compiler (g++ for CPUs, Triton for CUDA) or set {key}: null"
            ) from error

    return call


class CompiledPass:
    """A pass of new tokens over a cache of fixed width (KVCache.fixed), compiled for each shape.

    The pass may change nothing but the places of the cache behind its lengths, since a new shape is
    run several times. What it returns is a tensor or a tuple of them.
    """

    def __init__(self, run: Callable[..., Any], mode: str, key: str) -> None:
        self._call = compiled(run, mode, key)

    def __call__(self, cache: KVCache, ids: Tensor, *rest: Any) -> Any:
        """run(cache, ids, *rest), behind cache.begin."""
        shape = (id(self), *ids.shape, cache.batch_size)
        if shape not in cache.warmed:
            start = time.perf_counter()
            for _ in range(NUM_WARM):
                self._once(cache, ids, *rest)
            if ids.is_cuda:
                torch.cuda.synchronize()
            cache.warmed.add(shape)
            Compiling.seconds += time.perf_counter() - start
        return self._once(cache, ids, *rest)

    def _once(self, cache: KVCache, *rest: Any) -> Any:
        cache.masks.clear()
        torch.compiler.cudagraph_mark_step_begin()
        out = self._call(cache, *rest)
        # A CUDA graph writes its results to the same memory each time.
        return out.clone() if isinstance(out, Tensor) else tuple(part.clone() for part in out)
