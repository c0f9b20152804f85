"""When and to what LoCoOptimizer attaches, and what it refuses."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.modules import module as torch_module
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from distributed.models import TINY, residuals, same
from distributed.optimizer_runs import Net, full, loss_of, parameters, plain_net, shard, train
from loco_fsdp import LoCoOptimizer
from rank_pool import RankPool


def global_hooks() -> int:
    gc.collect()
    return len(torch_module._global_forward_pre_hooks)


def swap(optimizer: Optimizer, old: dict[str, Tensor], model: nn.Module) -> None:
    """Put sharded parameters in the place of those that were there, as Accelerate does.

    State that was made in the constructor (Adagrad's) moves along.
    """
    new_of = {old[name]: new for name, new in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [new_of[parameter] for parameter in group["params"]]
    for parameter in [p for p in optimizer.state if p in new_of]:
        new, state = new_of[parameter], optimizer.state.pop(parameter)
        optimizer.state[new] = {name: like(new, value) for name, value in state.items()}


def like(parameter: Tensor, value: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    if value.dim() == 0:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def direct_run(build: Callable[[Any], Optimizer]) -> Any:
    model = shard(plain_net())
    optimizer = LoCoOptimizer(build(model.parameters()), model, TINY)
    train(model, optimizer, range(3))
    return parameters(model), residuals(optimizer.loco)


def swapped_run(build: Callable[[Any], Optimizer], with_model: bool, wrap_first: bool) -> Any:
    """The optimizer exists before the model is sharded, wrapped or not."""
    hooks = global_hooks()
    model = plain_net()
    old: dict[str, Tensor] = dict(model.named_parameters())
    optimizer = build(model.parameters())
    given = model if with_model else None
    if wrap_first:
        optimizer = LoCoOptimizer(optimizer, given, TINY)
        optimizer.load_state_dict(optimizer.state_dict())  # Accelerate does
    shard(model)
    swap(optimizer, old, model)
    if not wrap_first:
        optimizer = LoCoOptimizer(optimizer, given, TINY)
    plain_net()(torch.ones(1, 10))  # an unrelated forward
    train(model, optimizer, range(3))
    assert isinstance(optimizer, LoCoOptimizer)
    return global_hooks() == hooks, parameters(model), residuals(optimizer.loco)


def adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=1e-2)


def adagrad(params: Any) -> Optimizer:
    return Adagrad(params, lr=1e-2)


@pytest.mark.parametrize("build", [adamw, adagrad])
def test_model_sharded_after_the_optimizer_was_built(
    ranks: RankPool, build: Callable[[Any], Optimizer]
) -> None:
    """Field case 52: wrapped before or after its parameters are swapped, all is as if direct."""
    direct = ranks.run(direct_run, 2, build)
    for with_model in (True, False):
        for wrap_first in (True, False):
            late = ranks.run(swapped_run, 2, build, with_model, wrap_first)
            for (hook_is_gone, weights, kept), expected in zip(late, direct, strict=True):
                assert hook_is_gone
                assert same(weights, expected[0])
                assert same(kept, expected[1])
                assert kept["blocks.0.weight"].any()


class Holder(nn.Module):
    """Its parts are called, but never the module itself."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def held_run() -> Any:
    holder = Holder(plain_net())
    old: dict[str, Tensor] = dict(holder.named_parameters())
    optimizer = LoCoOptimizer(SGD(holder.parameters(), lr=0.1), holder, TINY)
    shard(holder.net)
    swap(optimizer, old, holder)
    train(holder.net, optimizer, range(2))
    return optimizer.loco.steps, sorted(residuals(optimizer.loco))


def test_only_parts_of_the_model_are_called(ranks: RankPool) -> None:
    """As Lightning does: names are the given model's all the same."""
    for steps, names in ranks.run(held_run, 2):
        assert steps == 2
        assert names == [
            "net.blocks.0.weight",
            "net.blocks.1.weight",
            "net.inp.weight",
            "net.out.weight",
        ]


class Scorer(nn.Module):
    """Is used through a method that is not ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(6, 6)

    def score(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum()  # type: ignore[no-any-return]


def method_run(with_model: bool) -> Any:
    model = Scorer()
    old: dict[str, Tensor] = dict(model.named_parameters())
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.1), model if with_model else None, TINY)
    fully_shard(model)
    register_fsdp_forward_method(model, "score")
    swap(optimizer, old, model)
    for step in range(2):
        model.score(torch.full((6,), step + 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.loco.stats()[0].calls


def test_no_module_is_called(ranks: RankPool) -> None:
    """Nothing is uncompressed in silence: the first step attaches, or says what to do."""
    assert ranks.run(method_run, 2, True) == [1, 1]
    with pytest.raises(AssertionError, match=r"RuntimeError: LoCo found no FSDP2 unit.*give the"):
        ranks.run(method_run, 2, False)


class Language(nn.Module):
    """Norm and head are one unit; embedding, head and a second head share one weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(11, 8)
        self.block = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.second = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.second.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.block(self.embed(tokens))))
        return (self.head(h) + self.second(h)).logsumexp(-1).mean()  # type: ignore[no-any-return]


