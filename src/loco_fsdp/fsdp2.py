"""The adapter for FSDP2 (``torch.distributed.fsdp.fully_shard``)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from loco_fsdp import _torch
from loco_fsdp.checkpoint import ShardedParameter
from loco_fsdp.config import LoCoConfig
from loco_fsdp.fsdp2_reduce import LoCoReduceScatter
from loco_fsdp.handle import LoCoHandle, SkippedUnit
from loco_fsdp.layout import UnitParameter
from loco_fsdp.unit import Unit

logger = logging.getLogger(__name__)

# Wrappers put these into module names; state dicts leave them out, and so do residual keys.
_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")


def attach(model: nn.Module, config: LoCoConfig | None = None) -> LoCoHandle:
    """Compress the gradient reduce-scatters of all FSDP2 units in ``model``.

    Collective: every rank of the units' shard groups has to call it. Settings and parameters are
    compared across the ranks once. Attaching again replaces the earlier handle.

    Args:
        model: a module with ``fully_shard``-ed modules in it.
        config: settings, equal on all ranks.

    Returns:
        the handle; ``handle.detach()`` undoes everything.

    Raises:
        ValueError: no FSDP2 unit in ``model``, or ranks that disagree (raised on all of them),
            or a model that shares units with one attached before.

    """
    config = config or LoCoConfig()
    states = list(fsdp_states(model))
    if not states:
        raise ValueError(_no_units(model))
    comms, skipped = _plan(model, states, config)
    _compare_ranks(config, comms)
    _detach_earlier(comms)
    handle = LoCoHandle(
        config, [comm.unit for comm in comms], skipped, FSDP2Installation(model, comms)
    )
    for comm in comms:
        comm.handle = handle
    for message in _worth_knowing(handle):
        logger.warning(message)
    logger.info("LoCo attached:\n%s", handle.describe())
    return handle


class FSDP2Installation:
    """LoCo's reduce-scatters in their FSDP units; see ``handle.Installation``."""

    def __init__(self, model: nn.Module, comms: Sequence[LoCoReduceScatter]) -> None:
        self._model = model
        self._before = [(comm, _torch.reduce_scatter_comm(comm.param_group)) for comm in comms]
        for comm, previous in self._before:
            if not _torch.is_default_reduce_scatter(previous):
                logger.warning(
                    "FSDP unit '%s': LoCo takes the place of its custom reduce-scatter %s.",
                    comm.unit.name,
                    type(previous).__name__,
                )
            _torch.set_reduce_scatter_comm(comm.param_group, comm)
        self._unshard_hooks = [_torch.after_unshard(c.param_group, c.watch) for c in comms]
        for comm in comms:
            comm.watch()  # inside the root's forward its parameters are there already

    def undo(self) -> None:
        """Give FSDP what it had before."""
        for remove in self._unshard_hooks:
            remove()
        for comm, previous in self._before:
            comm.unwatch()
            if _torch.reduce_scatter_comm(comm.param_group) is comm:
                _torch.set_reduce_scatter_comm(comm.param_group, previous)

    def replaced(self) -> list[str]:
        """Names of the units whose reduce-scatter is not LoCo's any more."""
        comms = [comm for comm, _ in self._before]
        return [c.unit.name for c in comms if _torch.reduce_scatter_comm(c.param_group) is not c]

    def compressible_parameters(self) -> list[ShardedParameter]:
        """The parameters that may have a residual, as they are sharded now."""
        return [found for comm, _ in self._before for found in comm.compressible_parameters()]

    def recover(self) -> None:
        """Reset FSDP's state of a backward that failed."""
        for comm, _ in self._before:
            comm.forget_arrived()
        _torch.reset_iteration(self._model)


