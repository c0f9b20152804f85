"""Every private or version-dependent name of torch that this library touches.

All were run on torch 2.13. What is said of other versions has not been run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

outside_modes = _disable_current_modes
"""Context for what is kept for later calls: under ``FakeTensorMode`` it would be without data."""


def reduce_factor(op: Any, world_size: int) -> float:
    """Return the factor on the sum that a reduce op asks for: AVG, SUM or PREMUL_SUM.

    ``ReduceOp.__getstate__`` is the only way to read a PREMUL_SUM's factor.
    ``op`` may be a ``ReduceOp`` or a ``RedOpType``, which do not compare in both directions.
    Raises ``ValueError`` on any other op.
    """
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if kind == dist.ReduceOp.SUM:
        return 1.0
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        if isinstance(factor, float):
            return factor
        raise ValueError("op=PREMUL_SUM with a tensor as factor: wanted a number as factor.")
    raise ValueError(f"op={op}: wanted AVG, SUM or PREMUL_SUM.")


def scaler_scale(scaler: torch.amp.GradScaler) -> Tensor | None:
    """Return the scaler's scale as a device tensor, None while it has none or is disabled.

    ``get_scale()`` would be a host sync. ``_scale`` is its only other place.
    """
    return scaler._scale if scaler.is_enabled() else None


def fsdp_state(module: FSDPModule) -> Any:
    """Return the FSDP2 state of a module: one for all modules sharded together."""
    return module._get_fsdp_state()


def state_modules(state: Any) -> tuple[nn.Module, ...]:
    """Return the modules that were given to one ``fully_shard`` call."""
    return cast(tuple[nn.Module, ...], state._modules)


def param_groups(state: Any) -> Sequence[Any]:
    """Return the FSDP parameter groups of a state: a list on 2.13, one or None on older ones."""
    if hasattr(state, "_fsdp_param_groups"):
        return cast(Sequence[Any], state._fsdp_param_groups)
    return () if state._fsdp_param_group is None else (state._fsdp_param_group,)


def shard_group(group: Any) -> dist.ProcessGroup | None:
    """Return the process group that a parameter group reduce-scatters over.

    None if it does not shard, as with ``replicate``.
    """
    if not hasattr(group.mesh_info, "shard_mesh_size"):
        return None
    return cast(dist.ProcessGroup, group._reduce_scatter_process_group)


def data_parallel_groups(group: Any) -> list[dist.ProcessGroup]:
    """Return the shard group of a parameter group and, with HSDP, its replicate group."""
    shard = cast(dist.ProcessGroup, group._reduce_scatter_process_group)
    replicas = replica_group(group)
    return [shard] if replicas is None else [shard, replicas]


def replica_group(group: Any) -> dist.ProcessGroup | None:
    """Return HSDP's group of replicas, None without HSDP."""
    return group._all_reduce_process_group if group._is_hsdp else None


def data_parallel_dims(group: Any) -> int:
    """Return how many dimensions of its parameters' mesh, the first ones, are data-parallel."""
    return cast(int, group.mesh_info.mesh.ndim)


def divisor_before_reduction(group: Any) -> float:
    """Return what FSDP divides gradients by before the reduce-scatter: not 1 in float16 only."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    before, *_ = _get_gradient_divide_factors(
        shard_group(group),
        replica_group(group),
        reduce_dtype(group),
        group.device.type,
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
    )
    return 1.0 if before is None else float(before)


def owner(param: Any) -> tuple[nn.Module, str]:
    """Return the module and the attribute that hold an FSDP parameter."""
    return param._module_info.module, param._module_info.param_name


def shard_dim(param: Any) -> int:
    """Return the dimension that an FSDP parameter is sharded on."""
    return cast(int, param.fsdp_placement.dim)


def sharded_parameter(param: Any) -> DTensor:
    """Return the parameter that the optimizer updates."""
    return cast(DTensor, param.sharded_param)


def unsharded_shape(param: Any) -> torch.Size:
    """Return the shape of an FSDP parameter before FSDP sharded it."""
    return cast(torch.Size, param._orig_size)


def padded_shard_shape(param: Any) -> torch.Size:
    """Return the shape that each rank's shard is padded to."""
    return cast(torch.Size, param.padded_sharded_param_size)


def unsharded_parameter(param: Any) -> nn.Parameter | None:
    """Return the parameter that forward uses, None before the first all-gather."""
    return getattr(param, "_unsharded_param", None)


def holds_gradient(param: Any) -> bool:
    """Tell whether an FSDP parameter has a gradient that is not reduced yet."""
    unsharded = unsharded_parameter(param)
    fresh = unsharded is not None and unsharded.grad is not None
    return fresh or param.unsharded_accumulated_grad is not None


def reduces_unused(group: Any) -> bool:
    """Tell whether unused parameters are in the buffer as zeros (2.13 on; False before)."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def reduce_scatter_comm(group: Any) -> Any:
    """Return the object that does a parameter group's reduce-scatter."""
    return group._reduce_scatter_comm


def set_reduce_scatter_comm(group: Any, comm: Any) -> None:
    """Set that object, as ``FSDPModule.set_custom_reduce_scatter`` does."""
    group._reduce_scatter_comm = comm


def reduce_dtype(group: Any) -> torch.dtype:
    """Return the type that a parameter group reduces gradients in."""
    policy = group.mp_policy
    fallback = group.fsdp_params[0].sharded_param.dtype
    return cast(torch.dtype, policy.reduce_dtype or policy.param_dtype or fallback)


def compute_device(group: Any) -> torch.device:
    """Return the device that a parameter group computes and reduces on."""
    return cast(torch.device, group.device)


def is_default_reduce_scatter(comm: Any) -> bool:
    """Tell whether a reduce-scatter object is one that FSDP itself has set."""
    return type(comm).__module__.startswith("torch.distributed.fsdp")


def after_unshard(group: Any, callback: Callable[[], None]) -> Callable[[], None]:
    """Run ``callback`` whenever a group's unsharded parameters have been made ready.

    Returns a function that undoes it. There is no public place for it: module hooks miss methods
    given to ``register_fsdp_forward_method``. ``wait_for_unshard`` is called before every forward
    and backward of a group, outside of compiled code (2.13).
    """
    wait = group.wait_for_unshard

    def wait_and_tell() -> None:
        wait()
        callback()

    def undo() -> None:
        del group.wait_for_unshard  # the class's own shows again

    group.wait_for_unshard = wait_and_tell
    return undo


def reset_iteration(model: nn.Module) -> None:
    """Make the FSDP roots below ``model`` forget a failed backward (2.13 on; nothing before)."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and getattr(fsdp_state(module), "_is_root", False):
            reset = getattr(module, "reset_iter_state", None)
            if reset is not None:
                reset()