def language_run(tied: bool, with_model: bool) -> Any:
    model = Language(tied)
    fully_shard(model.block)
    if not tied:
        fully_shard([model.norm, model.head])
    fully_shard(model)
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.1), model if with_model else None, TINY)
    for step in range(3):
        tokens = torch.arange(4) + step + dist.get_rank()
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle = optimizer.loco
    calls = {stats.unit: stats.calls for stats in handle.stats()}
    kept = {name for name, e in residuals(handle).items() if e.any()}
    return calls, kept, parameters(model)


@pytest.mark.parametrize("with_model", [True, False])
def test_modules_sharded_together(ranks: RankPool, with_model: bool) -> None:
    results = ranks.run(language_run, 2, False, with_model)
    for calls, kept, weights in results:
        assert calls == {"block": 3, "norm+head": 3, "root": 3}
        assert kept == {"embed.weight", "block.weight", "head.weight", "second.weight"}
        assert same(weights, results[0][2])


@pytest.mark.parametrize("with_model", [True, False])
def test_weight_shared_by_three(ranks: RankPool, with_model: bool) -> None:
    results = ranks.run(language_run, 2, True, with_model)
    for calls, kept, weights in results:
        assert calls == {"block": 3, "root": 3}
        assert kept == {"embed.weight", "block.weight"}
        assert same(weights, results[0][2])


def zero_gradient_run(with_model: bool) -> Any:
    model = shard(plain_net())
    optimizer = LoCoOptimizer(
        SGD(model.parameters(), lr=0.1, momentum=0.9), model if with_model else None, TINY
    )
    before = parameters(model)
    (0.0 * loss_of(model, 0)).backward()
    optimizer.step()
    unchanged = same(parameters(model), before)
    no_residual = not any(e.any() for e in residuals(optimizer.loco).values())
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    return unchanged, no_residual, optimizer.loco.steps


@pytest.mark.parametrize("with_model", [True, False])
def test_first_step_with_zero_gradients(ranks: RankPool, with_model: bool) -> None:
    for outcome in ranks.run(zero_gradient_run, 2, with_model):
        assert outcome == (True, True, 3)


def stale_run(with_model: bool, wrap_first: bool) -> str:
    """Field case 51: the optimizer holds parameters that FSDP has replaced."""
    model = plain_net()
    inner = AdamW(model.parameters(), lr=1e-2)
    given = model if with_model else None
    if wrap_first:
        optimizer = LoCoOptimizer(inner, given, TINY)
        shard(model)
    else:
        shard(model)
        optimizer = LoCoOptimizer(inner, given, TINY)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("wrap_first", [True, False])
@pytest.mark.parametrize("with_model", [True, False])
def test_optimizer_built_before_sharding(
    ranks: RankPool, with_model: bool, wrap_first: bool
) -> None:
    """Field case 51: the first step says what to do instead of changing nothing."""
    for message in ranks.run(stale_run, 2, with_model, wrap_first):
        assert message == (
            "LoCo found no FSDP2 unit that manages any of the optimizer's 7 parameters. Call "
            "fully_shard(model) first, build the optimizer from model.parameters() after it, and "
            "give the model: LoCoOptimizer(optimizer, model)."
        )


def wrapped_otherwise(kind: str, with_model: bool) -> tuple[str, str]:
    hooks = global_hooks()
    model: nn.Module
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(plain_net())
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 is deprecated, and slow on CPUs
            model = FullyShardedDataParallel(plain_net(), device_id=torch.device("cpu"))
    inner = SGD(model.parameters(), lr=0.1)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        optimizer = LoCoOptimizer(inner, model if with_model else None, TINY)
        train(model, optimizer, [0])
    message = str(caught.value)
    optimizer = None  # type: ignore[assignment]
    kind_of_error = caught.type.__name__
    del caught
    assert global_hooks() == hooks
    return kind_of_error, message


