"""torch.compile: whole passes of decoding, with few shapes, and parts of training, with any."""

import time
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
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


def compiled(run: Callable[..., Any], mode: str, key: str, any_shape: bool = False) -> Any:
    """torch.compile(run), whose errors name the recipe's key.

    Args:
        mode: of torch.compile, or one of BACKENDS.
        any_shape: one kernel for all shapes in place of one for each.
    """
    torch._dynamo.config.recompile_limit = NUM_SHAPES
    how: Any = {"backend": mode} if mode in BACKENDS else {"mode": mode}
    inner: Any = torch.compile(run, dynamic=any_shape, **how)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except (InductorError, TorchDynamoException) as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"{key} is {mode!r}, but torch.compile does not work here ({first}); install a "
                f"compiler (g++ for CPUs, Triton for CUDA) or set {key}: null"
            ) from error

    return call


class Parted(nn.Module):
    """A module with methods that are a `part`.

    compile_as: (mode, key) of `compiled`; None = they run as they are.
    """

    compile_as: tuple[str, str] | None = None


M = TypeVar("M", bound=Parted)
P = ParamSpec("P")
T = TypeVar("T")


def part(run: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
    """A method of tensors alone, without gathers or masks, that its module may want compiled.

    It is where gradients are recorded: validation and decoding run it as it is. Modules of one
    class share what was compiled, and no name of a weight changes.
    """

    @wraps(run)
    def call(module: M, *args: P.args, **kwargs: P.kwargs) -> T:
        how = module.compile_as
        if how is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return run(module, *args, **kwargs)
        out: T = _compiled_part(run, *how)(module, *args, **kwargs)
        return out

    return call


def _any_shape(run: Callable[..., Any], mode: str, key: str) -> Any:
    # Gradients leave part by part already: DDP's cuts through a graph would bring nothing.
    torch._dynamo.config.optimize_ddp = False
    # Said by tracing itself, of inputs that are other parts' outputs.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    return compiled(run, mode, key, any_shape=True)


_compiled_part = cache(_any_shape)


def compile_forward(module: nn.Module, mode: str, key: str) -> None:
    """Make the forward pass of somebody else's module a part."""
    plain, fast = module.forward, _any_shape(module.forward, mode, key)

    def forward(*args: Any) -> Any:
        return fast(*args) if torch.is_grad_enabled() else plain(*args)

    module.forward = forward


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
