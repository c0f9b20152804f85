"""LoCoOptimizer: the one line that a training script changes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast, overload

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from loco_fsdp import _torch
from loco_fsdp.config import LoCoConfig
from loco_fsdp.fsdp2 import attach, fsdp_states, managed_parameters
from loco_fsdp.handle import LoCoHandle

_WHAT_TO_DO = (
    "call fully_shard(model) first, build the optimizer from model.parameters() after it, and "
    "give the model: LoCoOptimizer(optimizer, model)."
)


class LoCoOptimizer(Optimizer):
    """Any optimizer, with the gradients of its FSDP model sent at a few bits.

    ``LoCoOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)``, or as a drop-in for
    the class: ``LoCoOptimizer(torch.optim.AdamW)(model.parameters(), lr=3e-4, model=model)``.

    Parameter groups, state and defaults are the inner optimizer's own objects, so schedulers,
    scalers and trainers work on either. If ``model`` is not sharded yet, or not given, the FSDP
    units are found at the first forward. Without ``model`` residual names are relative to the
    outermost module that was called.

    Args:
        optimizer: the optimizer to wrap, or its class.
        model: the module with ``fully_shard``-ed modules in it.
        config: settings, equal on all ranks; default ``LoCoConfig()``.
        grad_scaler: the scaler of the loss, if one is used: residuals are kept in unscaled units.

    Raises:
        ValueError: bad arguments, ranks that disagree, or a model of another kind than FSDP2.
        RuntimeError: at the first step, if FSDP manages none of the optimizer's parameters.

    """

    inner: Optimizer
    """The wrapped optimizer."""

    @overload
    def __new__(
        cls,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        config: LoCoConfig | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> LoCoOptimizer: ...

    @overload
    def __new__(cls, optimizer: type[Optimizer]) -> Callable[..., LoCoOptimizer]: ...  # type: ignore[misc]

    def __new__(cls, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapper, or, for an optimizer class, a function that builds one."""
        if not isinstance(optimizer, type):
            return super().__new__(cls)
        if not issubclass(optimizer, Optimizer) or args or kwargs:
            raise ValueError(
                f"LoCoOptimizer({optimizer.__name__}, ...): wanted an optimizer instance here, or "
                f"LoCoOptimizer({optimizer.__name__})(params, ..., model=model)."
            )
        return partial(_build, cls, optimizer)

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        config: LoCoConfig | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        _check_arguments(optimizer, model, config, grad_scaler)
        # The base class's __init__ would make groups and state of its own.
        self.inner = optimizer
        self._config = config or LoCoConfig()
        self._grad_scaler = grad_scaler
        self._model = model
        self._handle: LoCoHandle | None = None
        self._was_called = False
        self._is_checked = False
        self._late_hook: RemovableHandle | None = None
        if model is not None and any(fsdp_states(model)):
            self._attach(model)
        else:
            self._late_hook = self._attach_at_forward()

    @property
    def loco(self) -> LoCoHandle:
        """The handle: figures, residuals, ``detach()``. ``RuntimeError`` before it is attached."""
        if self._handle is None:
            raise RuntimeError(
                "LoCo is not attached yet: the model was not sharded, or not given, when the "
                "optimizer was built, so it attaches at the model's first forward."
            )
        return self._handle

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Do one step of the inner optimizer; see the class for what it may raise."""
        self._require_managed()
        if self._handle is not None:
            self._handle.check()  # before bad gradients are used
        loss = self.inner.step() if closure is None else self.inner.step(closure)
        if self._handle is not None:
            self._handle.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state; residuals are not part of it yet."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state; residuals stay as they are."""
        self.inner.load_state_dict(state_dict)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register ``hook(self, args, kwargs)`` to run before each step."""
        return self.inner.register_step_pre_hook(self._as_own(hook))

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register ``hook(self, args, kwargs)`` to run after each step."""
        return self.inner.register_step_post_hook(self._as_own(hook))

    def register_state_dict_pre_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """Register ``hook(self)`` to run before ``state_dict``."""
        return self.inner.register_state_dict_pre_hook(self._as_own(hook), prepend)

    def register_state_dict_post_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """Register ``hook(self, state_dict)`` to run after ``state_dict``."""
        return self.inner.register_state_dict_post_hook(self._as_own(hook), prepend)

    def register_load_state_dict_pre_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """Register ``hook(self, state_dict)`` to run before ``load_state_dict``."""
        return self.inner.register_load_state_dict_pre_hook(self._as_own(hook), prepend)

    def register_load_state_dict_post_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """Register ``hook(self)`` to run after ``load_state_dict``."""
        return self.inner.register_load_state_dict_post_hook(self._as_own(hook), prepend)

    def __repr__(self) -> str:
        return f"LoCoOptimizer({self.inner!r})"

    def __getattr__(self, name: str) -> Any:
        """Anything else is the inner optimizer's."""
        if name == "inner":  # not set yet: a copy or a pickle is being built
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _as_own(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        # The inner optimizer runs the hook, but the user registered it on this one.
        return lambda _, *args: hook(self, *args)

    def _attach(self, model: nn.Module) -> None:
        handle = attach(model, self._config)
        if self._grad_scaler is not None:
            handle.loss_scale = partial(_torch.scaler_scale, self._grad_scaler)
        self._model, self._handle = model, handle

    def _attach_at_forward(self) -> RemovableHandle:
        # The hook must not keep a dropped optimizer alive, nor run for ever after it.
        this = weakref.ref(self)

        def look(module: nn.Module, _: Any) -> None:
            optimizer = this()
            if optimizer is None:
                hook.remove()
            elif optimizer._handle is None:
                optimizer._look_for_units(module)

        # Python side effects are not traceable: the compiler has to leave it alone.
        untraced = torch.compiler.disable(look)
        if self._model is None:
            hook = register_module_forward_pre_hook(untraced)
        else:
            hook = self._model.register_forward_pre_hook(untraced, prepend=True)
        return hook

    def _look_for_units(self, module: nn.Module) -> None:
        """Attach to ``module`` if FSDP units in it hold parameters of this optimizer."""
        own = self._parameter_ids()
        if not any(id(parameter) in own for parameter in module.parameters()):
            return
        self._was_called = True
        if own & managed_parameters(module):
            self._attach(module)
            assert self._late_hook is not None
            self._late_hook.remove()

    def _parameter_ids(self) -> set[int]:
        # Made anew each time: trainers swap the parameters inside the groups.
        return {id(p) for group in self.inner.param_groups for p in group["params"]}

    def _require_managed(self) -> None:
        if self._is_checked:
            return
        if self._handle is None:
            if not self._was_called and self._holds_dtensors():
                return  # a checkpoint loader's step on a fresh optimizer: nothing has run yet
            raise RuntimeError(f"The model of this optimizer has no FSDP2 unit: {_WHAT_TO_DO}")
        assert self._model is not None
        managed = managed_parameters(self._model)
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        if parameters and not any(id(p) in managed for p in parameters):
            raise RuntimeError(
                f"None of the optimizer's {len(parameters)} parameters is managed by FSDP, so a "
                f"step would change nothing: {_WHAT_TO_DO}"
            )
        outside = sum(isinstance(p, DTensor) and id(p) not in managed for p in parameters)
        if outside:
            warnings.warn(
                f"{outside} of the optimizer's {len(parameters)} parameters are sharded outside of "
                "the model given to LoCoOptimizer: their gradients are not compressed.",
                stacklevel=3,
            )
        self._is_checked = True

    def _holds_dtensors(self) -> bool:
        return any(isinstance(p, DTensor) for g in self.inner.param_groups for p in g["params"])


def _delegate(name: str) -> property:
    """Return a property that lives on the inner optimizer, in all three directions."""

    def get(self: LoCoOptimizer) -> Any:
        return getattr(self.inner, name)

    def assign(self: LoCoOptimizer, value: Any) -> None:
        setattr(self.inner, name, value)

    def delete(self: LoCoOptimizer) -> None:
        delattr(self.inner, name)

    return property(get, assign, delete, f"The inner optimizer's ``{name}``.")


# One source of truth for groups and state; the last two are how GradScaler talks to fused
# optimizers. The base class annotates them as attributes, so they are set from outside.
for _name in ("param_groups", "state", "defaults", "grad_scale", "found_inf"):
    setattr(LoCoOptimizer, _name, _delegate(_name))


def _build(
    cls: type[LoCoOptimizer],
    optimizer_class: type[Optimizer],
    params: Any,
    *args: Any,
    model: nn.Module | None = None,
    config: LoCoConfig | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    **kwargs: Any,
) -> LoCoOptimizer:
    inner = optimizer_class(params, *args, **kwargs)
    return cls(inner, model, config, grad_scaler=grad_scaler)


def _check_arguments(optimizer: Any, model: Any, config: Any, grad_scaler: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer={optimizer!r}: wanted a torch.optim.Optimizer or its class.")
    if isinstance(optimizer, LoCoOptimizer):
        raise ValueError("optimizer is a LoCoOptimizer already: wrap the inner one.")
    for name, value, kind in (
        ("model", model, nn.Module),
        ("config", config, LoCoConfig),
        ("grad_scaler", grad_scaler, torch.amp.GradScaler),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name}={cast(object, value)!r}: wanted a {kind.__name__} or None.")
