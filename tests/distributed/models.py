"""Small models and what they have to give, for the tests of the FSDP2 adapter."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from loco_fsdp import LoCoConfig, LoCoHandle, ResidualState, reference

Shapes = Mapping[str, tuple[int, ...]]

TINY = LoCoConfig(min_numel=0)
"""The defaults, but tiny units are compressed too."""


class Probe(nn.Module):
    """Parameters whose gradients are chosen: d loss / d parameter is what ``forward`` is given.

    Parameters that are not named there are unused. ``x`` goes through, so that probes can be
    chained: a 0-d tensor.
    """

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: Mapping[str, Tensor], x: Tensor | None = None) -> Tensor:
        total = torch.zeros(()) if x is None else x
        for name, g in gradients.items():
            total = total + (self.get_parameter(name) * g).sum()
        return total


class Chain(nn.Module):
    """Probes that run one after the other, each to be a unit of its own."""

    def __init__(self, probes: Mapping[str, Shapes]) -> None:
        super().__init__()
        self.names = tuple(probes)
        for name, shapes in probes.items():
            self.add_module(name, Probe(shapes))

    def forward(
        self, gradients: Mapping[str, Tensor], order: Sequence[str] | None = None
    ) -> Tensor:
        x = torch.zeros((), requires_grad=True)
        for name in order or self.names:
            own = {n.split(".")[1]: g for n, g in gradients.items() if n.startswith(f"{name}.")}
            x = self.get_submodule(name)(own, x)
        return x


class TwoLayers(nn.Module):
    """Split over the ranks of a tensor-parallel group: by columns, then by rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.relu(self.up(x))).square().sum()
        return result


def shard(module: nn.Module, **settings: Any) -> Any:
    """Call ``fully_shard``; what returns is the module, and an ``FSDPModule`` as well."""
    return fully_shard(module, **settings)


def shard_probes(model: Chain, **settings: Any) -> Any:
    """Make each probe a unit, and the rest the root's."""
    for name in model.names:
        fully_shard(model.get_submodule(name), **settings)
    return shard(model, **settings)


def gradient(name: str, shape: tuple[int, ...], rank: int, step: int) -> Tensor:
    """Contribution of one rank to the gradient of one parameter: Gaussian, float32."""
    seed = zlib.crc32(f"{name} {rank} {step}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(shapes: Shapes, step: int, rank: int | None = None) -> dict[str, Tensor]:
    """Contributions of one rank, default the calling one, to all gradients."""
    rank = dist.get_rank() if rank is None else rank
    return {name: gradient(name, shape, rank, step) for name, shape in shapes.items()}


def local_gradients(model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards of the reduced gradients."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor)
            found[name] = parameter.grad.to_local().clone()
    return found


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole reduced gradients, on every rank."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor)
            found[name] = parameter.grad.full_tensor()
    return found


def residuals(handle: LoCoHandle) -> dict[str, Tensor]:
    """This rank's residuals of all compressed parameters."""
    return {
        name: handle.residual(name)
        for unit in handle.units
        for name in unit.parameters
        if name not in unit.exempt
    }


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Equal names, types and bits."""
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )


def to_rows(full: Tensor, world_size: int) -> Tensor:
    """FSDP's buffer of one gradient, ``[W, N]``: row r is rank r's chunk of dim 0, padded."""
    chunk = -(-full.shape[0] // world_size)
    padded = torch.zeros(world_size * chunk, *full.shape[1:], dtype=full.dtype)
    padded[: full.shape[0]] = full
    return padded.reshape(world_size, -1)


def from_row(row: Tensor, shape: Sequence[int], rank: int, world_size: int) -> Tensor:
    """Rank's shard of a tensor of ``shape``, without FSDP's padding."""
    chunk = -(-shape[0] // world_size)
    own = max(0, min(chunk, shape[0] - rank * chunk))
    return row.view(chunk, *shape[1:])[:own]


class Definition:
    """All ranks' reductions of one parameter in one process, by the functions of ``reference``."""

    def __init__(self, world_size: int, config: LoCoConfig = TINY) -> None:
        self.config = config
        self.states = [ResidualState(config) for _ in range(world_size)]

    def reduce(self, fulls: Sequence[Tensor | None], factor: float | None = None) -> list[Tensor]:
        """One reduction.

        Args:
            fulls: each rank's gradient, in the parameter's shape and FSDP's reduce dtype; None
                for a rank that has none: it sends zeros and keeps its residual.
            factor: on the sum; default 1 / W.

        Returns:
            each rank's shard of the result, in the dtype of the gradients.

        """
        example = next(full for full in fulls if full is not None)
        decoded = []
        for full, state in zip(fulls, self.states, strict=True):
            x = to_rows(example if full is None else full, len(self.states))
            if full is None:
                decoded.append(torch.zeros(x.shape))
                continue
            e = torch.zeros(x.shape)
            if self.config.feedback != "none":
                state.allocate(x.shape[0], x.shape[1], x.device)
                e = state.dense()
            h = reference.compensate(x, e)
            payload = reference.compress(h, self.config)
            decoded.append(reference.decompress(payload, x.shape[1], self.config))
            if self.config.feedback != "none":
                state.load_dense(reference.update_residual(e, h, self.config))
        return _shards(decoded, factor, example.shape, example.dtype)

    def residual(self, rank: int, shape: Sequence[int]) -> Tensor:
        """One rank's residual in the parameter's full shape; zeros before its first gradient."""
        if self.states[rank].shape is None:
            return torch.zeros(tuple(shape))
        dense = self.states[rank].dense()
        return dense.view(-1, *shape[1:])[: shape[0]]


def uncompressed(fulls: Sequence[Tensor], factor: float | None = None) -> list[Tensor]:
    """Each rank's shard of the float32 sum in rank order, times 1 / W or ``factor``."""
    rows = [to_rows(full, len(fulls)).float() for full in fulls]
    return _shards(rows, factor, fulls[0].shape, fulls[0].dtype)


def _shards(
    rows: Sequence[Tensor], factor: float | None, shape: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    world_size = len(rows)
    stacked = torch.stack(list(rows))  # [sender, receiver, N]
    shares = [
        reference.reduce(stacked[:, r], 1 / world_size if factor is None else factor).to(dtype)
        for r in range(world_size)
    ]
    return [from_row(share, shape, r, world_size) for r, share in enumerate(shares)]


def fp16_divisors(divisor: float) -> tuple[float, float]:
    """What FSDP divides float16 gradients by before and after the reduction."""
    before = 1
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return before, divisor / before


def reduce_dtype(policy: MixedPrecisionPolicy) -> torch.dtype:
    """The type that gradients of float32 parameters are reduced in."""
    return policy.reduce_dtype or policy.param_dtype or torch.float32
