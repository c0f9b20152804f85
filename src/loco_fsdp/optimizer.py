"""LoCoOptimizer: the one line that a training script changes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from loco_fsdp import _torch
from loco_fsdp.checkpoint import META, Entry, Meta, on_any_rank, saved_keys
from loco_fsdp.config import LoCoConfig
from loco_fsdp.delegation import DelegatingOptimizer
from loco_fsdp.fsdp2 import attach, fsdp_states, managed_parameters, other_wrapper
from loco_fsdp.handle import LoCoHandle
from loco_fsdp.optimizer_state import (
    all_zero,
    has_own_state,
    has_progress,
    hide_names,
    is_template_step,
    local_device,
    make_template,
    parameters_of,
    put_names,
    split_entries,
    take_names,
    with_entries,
)

_WHAT_TO_DO = (
    "Call fully_shard(model) first, build the optimizer from model.parameters() after it, and "
    "give the model: LoCoOptimizer(optimizer, model)."
)


class LoCoOptimizer(DelegatingOptimizer):
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
        RuntimeError: at the first step, if FSDP2 manages none of the optimizer's parameters or
            modules were sharded after LoCo was attached.

    """

    @overload
    def __new__(cls, optimizer: type[Optimizer]) -> Callable[..., LoCoOptimizer]: ...  # type: ignore[misc]

    @overload
    def __new__(
        cls,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        config: LoCoConfig | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> LoCoOptimizer: ...

    # Not in an __init__, which mypy would prefer, and so not see the second form.
    def __new__(
        cls,
        optimizer: Any,
        model: nn.Module | None = None,
        config: LoCoConfig | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Return the wrapper, or, for an optimizer class, a function that builds one."""
        if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
            if model is None and config is None and grad_scaler is None:
                return partial(_build, cls, optimizer)
            raise ValueError(
                f"LoCoOptimizer({optimizer.__name__}, ...): wanted an optimizer instance here, or "
                f"LoCoOptimizer({optimizer.__name__})(params, ..., model=model)."
            )
        _check_arguments(optimizer, model, config, grad_scaler)
        self = super().__new__(cls)
        self.inner = optimizer  # before __init__ does it: attaching looks at its state
        self._set_up(model, config or LoCoConfig(), grad_scaler)
        return self

    def _set_up(
        self,
        model: nn.Module | None,
        config: LoCoConfig,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._model = model
        self._config = config
        self._grad_scaler = grad_scaler
        self._handle: LoCoHandle | None = None
        self._is_checked = False
        self._late_hook: RemovableHandle | None = None
        self._template: Any = None  # the inner state, if a step made it that was none
        self._named = -1  # how many states there were when names were put into them
        self._has_names_alone = False  # in some parameter's state
        self._to_restore: dict[int, Entry] | None = None
        if model is not None and any(fsdp_states(model)):
            self._attach(model)
        elif model is not None and (reason := other_wrapper(model)):
            raise ValueError(reason)
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
        """Do one step of the inner optimizer; see the class for what it may raise.

        The step with which DCP makes the state of a fresh optimizer changes nothing: that state is
        a template to load into, and forgotten at the first real step.
        """
        if closure is None and self._is_template_step():
            make_template(self.inner)
            # An optimizer without a state has nothing to forget.
            self._template = self.inner.state or None
            self._put_names(stepped=True)
            return None
        if closure is None:
            self._check_gradients()
            self._make_state_own()
            loss = self.inner.step()
        else:
            self._make_state_own()
            loss = self.inner.step(partial(self._checked, closure))
        if self._handle is not None:
            self._handle.step()
        self._put_names(stepped=True)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state and, for each compressed parameter, its residual.

        See `LoCoHandle.state_dict` for the tensors. Collective: every rank has to call it. The
        residuals are copies; the inner optimizer's tensors are its own, as ever. Raises
        ``RuntimeError`` while a unit is broken. Before LoCo is attached there is no residual.
        """
        state_dict, handle = self.inner.state_dict(), self._handle_by_now()
        if handle is None:
            return with_entries(state_dict, self.inner, self._to_restore or {})
        is_untouched = self._has_template()
        meta = Meta.of(self._config, handle.steps, is_untouched)
        self._put_names(stepped=False)
        found = handle.state_dict(is_untouched=is_untouched)
        names = self._names(handle)
        entries: dict[int, Entry] = {}
        for position, p in enumerate(parameters_of(self.inner)):
            if id(p) in names:
                entries[position] = found[names[id(p)]]
            elif self.inner.state.get(p) and not has_own_state(self.inner, p):
                entries[position] = {META: meta.tensor(local_device(p))}
        return with_entries(state_dict, self.inner, entries)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()``, or a plain optimizer's, returned on any number of ranks.

        Collective. Without residuals in it they become zero, with one warning. Raises
        ``ValueError`` as `LoCoHandle.load_state_dict` does, before anything is changed.
        """
        handle = self._handle_by_now()
        own, entries = split_entries(state_dict)
        metas = {i: meta for i, entry in entries.items() if (meta := Meta.read(entry)) is not None}
        if handle is not None:
            handle.validate(**self._by_name(handle, entries))
        self.inner.load_state_dict(own)
        self._named, self._template = -1, None
        untouched = {i for i, meta in metas.items() if meta.is_untouched}
        if untouched and len(untouched) == len(metas) and not self._has_progress(handle):
            self._template = self.inner.state
        else:  # what was not saved: only the template, into which the rest was loaded, has it
            entries = {i: entry for i, entry in entries.items() if i not in untouched}
        self._to_restore = entries if handle is not None or entries or own["state"] else None
        if handle is not None:
            self._restore(handle)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)
        if self._handle is not None:
            self._handle.forget_reduction()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.inner.add_param_group(param_group)
        self._is_checked = False

    def _checked(self, closure: Callable[[], float]) -> float:
        loss = closure()
        self._check_gradients()
        return loss

    def _check_gradients(self) -> None:
        """Raise if the gradients, which are there now, are not what the step should use."""
        if not self._is_checked:
            self._require_managed()
        if self._handle is not None:
            self._handle.check()

    def _attach(self, model: nn.Module) -> None:
        handle = attach(model, self._config)
        if self._grad_scaler is not None:
            handle.loss_scale = partial(_torch.scaler_scale, self._grad_scaler)
        self._model, self._handle = model, handle
        if self._late_hook is not None:
            self._late_hook.remove()
        self.inner.register_state_dict_post_hook(hide_names)
        self._put_names(stepped=False)
        self._restore(handle)

    def _attach_at_forward(self) -> RemovableHandle:
        # The hook must not keep a dropped optimizer alive, nor outlive it.
        this = weakref.ref(self, lambda _: hook.remove())

        def look(module: nn.Module, _: Any) -> None:
            """Attach if this module's forward is one of the optimizer's model."""
            optimizer = this()
            if optimizer is not None and optimizer._handle is None:
                optimizer._look_for_units(module)

        # Python side effects are not traceable: the compiler has to leave it alone. For all
        # modules: a given model may be one whose parts are called, but never itself.
        hook = register_module_forward_pre_hook(torch.compiler.disable(look))
        return hook

    def _look_for_units(self, called: nn.Module) -> None:
        """Attach to the model if ``called`` holds parameters of this optimizer.

        Raises ``RuntimeError`` if they are wrapped by something that LoCo does not support.
        """
        # Ids are taken anew each time: trainers swap the parameters inside the groups.
        own = {id(parameter) for parameter in parameters_of(self.inner)}
        if not any(id(parameter) in own for parameter in called.parameters()):
            return
        model = called if self._model is None else self._model
        if own & managed_parameters(model):
            self._attach(model)
        elif reason := other_wrapper(called):
            raise RuntimeError(reason)

    def _handle_by_now(self) -> LoCoHandle | None:
        if self._handle is None and self._model is not None and any(fsdp_states(self._model)):
            self._attach(self._model)
        return self._handle

    def _names(self, handle: LoCoHandle) -> dict[int, str]:
        # By id, and anew each time: trainers swap the parameters inside the groups.
        return {id(p.tensor): p.name for p in handle.compressible_parameters()}

    def _put_names(self, *, stepped: bool) -> None:
        if self._handle is None or (stepped and len(self.inner.state) == self._named):
            return
        compressible = self._names(self._handle).keys()
        keys = saved_keys(self._config)
        self._has_names_alone |= put_names(self.inner, compressible, keys, stepped=stepped)
        if stepped:
            self._named = len(self.inner.state)

    def _restore(self, handle: LoCoHandle) -> None:
        entries, self._to_restore = self._to_restore, None
        if entries is None:
            return
        handle.load_state_dict(**self._by_name(handle, entries))

    def _by_name(self, handle: LoCoHandle, entries: Mapping[int, Entry]) -> dict[str, Any]:
        """Return entries by position as ``LoCoHandle.load_state_dict`` takes them."""
        names, parameters = self._names(handle), parameters_of(self.inner)
        own = {names[id(p)] for p in parameters if id(p) in names}
        named = {names.get(id(parameters[i]), f"parameter {i}"): e for i, e in entries.items()}
        return {"state_dict": named, "only": own}  # another optimizer's parameters stay as they are

    def _has_template(self) -> bool:
        # Another object is there once a state has been loaded, also into the inner optimizer.
        return self._template is not None and self._template is self.inner.state

    def _has_progress(self, handle: LoCoHandle | None) -> bool:
        """Tell whether the inner optimizer's state is more than a template; all ranks agree."""
        own = has_progress(self.inner)
        parameters = [] if handle is None else handle.compressible_parameters()
        # A rank whose shards are all empty sees nothing.
        return bool(on_any_rank(parameters, [own] * len(parameters))) or own

    def _make_state_own(self) -> None:
        """Leave nothing in the inner optimizer's state that a step of it would not expect."""
        if self._has_names_alone:
            take_names(self.inner)
            self._has_names_alone = False
        if self._has_template():
            self.inner.state.clear()
        self._template = None

    def _is_template_step(self) -> bool:
        has_reduced = self._handle is not None and self._handle.has_reduced
        return not has_reduced and is_template_step(self.inner)

    def _require_managed(self) -> None:
        """Raise, or warn, if gradients of this optimizer go uncompressed; look only once."""
        if self._handle is None:
            if all_zero(p.grad for p in parameters_of(self.inner)):
                return  # as a trainer may do that wants the optimizer's state to be there
            if self._model is not None:
                self._look_for_units(self._model)  # no module of it was called as one
        parameters = parameters_of(self.inner)
        managed = set() if self._handle is None else self._managed_units()
        if parameters and not any(id(parameter) in managed for parameter in parameters):
            raise RuntimeError(
                "LoCo found no FSDP2 unit that manages any of the optimizer's "
                f"{len(parameters)} parameters. {_WHAT_TO_DO}"
            )
        outside = sum(isinstance(p, DTensor) and id(p) not in managed for p in parameters)
        if outside:
            warnings.warn(
                f"{outside} of the optimizer's {len(parameters)} parameters are sharded outside of "
                "the model that LoCo is attached to, so their gradients are not compressed: give "
                "the model that contains all of them.",
                stacklevel=4,
            )
        self._is_checked = True

    def _managed_units(self) -> set[int]:
        assert self._model is not None and self._handle is not None
        count = sum(1 for _ in fsdp_states(self._model))
        late = count - len(self._handle.units) - len(self._handle.skipped)
        if late > 0:
            raise RuntimeError(
                f"{late} of the model's {count} FSDP units were sharded after LoCo was attached, "
                "so they are not compressed: build LoCoOptimizer after the last fully_shard."
            )
        return managed_parameters(self._model)


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
        raise ValueError(
            f"optimizer={_shown(optimizer)}: wanted a torch.optim.Optimizer or its class."
        )
    if isinstance(optimizer, LoCoOptimizer):
        raise ValueError("optimizer is a LoCoOptimizer already: wrap the inner one.")
    for name, value, kind in (
        ("model", model, nn.Module),
        ("config", config, LoCoConfig),
        ("grad_scaler", grad_scaler, torch.amp.GradScaler),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name}={_shown(value)}: wanted a {kind.__name__} or None.")


def _shown(value: Any) -> str:
    # A model given in the wrong place would fill the screen.
    return f"{type(value).__name__}(...)" if isinstance(value, nn.Module) else repr(value)