def _worth_knowing(handle: LoCoHandle) -> list[str]:
    """Sentences about wishes that were not followed as the user may have thought."""
    messages = [
        f"FSDP unit '{unit.name}' is not compressed: {unit.reason}." for unit in handle.skipped
    ]
    units = [unit for unit in handle.units if unit.world_size > 1]
    names = [name for unit in units for name in unit.parameters]
    for pattern in handle.config.skip:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            messages.append(f"LoCo: skip={pattern!r} matches no parameter, e.g. not '{names[0]}'.")
    if units and all(len(unit.exempt) == len(unit.parameters) for unit in units):
        reasons = sorted({reason for unit in units for reason in unit.exempt.values()})
        messages.append(f"LoCo compresses nothing in this model: {', '.join(reasons)}.")
    return messages


def fsdp_states(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each FSDP2 state below ``model`` once, with the names of its modules joined by +.

    Modules sharded together share one state; a root without parameters of its own has none to
    reduce and is left out.
    """
    names = {id(module): clean_name(name) for name, module in model.named_modules()}
    seen = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = _torch.fsdp_state(module)
        if id(state) in seen or not _torch.param_groups(state):
            continue
        seen.add(id(state))
        parts = [names.get(id(part), "?") or "root" for part in _torch.state_modules(state)]
        yield "+".join(parts), state


def managed_parameters(model: nn.Module) -> set[int]:
    """Ids of the sharded parameters that FSDP2 units below ``model`` manage right now."""
    return {
        id(param.sharded_param)
        for _, state in fsdp_states(model)
        for group in _torch.param_groups(state)
        for param in group.fsdp_params
    }


def other_wrapper(model: nn.Module) -> str | None:
    """Say what else than FSDP2 reduces a model's gradients, or None if nothing is known to."""
    for wrapper, name in ((FullyShardedDataParallel, "FSDP1"), (DistributedDataParallel, "DDP")):
        if any(isinstance(module, wrapper) for module in model.modules()):
            return f"The model is wrapped in {name}, which LoCo does not support: use fully_shard."
    return None


def clean_name(name: str) -> str:
    """Strip what wrappers (checkpointing, compile) put into a module's name."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "").removesuffix(prefix[:-1]).removesuffix(".")
    return name


def _plan(
    model: nn.Module, states: Sequence[tuple[str, Any]], config: LoCoConfig
) -> tuple[list[LoCoReduceScatter], list[SkippedUnit]]:
    prefixes: dict[int, str] = {}
    for name, module in model.named_modules():
        prefixes.setdefault(id(module), f"{clean_name(name)}." if clean_name(name) else "")
    comms, skipped = [], []
    for unit_name, state in states:
        groups = _torch.param_groups(state)
        reason = _why_skip(groups)
        if reason is not None:
            skipped.append(_skip(unit_name, reason, groups))
            continue
        comms.append(_make_comm(unit_name, groups[0], prefixes, config))
    return comms, skipped


def _why_skip(groups: Sequence[Any]) -> str | None:
    if len(groups) > 1:
        return f"it has {len(groups)} parameter groups, which share one reduce-scatter hook"
    if _torch.shard_group(groups[0]) is None:
        return "it is replicated, not sharded, so it has no reduce-scatter"
    return None


def _skip(unit_name: str, reason: str, groups: Sequence[Any]) -> SkippedUnit:
    params = [param for group in groups for param in group.fsdp_params]
    numel = sum(_torch.unsharded_shape(param).numel() for param in params)
    num_bytes = 0
    for group in groups:
        process_group = _torch.shard_group(group)
        peers = 0 if process_group is None else process_group.size() - 1
        row_numel = sum(_torch.padded_shard_shape(param).numel() for param in group.fsdp_params)
        num_bytes += peers * row_numel * _torch.reduce_dtype(group).itemsize
    return SkippedUnit(unit_name, reason, len(params), numel, num_bytes)


def _make_comm(
    unit_name: str, group: Any, prefixes: dict[int, str], config: LoCoConfig
) -> LoCoReduceScatter:
    params: dict[str, Any] = {}
    described = []
    for param in group.fsdp_params:
        module, attribute = _torch.owner(param)
        if id(module) not in prefixes:
            raise ValueError(
                f"FSDP unit '{unit_name}' also holds parameters outside of the given model: "
                "attach the module that contains all of them."
            )
        name = prefixes[id(module)] + attribute
        params[name] = param
        described.append(
            UnitParameter(
                name=name,
                shape=tuple(_torch.unsharded_shape(param)),
                shard_dim=_torch.shard_dim(param),
                chunk_shape=tuple(_torch.padded_shard_shape(param)),
            )
        )
    process_group = _torch.shard_group(group)
    assert process_group is not None  # `_why_skip` left those units out
    unit = Unit(
        unit_name,
        described,
        process_group,
        config,
        reduce_dtype=_torch.reduce_dtype(group),
        device=_torch.compute_device(group),
        is_trainable=lambda name: params[name].sharded_param.requires_grad,
    )
    return LoCoReduceScatter(unit, group, params)


def _detach_earlier(comms: Sequence[LoCoReduceScatter]) -> None:
    current = (_torch.reduce_scatter_comm(comm.param_group) for comm in comms)
    earlier = [comm for comm in current if isinstance(comm, LoCoReduceScatter)]
    replaced = {id(comm.unit) for comm in earlier}
    handles = {id(comm.handle): comm.handle for comm in earlier}.values()
    if any(id(unit) not in replaced for handle in handles for unit in handle.units):
        raise ValueError(
            "Some of these FSDP units are compressed already, by a handle on a larger model: "
            "call its detach() first."
        )
    for handle in handles:
        logger.warning(
            "These FSDP units had LoCo attached already: the earlier handle is detached, and with "
            "it go its settings and residuals. Wrap one of several optimizers, not each."
        )
        handle.detach()


def _compare_ranks(config: LoCoConfig, comms: Sequence[LoCoReduceScatter]) -> None:
    by_groups: dict[tuple[int, ...], list[LoCoReduceScatter]] = {}
    for comm in comms:
        key = tuple(map(id, _torch.data_parallel_groups(comm.param_group)))
        by_groups.setdefault(key, []).append(comm)
    problems = []
    for members in by_groups.values():
        settings = [f"{name}={value!r}" for name, value in config.to_dict().items()]
        mine = "\n".join([*settings, *(comm.agreement() for comm in members)])
        problem = None
        # With HSDP the second group passes on what the first has found: all ranks have to raise.
        for group in _torch.data_parallel_groups(members[0].param_group):
            found: list[tuple[str | None, str]] = [(None, "")] * group.size()
            dist.all_gather_object(found, (problem, mine), group=group)
            ranks = dist.get_process_group_ranks(group)
            known = next((problem for problem, _ in found if problem), None)
            problem = known or _difference([text for _, text in found], ranks)
        if problem is not None:
            problems.append(problem)
    # Raised only after all groups were asked, so that no rank waits for one that gave up.
    if problems:
        raise ValueError("LoCo needs equal settings on all ranks. " + " ".join(problems))


def _difference(texts: Sequence[str], ranks: Sequence[int]) -> str | None:
    """Say how some rank's text differs from the first one's; None if all are equal."""
    ours = texts[0].splitlines()
    for text, rank in zip(texts, ranks, strict=True):
        theirs = text.splitlines()
        for one, two in zip(ours, theirs, strict=False):
            if one != two:
                return f"Rank {ranks[0]} has {one} and rank {rank} has {two}."
        if len(ours) != len(theirs):
            counts = f"{len(ours)} settings and units, rank {rank} {len(theirs)}"
            return f"Rank {ranks[0]} has {counts}."
    return None


def _no_units(model: nn.Module) -> str:
    default = "The model has no FSDP2 unit: call fully_shard(model) before attaching LoCo."
    return other_wrapper(model) or default
