"""An optimizer's state with entries of ours beside its own, which it must never trip over.

An entry is the tensors of one parameter under the names ``checkpoint.KEYS``. In a state dict they
lie beside the optimizer's own. In the live state only their names are there, with None: DCP's
flattened form loads just the names that it finds in ``optimizer.state[p]``. Optimizers such as
AdamW take ``state[p]`` for complete as soon as it is not empty, so where the names would be alone
they are taken out before each step, and in a state dict such entries lie outside the states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from loco_fsdp.checkpoint import KEYS, META, Entry

LARGEST_AFTER_TEMPLATE_STEP = {"step": 1, "exp_avg": 0, "momentum_buffer": 0}
"""What torch's optimizers, and most others, have in their states after one zero gradient."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, in the order of the groups: position -> parameter."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def put_names(
    optimizer: Optimizer,
    compressible: Collection[int],
    names: Sequence[str],
    *,
    stepped: bool,
) -> bool:
    """Put the names of entries into the live state of the parameters that have one.

    An optimizer that keeps no state at all, but has done a step, gets names for every parameter
    that is trained: DCP wants a state of all parameters or of none.

    Args:
        optimizer: the wrapped optimizer.
        compressible: ids of the parameters that may have a residual.
        names: names of the tensors in their entries. Others have ``loco_meta`` alone, and only
            without a state of their own.
        stepped: the optimizer has just done a step: what it has not given a state to, though
            there is a gradient, needs none.

    Returns:
        Whether there are names alone in a state, for ``take_names``.

    """
    parameters = parameters_of(optimizer)
    is_stateless = (stepped or bool(optimizer.state)) and not any(
        has_own_state(optimizer, p) for p in parameters
    )
    is_any_alone = False
    for p in parameters:
        if has_own_state(optimizer, p):
            if id(p) in compressible:
                optimizer.state[p].update(dict.fromkeys(names))
        elif (is_stateless and p.requires_grad) or (stepped and p.grad is not None):
            own = names if id(p) in compressible else (META,)
            optimizer.state[p].update(dict.fromkeys(own))
            is_any_alone = True
    return is_any_alone


def take_names(optimizer: Optimizer) -> None:
    """Take away the states that are names alone."""
    for p, state in list(optimizer.state.items()):
        if state and not has_own_state(optimizer, p):
            del optimizer.state[p]


def has_own_state(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Tell whether the optimizer itself has a state for a parameter."""
    return bool(optimizer.state.get(parameter, {}).keys() - set(KEYS))


def local_device(parameter: Tensor) -> torch.device:
    """Device of this rank's part of a parameter."""
    return parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device


def hide_names(_: Optimizer, state_dict: dict[str, Any]) -> None:
    """State-dict post-hook of the wrapped optimizer: its own state dict is only its own."""
    state_dict["state"] = {
        index: kept
        for index, state in state_dict["state"].items()
        if (kept := _without_entry(state)) or not state
    }


def with_entries(
    state_dict: dict[str, Any], optimizer: Optimizer, entries: Mapping[int, Entry]
) -> dict[str, Any]:
    """Return a state dict of ``optimizer`` with the entries, by position, added to its states.

    Those of parameters without a state lie under ``loco``, where a plain optimizer that loads
    this does not take them for a state.
    """
    parameters = parameters_of(optimizer)
    first = {id(p): i for i, p in reversed(list(enumerate(parameters)))}  # as torch numbers them
    state: dict[int, Any] = dict(state_dict["state"])
    beside: dict[int, Entry] = {}
    for position, entry in entries.items():
        index = first[id(parameters[position])]
        if optimizer.state.get(parameters[position]):
            state[index] = {**state.get(index, {}), **entry}
        else:
            beside[index] = entry
    return {**state_dict, "state": state, **({"loco": beside} if beside else {})}


def split_entries(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, Entry]]:
    """Undo ``with_entries``: the optimizer's own state dict, and the entries by position."""
    labels = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
    positions = {label: i for i, label in reversed(list(enumerate(labels)))}
    state: dict[Any, Any] = {}
    entries: dict[int, Entry] = {}
    for label, values in state_dict["state"].items():
        if not isinstance(values, Mapping) or not values.keys() & set(KEYS):
            state[label] = values
            continue
        if label in positions:
            entries[positions[label]] = {k: values[k] for k in KEYS if k in values}
        if own := _without_entry(values):
            state[label] = own
    # Older states have a ``loco_meta`` there too; their entries repeat it.
    beside = state_dict.get("loco", {})
    entries |= {position: entry for position, entry in beside.items() if position != META}
    others = {key: value for key, value in state_dict.items() if key != "loco"}
    return {**others, "state": state}, entries


def has_progress(optimizer: Optimizer) -> bool:
    """Tell whether this rank's state shows more than one step, or a gradient that was not zero."""
    for state in optimizer.state.values():
        for key, most in LARGEST_AFTER_TEMPLATE_STEP.items():
            value = state.get(key)
            if value is None:
                continue
            local = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
            if bool((local.abs() > most).any()):
                return True
    return False


def is_template_step(optimizer: Optimizer) -> bool:
    """Tell whether a step now would do nothing but make the state of a fresh optimizer.

    Checkpoint loaders do such a step: all gradients and learning rates are zero.
    """
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    if optimizer.state or not rates or any(float(rate) != 0 for rate in rates):
        return False
    return all_zero(p.grad for p in parameters_of(optimizer))


def all_zero(gradients: Iterable[Tensor | None]) -> bool:
    """Tell whether there are gradients and all are zeros; waits for the device."""
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None]
    return bool(local) and not any(bool(g.any()) for g in local)


def make_template(optimizer: Optimizer) -> None:
    """Do that step, and leave no trace of it but the state."""
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.step(closure=lambda: 0.0)  # LBFGS needs one, and all take one
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group.update(before)


def _without_entry(state: Any) -> Any:
    if not isinstance(state, Mapping) or not state.keys() & set(KEYS):
        return state
    return {key: value for key, value in state.items() if key not in KEYS}