@pytest.mark.parametrize("kind", ["DDP", "FSDP1"])
def test_other_wrappers(ranks: RankPool, kind: str) -> None:
    """Field case 10 (b, c): named at construction if the model is given, else at its forward."""
    text = f"The model is wrapped in {kind}, which LoCo does not support: use fully_shard."
    assert ranks.run(wrapped_otherwise, 2, kind, True) == [("ValueError", text)] * 2
    assert ranks.run(wrapped_otherwise, 2, kind, False) == [("RuntimeError", text)] * 2


def sharded_by_hand() -> str:
    """DTensor parameters without FSDP: nothing that could be compressed."""
    model = nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.1))
    model.weight.square().sum().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_sharded_without_fsdp(ranks: RankPool) -> None:
    for message in ranks.run(sharded_by_hand, 2):
        assert "no FSDP2 unit" in message


def partly_managed(late: bool) -> Any:
    """One optimizer for two models; the handle is on the first of them."""
    models = [shard(plain_net()), shard(plain_net())]
    both = [p for model in models for p in model.parameters()]
    optimizer = LoCoOptimizer(SGD(both, lr=0.1), None if late else models[0], TINY)
    for step in range(2):
        for model in models:
            loss_of(model, step).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        if step == 0:
            texts = [(str(w.message), w.filename == __file__) for w in caught]
    return texts, len(caught)


@pytest.mark.parametrize("late", [False, True])
def test_partly_managed(ranks: RankPool, late: bool) -> None:
    """Never uncompressed in silence: one warning, at the first step."""
    for texts, later in ranks.run(partly_managed, 2, late):
        assert texts == [
            (
                "7 of the optimizer's 14 parameters are sharded outside of the model that LoCo is "
                "attached to, so their gradients are not compressed: give the model that contains "
                "all of them.",
                True,
            )
        ]
        assert later == 0


def added_unmanaged_group() -> str:
    model, other = shard(plain_net()), shard(plain_net())
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.1), model, TINY)
    train(model, optimizer, [0])
    optimizer.add_param_group({"params": list(other.parameters())})
    with pytest.warns(UserWarning) as caught:
        train(model, optimizer, [1])
    return str(caught[0].message)


def test_group_from_elsewhere_warns(ranks: RankPool) -> None:
    for text in ranks.run(added_unmanaged_group, 2):
        assert text.startswith("7 of the optimizer's 14 parameters are sharded outside of")


def sharded_too_late() -> str:
    model = plain_net()
    for block in model.blocks:
        fully_shard(block)
    optimizer = LoCoOptimizer(SGD(model.blocks.parameters(), lr=0.1), model, TINY)
    fully_shard(model)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_unit_sharded_after_attaching(ranks: RankPool) -> None:
    for message in ranks.run(sharded_too_late, 2):
        assert message == (
            "1 of the model's 3 FSDP units were sharded after LoCo was attached, so they are not "
            "compressed: build LoCoOptimizer after the last fully_shard."
        )


def compiled_run(late: bool) -> Any:
    torch._dynamo.reset()
    model = shard(plain_net())
    model.compile(backend="eager")
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.1), None if late else model, TINY)
    train(model, optimizer, range(3))
    torch._dynamo.reset()
    return optimizer.loco.steps, parameters(model)


def test_attaches_to_a_compiled_model(ranks: RankPool) -> None:
    at_once = ranks.run(compiled_run, 2, False)
    for (steps, weights), expected in zip(ranks.run(compiled_run, 2, True), at_once, strict=True):
        assert steps == 3
        assert same(weights, expected[1])


def two_optimizers() -> Any:
    """One for the weights and one for the biases: the second one's handle counts for both."""
    model = shard(plain_net())
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    first = LoCoOptimizer(SGD(weights, lr=0.1), model, TINY)
    second = LoCoOptimizer(SGD(biases, lr=0.1), model, TINY)
    before = full(model.inp.weight)
    for step in range(3):
        loss_of(model, step).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return (
        not torch.equal(full(model.inp.weight), before),
        first.loco.attached,
        first.loco.steps,
        second.loco.steps,
        [stats.calls for stats in second.loco.stats()],
    )


def test_two_optimizers_on_one_model(ranks: RankPool) -> None:
    """Field case 17: the second replaces the first, gradients are compressed once."""
    for outcome in ranks.run(two_optimizers, 2):
        assert outcome == (True, False, 0, 3, [3, 3, 3])
