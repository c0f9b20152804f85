"""The optimizer of a run, wrapped by LoCo where the settings ask for it."""

from __future__ import annotations

import importlib
import math

import torch
from torch import nn

from lm.settings import OptimizerSettings


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build the optimizer that the settings name; ``ValueError`` says what is wrong with them."""
    module_name, _, class_name = settings.name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"optimizer.name={settings.name!r}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(
            f"optimizer.name={settings.name!r}: wanted a class derived from torch.optim.Optimizer."
        )
    try:
        # The base class itself has another signature than the classes meant here.
        return found(model.parameters(), lr=settings.lr, **settings.kwargs)  # type: ignore[call-arg]
    except TypeError as error:
        raise ValueError(f"optimizer.kwargs={settings.kwargs!r}: {error}.") from error


def learning_rate(step: int, steps: int, settings: OptimizerSettings) -> float:
    """Rate of ``step`` (counted from 0) of ``steps``: linear warm-up, then half a cosine."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    last = max(1, steps - 1 - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / last)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * (settings.final_lr_ratio + (1 - settings.final_lr_ratio) * cosine)
