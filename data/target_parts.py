"""A frozen target whose layers lie in parts on the processes of one machine.

Each process keeps 1 / n of every decoder layer (torch's fully_shard, without gradients): a layer is
gathered before its pass and let go of behind it. What every rank reads by itself stays whole:
embeddings, final norm and head. Every process runs rows of its own, and a pass of one needs all of
them: they call it equally often, or within `Parts.uneven`.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from recipes.errors import UserError


class Parts:
    """The processes that share a target, and how many of them are still at work."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._uneven = False

    def begin_pass(self, layers: Iterable[Any]) -> None:
        """All ranks call this before a pass over the layers."""
        if self._uneven:
            self._someone_works(True)
        for layer in layers:  # fully_shard notes every pass for a backward that is never made
            group = layer._get_fsdp_state()._fsdp_param_group
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()

    @contextmanager
    def uneven(self, idle_pass: Callable[[], object]) -> Iterator[None]:
        """Within, ranks may run different numbers of passes: who is through runs along.

        No other collective may be called within, since ranks would meet in different ones.

        Args:
            idle_pass: a pass whose result nobody wants.
        """
        self._uneven = True
        try:
            yield
            while self._someone_works(False):
                self._uneven = False
                idle_pass()
                self._uneven = True
        finally:
            self._uneven = False

    def _someone_works(self, working: bool) -> bool:
        count = torch.tensor(int(working), device=self.mesh.device_type)
        distributed.all_reduce(count, group=self.mesh.get_group())
        return int(count) > 0


def join_processes(device: torch.device) -> tuple[int, int]:
    """Join the processes of a launcher, if there is one; returns (rank, how many).

    For scripts that train nothing. They wait for each other as long as it takes.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=timedelta(days=7))
    atexit.register(distributed.destroy_process_group)
    return distributed.get_rank(), world


def wait_for_all() -> None:
    """Return when every process has called it."""
    if distributed.is_initialized():
        distributed.barrier()


def join_parts(device: torch.device) -> Parts | None:
    """The processes of this machine; None where there is only one, which holds all.

    Raises:
        UserError: several were started, and have not joined (or not evenly over the machines).
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return None
    if not distributed.is_initialized() or distributed.get_world_size() != world:
        raise UserError(
            f"target.placement 'sharded': the launcher started {world} processes, and this script "
            "does not join them; start it without a launcher, or set target.placement=replicated"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % local:
        raise UserError(
            f"target.placement 'sharded': {world} processes, {local} of them here; start as many "
            "on every machine"
        )
    if local == 1:
        raise UserError(
            "target.placement 'sharded' divides the target among the processes of one machine, and "
            "each has one only; use replicated, or states of a server (docs/distributed.md)"
        )
    names = ("machine", "rank")
    return Parts(
        init_device_mesh(device.type, (world // local, local), mesh_dim_names=names)["rank"]
    )


def load_in_parts(
    path: str,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    parts: Parts,
    *,
    revision: str | None,
    trust_remote_code: bool,
) -> tuple[Any, dict[str, Any]]:
    """A causal language model of transformers with its layers divided. All ranks call it.

    One rank a machine reads the files, in main memory; tensor after tensor is dealt out from there,
    so no GPU ever holds more than its part and one tensor.

    Args:
        config: of the model, as transformers read it from `path`.

    Returns:
        As `from_pretrained` with `output_loading_info`; of the report the missing keys.

    Raises:
        ValueError: that rank could not read it (raised by every rank), or the weights are
            quantised.
    """
    if config.to_dict().get("quantization_config"):
        raise ValueError(
            "target.placement 'sharded' cannot divide quantised weights; use replicated, or the "
            "model as it was before quantisation"
        )
    source: Any = None
    told: list[Any] = [None, None, None]  # fault, missing keys, generation config
    if parts.mesh.get_local_rank() == 0:
        options = {"revision": revision, "trust_remote_code": trust_remote_code}
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, output_loading_info=True, **options
            )
            source, report = loaded
            told[1:] = [sorted(report["missing_keys"]), source.generation_config]
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            told[0] = str(error)
    distributed.broadcast_object_list(told, group=parts.mesh.get_group(), group_src=0)
    fault, missing, generation_config = told
    if fault is not None:
        raise ValueError(fault)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    model.generation_config = generation_config
    model.eval().requires_grad_(False)
    _divide(model, parts.mesh)
    model.to_empty(device=device)
    model.tie_weights()
    _fill(model, source, parts.mesh)
    return model, {"missing_keys": missing}


def _divide(model: Any, mesh: DeviceMesh) -> None:
    decoder = model.get_decoder()
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    whole = {p for p in model.parameters() if not isinstance(p, DTensor)}
    fully_shard(decoder, mesh=mesh, reshard_after_forward=True, ignored_params=whole)


@torch.no_grad()
def _fill(model: nn.Module, source: nn.Module | None, mesh: DeviceMesh) -> None:
    """Weights and buffers of the first rank's model, which the others do not have."""
    whole = {} if source is None else dict(_tensors(source))
    for name, tensor in _tensors(model):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
        if source is not None:
            values.copy_(whole[name])
        if isinstance(tensor, DTensor):
            local.copy_(distribute_tensor(values, mesh, tensor.placements).to_local())
        else:
            values = values.contiguous()
            distributed.broadcast(values, group=mesh.get_group(), group_src=0)
            local.copy_(values)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor, gathered where it lies in parts; then all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
