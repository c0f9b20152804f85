"""Saving and loading by torch.distributed.checkpoint, for the tests of checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from distributed.models import TINY, Chain, shard_probes
from distributed.optimizer_runs import Net, full, plain_net, shard, train
from loco_fsdp import LoCoConfig, LoCoHandle, LoCoOptimizer

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from lm.data import Corpus
from lm.model import Decoder
from lm.settings import ModelSettings

Build = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "sgd": partial(SGD, lr=0.05),
    "momentum": partial(SGD, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adagrad": partial(Adagrad, lr=0.01),
    "adamw": partial(AdamW, lr=1e-2),
    "adamw-foreach": partial(AdamW, lr=1e-2, foreach=True),
    "adamw-fused": partial(AdamW, lr=1e-2, fused=True),
}


def net(
    build: Build = OPTIMIZERS["adamw"], config: LoCoConfig = TINY, **settings: Any
) -> tuple[Net, LoCoOptimizer]:
    model = shard(plain_net(), **settings)
    return model, LoCoOptimizer(build(model.parameters()), model, config)


def save_to(
    folder: str, model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None
) -> None:
    """As the users' scripts do it."""
    weights, state = get_state_dict(model, optimizer, options=options)
    save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load_from(
    folder: str, model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None
) -> None:
    weights, state = get_state_dict(model, optimizer, options=options)
    loaded: dict[str, Any] = {"model": weights, "optimizer": state}
    load(loaded, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=options,
    )


def language_model_run(build: Build, folder: str, resume: bool) -> list[float]:
    """Losses of steps 10 to 29 over all ranks' text, after 10 steps and a save, or from there."""
    source = Path(argparse.__file__).read_bytes()
    corpus = Corpus(
        tokens=np.frombuffer(source, dtype=np.uint8),
        is_bytes=True,
        sequence_length=32,
        batch_size=8,
        vocab_size=256,
        seed=0,
    )
    torch.manual_seed(0)
    settings = ModelSettings(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64)
    model = Decoder(settings, max_length=32)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = LoCoOptimizer(build(model.parameters()), model, TINY)
    if resume:
        load_from(folder, model, optimizer)
    losses = []
    for step in range(10 if resume else 0, 30):
        if step == 10 and not resume:
            save_to(folder, model, optimizer)
        batch = corpus.training_batch(step, dist.get_rank())
        loss = F.cross_entropy(model(batch.inputs).logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses[-20:]


def mean_residual(handle: LoCoHandle, name: str) -> Tensor:
    """The pending correction of one parameter: the mean over the ranks."""
    mean = handle.residual(name).double()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def mean_residuals(handle: LoCoHandle) -> dict[str, Tensor]:
    return {p.name: mean_residual(handle, p.name) for p in handle.compressible_parameters()}


ODD_SHAPES = {
    "a": {"w": (5, 37), "v": (9, 300), "b": (7,)},
    "b": {"w": (1, 130), "cube": (3, 4, 50)},
}
"""Some ranks have no row, the last blocks are short, and ``cube`` is split along its last
dimension, which every number of ranks in these tests divides at most once."""


def odd_model(config: LoCoConfig) -> tuple[Any, LoCoOptimizer]:
    """Units of awkward shapes; nothing else has a say in its residuals."""

    def place(parameter: nn.Parameter) -> Shard:
        is_divided = parameter.dim() == 3 and parameter.shape[1] % dist.get_world_size() == 0
        return Shard(1 if is_divided else 0)

    model = shard_probes(Chain(ODD_SHAPES), shard_placement_fn=place)
    return model, LoCoOptimizer(SGD(model.parameters(), lr=0.1), model, config)


def straight_run(build: Build, config: LoCoConfig, steps: int, folder: str, at: int) -> Any:
    """Losses and weights of a run that saves after step ``at`` and goes on."""
    model, optimizer = net(build, config)
    losses = train(model, optimizer, range(at))
    save_to(folder, model, optimizer)
    losses += train(model, optimizer, range(at, steps))
    return losses, {name: full(p) for name, p in model.named_parameters()}


def resumed_run(build: Build, config: LoCoConfig, steps: int, folder: str, at: int) -> Any:
    """The same from the checkpoint on, by a job that starts anew."""
    torch.manual_seed(5)
    model, optimizer = net(build, config)
    load_from(folder, model, optimizer)
    counted = optimizer.loco.steps
    losses = train(model, optimizer, range(at, steps))
    return losses, {name: full(p) for name, p in model.named_parameters()}, counted
