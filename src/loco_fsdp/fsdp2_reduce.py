"""What FSDP2 calls in place of its reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loco_fsdp import _torch
from loco_fsdp.checkpoint import ShardedParameter
from loco_fsdp.handle import LoCoHandle
from loco_fsdp.unit import Unit


class LoCoReduceScatter:
    """What FSDP calls in place of its reduce-scatter: the duck type of ``ReduceScatter``.

    FSDP's buffer holds just the parameters that got a gradient and does not say which. So every
    unsharded parameter gets a hook that notes its name when autograd adds to its gradient.
    """

    def __init__(self, unit: Unit, param_group: Any, params: dict[str, Any]) -> None:
        self.unit = unit
        self.handle: LoCoHandle  # set by `attach`: the handle holds the unit, the unit is here
        self.param_group = param_group
        self._params = params
        self._arrived: set[str] = set()
        self._watched: dict[str, tuple[nn.Parameter, Any]] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate as FSDP's default does; called for the input and for the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce; complete in stream order at return."""
        arrived = set(self._arrived)
        self._arrived.clear()
        trainable = {n for n, p in self._params.items() if p.sharded_param.requires_grad}
        in_buffer = self._names_in_buffer(trainable, arrived, input_tensor.numel() // group.size())
        self.unit.reduce(
            output_tensor,
            input_tensor,
            op,
            trainable=trainable | in_buffer,
            in_buffer=in_buffer,
            with_gradient=in_buffer - (self._watched.keys() - arrived),
            compressed=self.handle.compressing,
            loss_scale=self.handle.loss_scale(),
        )
        self.watch()

    def watch(self) -> None:
        """Hook the unsharded parameters that exist by now; runs after each all-gather."""
        # FSDP drops gradients without a reduction if it raises itself.
        gone = [n for n in self._arrived if not _torch.holds_gradient(self._params[n])]
        self._arrived.difference_update(gone)
        for name, param in self._params.items():
            unsharded = _torch.unsharded_parameter(param)
            if unsharded is None or not unsharded.requires_grad:
                continue
            known = self._watched.get(name)
            if known is not None and known[0] is unsharded:
                continue
            note = partial(_note, self._arrived, name)
            self._watched[name] = (unsharded, unsharded.register_post_accumulate_grad_hook(note))

    def unwatch(self) -> None:
        """Remove the hooks from the unsharded parameters."""
        for _, hook in self._watched.values():
            hook.remove()
        self._watched.clear()

    def forget_arrived(self) -> None:
        """Forget the gradients of a backward that failed."""
        self._arrived.clear()

    def compressible_parameters(self) -> list[ShardedParameter]:
        """The parameters that may have a residual, as they are sharded now."""
        return [
            ShardedParameter(
                unit=self.unit,
                name=name,
                tensor=_torch.sharded_parameter(self._params[name]),
                divisor=_torch.divisor_before_reduction(self.param_group),
                replicas=_torch.replica_group(self.param_group),
                data_dims=_torch.data_parallel_dims(self.param_group),
            )
            for name in self.unit.compressible
        ]

    def agreement(self) -> str:
        """What has to be equal on all ranks, in words."""
        frozen = [n for n, p in self._params.items() if not p.sharded_param.requires_grad]
        return self.unit.agreement() + (f", frozen: {', '.join(frozen)}" if frozen else "")

    def _names_in_buffer(self, trainable: set[str], arrived: set[str], row_numel: int) -> set[str]:
        if _torch.reduces_unused(self.param_group):
            return trainable | arrived  # accumulated gradients of since frozen ones too
        if sum(self.unit.parameters[name].row_numel for name in arrived) == row_numel:
            return arrived
        raise RuntimeError(
            f"FSDP unit '{self.unit.name}': the gradient buffer has {row_numel} elements for each "
            f"rank, which does not fit the parameters whose gradients arrived in this backward: "
            f"{sorted(arrived)}."
        )


def _note(arrived: set[str], name: str, _: Tensor) -> None:
    # Autograd keeps the hook where Python's garbage collector does not look, so it must not hold
    # on to anything that holds the parameter: such a model would stay in memory for ever.
    arrived.add(name)
