"""Parameter groups that grow, are empty or are swapped around a save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from distributed.checkpoint_runs import OPTIMIZERS, load_from, save_to
from distributed.models import TINY, residuals, same
from distributed.optimizer_runs import Net, plain_net, shard, train
from loco_fsdp import LoCoOptimizer
from rank_pool import RankPool

EXACT = replace(TINY, residual_checkpoint="exact")


def grown(folder: str) -> Any:
    """The second layer's parameters come at step 3; saved at 5, loaded, and on."""

    def make(with_both: bool) -> tuple[Net, LoCoOptimizer]:
        model = shard(plain_net())
        later = list(model.blocks[1].parameters())
        first = [p for p in model.parameters() if not any(p is q for q in later)]
        optimizer = LoCoOptimizer(AdamW(first, lr=1e-2), model, EXACT)
        LambdaLR(optimizer, lambda k: 0.9**k)
        if with_both:
            optimizer.add_param_group({"params": later, "lr": 2e-2})
        return model, optimizer

    model, optimizer = make(False)
    train(model, optimizer, range(3))
    optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 2e-2})
    train(model, optimizer, range(3, 5))
    ReduceLROnPlateau(optimizer).step(1.0)
    save_to(folder, model, optimizer)
    before = residuals(optimizer.loco)
    straight = train(model, optimizer, range(5, 8))
    other, fresh = make(True)
    load_from(folder, other, fresh)
    is_same = same(before, residuals(fresh.loco))
    return is_same, straight == train(other, fresh, range(5, 8)), len(fresh.param_groups)


def test_group_added_before_the_save(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 49: the new group's residuals are saved with the old ones'."""
    assert ranks.run(grown, 2, str(tmp_path)) == [(True, True, 2)] * 2


def with_an_empty_group(folder: str) -> Any:
    def make() -> tuple[Net, LoCoOptimizer]:
        model = shard(plain_net())
        groups: Any = [{"params": list(model.parameters()), "lr": 0.01}, {"params": [], "lr": 0.02}]
        return model, LoCoOptimizer(SGD(groups), model, EXACT)

    model, optimizer = make()
    train(model, optimizer, range(2))
    save_to(folder, model, optimizer)
    straight = train(model, optimizer, range(2, 5))
    other, fresh = make()
    load_from(folder, other, fresh)
    lrs = [group["lr"] for group in fresh.param_groups]
    return lrs, straight == train(other, fresh, range(2, 5))


def test_residuals_beside_an_empty_group(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 50: an optimizer without a state of its own, and a group without parameters."""
    assert ranks.run(with_an_empty_group, 2, str(tmp_path)) == [([0.01, 0.02], True)] * 2


def swapped(folder: str) -> Any:
    """Built before the model is sharded; its parameters are swapped, as Accelerate does it."""

    def make() -> tuple[Net, LoCoOptimizer]:
        model = plain_net()
        optimizer = LoCoOptimizer(OPTIMIZERS["adagrad"](model.parameters()), model, EXACT)
        names = [name for name, _ in model.named_parameters()]
        shard(model)
        sharded = dict(model.named_parameters())
        for old, name in zip(optimizer.param_groups[0]["params"], names, strict=True):
            optimizer.state[sharded[name]] = {
                key: value if value.dim() == 0 else torch.zeros_like(sharded[name])
                for key, value in optimizer.state.pop(old).items()
            }
        optimizer.param_groups[0]["params"] = [sharded[name] for name in names]
        return model, optimizer

    model, optimizer = make()
    train(model, optimizer, range(3))
    save_to(folder, model, optimizer)
    straight = train(model, optimizer, range(3, 6))
    other, fresh = make()
    load_from(folder, other, fresh)
    return fresh.loco.steps, straight == train(other, fresh, range(3, 6))


def test_parameters_swapped_before_the_load(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 52: residuals are found by the live parameters, none is orphaned."""
    assert ranks.run(swapped, 2, str(tmp_path)) == [(3, True)] * 2
