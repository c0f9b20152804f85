"""An optimizer that is another one: the part of LoCoOptimizer that knows nothing of LoCo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class DelegatingOptimizer(Optimizer):
    """Passes everything on to the inner optimizer; a subclass changes what it wants to.

    Parameter groups, state and defaults are the inner optimizer's own objects, hooks get this
    optimizer as their first argument, and attributes unknown here are the inner optimizer's.
    """

    inner: Optimizer
    """The wrapped optimizer."""

    def __init__(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        # The base class's __init__ would make groups and state of its own.
        self.inner = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state."""
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
        return f"{type(self).__name__}({self.inner!r})"

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Raise: neither ``copy`` nor ``pickle`` could take along the model this acts on."""
        raise TypeError(
            f"A {type(self).__name__} can be neither copied nor pickled, since it acts on one live "
            "model: save its state_dict() and load that into a new one, or copy its .inner."
        )

    def __getattr__(self, name: str) -> Any:
        """Anything else is the inner optimizer's, except what Python itself looks for."""
        if name == "inner" or name.startswith("__"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.inner, name)

    def _as_own(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        # The inner optimizer runs the hook, but the user registered it on this one.
        return lambda _, *args: hook(self, *args)


def _delegate(name: str) -> property:
    """Return a property that lives on the inner optimizer, in all three directions."""

    def get(self: DelegatingOptimizer) -> Any:
        return getattr(self.inner, name)

    def assign(self: DelegatingOptimizer, value: Any) -> None:
        setattr(self.inner, name, value)

    def delete(self: DelegatingOptimizer) -> None:
        delattr(self.inner, name)

    return property(get, assign, delete, f"The inner optimizer's ``{name}``.")


# One source of truth for groups and state; the last two are how GradScaler talks to fused
# optimizers. The base class annotates them as attributes, so they are set from outside.
for _name in ("param_groups", "state", "defaults", "grad_scale", "found_inf"):
    setattr(DelegatingOptimizer, _name, _delegate(_name))
