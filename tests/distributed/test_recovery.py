"""A failure is never silent, and what the message says to do heals it."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from loco_fsdp import (
    LoCoConfig,
    LoCoOptimizer,
    ResidualState,
    attach,
    compressed_reduce_scatter,
)
from rank_pool import RankPool

TINY = LoCoConfig(min_numel=0)


class Experts(nn.Module):
    """Three equal matrices; each call names those it uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(12, 12)) for _ in range(3))

    def forward(self, x: Tensor, names: str = "abc") -> Tensor:
        for name in names:
            x = x @ self.get_parameter(name)
        return x.square().mean()

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.b).square().mean()


def build(config: LoCoConfig = TINY) -> tuple[Experts, LoCoOptimizer]:
    model = Experts()
    fully_shard(model)
    return model, LoCoOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]


def fail_and_recover(how: str) -> None:
    model, optimizer = build()
    x = torch.randn(4, 12)
    if how == "layout":
        with pytest.raises(RuntimeError, match="different layouts"):
            model(x, "ab" if dist.get_rank() else "ac").backward()
    else:
        failing = mock.patch("torch.distributed.all_to_all_single", side_effect=RuntimeError("cut"))
        with failing, pytest.raises(RuntimeError, match="cut"):
            model(x).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"broken.*reset"):
            optimizer.step()
    optimizer.loco.reset()
    optimizer.zero_grad()
    before = weights(model)
    model(x).backward()
    optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, weights(model), strict=True))
    assert [unit.calls for unit in optimizer.loco.stats()] == [1]


@pytest.mark.parametrize("how", ["layout", "exchange"])
def test_step_refuses_until_reset_and_then_trains(ranks: RankPool, how: str) -> None:
    """A training loop that goes on after the error must not go on with nothing."""
    ranks.run(fail_and_recover, 2, how)


def train_through_a_method() -> list[bool]:
    model, optimizer = build()
    register_fsdp_forward_method(model, "encode")
    model.encode(torch.randn(4, 12)).backward()
    optimizer.step()
    return [bool(optimizer.loco.residual(name).any()) for name in "abc"]


def test_first_forward_through_another_method(ranks: RankPool) -> None:
    """FSDP's own way to run a method: it uses one parameter, and that one is known."""
    for result in ranks.run(train_through_a_method, 2):
        assert result == [False, True, False]


def freeze_on_one_rank() -> None:
    model = Experts()
    fully_shard(model)
    model.b.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(ValueError, match=r"frozen: b"):
        attach(model, TINY)


def test_frozen_on_one_rank_only(ranks: RankPool) -> None:
    ranks.run(freeze_on_one_rank, 3)


class PlainReduceScatter:
    """A custom reduce-scatter of the user's own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool
    ) -> None:
        raise AssertionError("not called in this test")


def replace_collective() -> None:
    model, optimizer = build()
    assert isinstance(model, FSDPModule)
    model.set_custom_reduce_scatter(PlainReduceScatter())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"'root'.*not compressed"):
        optimizer.step()
    with unittest.TestCase().assertLogs("loco_fsdp", "WARNING") as logs:
        attach(model, TINY)
    assert "PlainReduceScatter" in logs.output[0]


def test_another_reduce_scatter_is_not_silent(ranks: RankPool) -> None:
    ranks.run(replace_collective, 2)


def ask_for_nothing() -> list[list[str]]:
    output = []
    for config in (LoCoConfig(min_numel=0, skip=("nope*",)), LoCoConfig(min_numel=10**6)):
        with unittest.TestCase().assertLogs("loco_fsdp", "WARNING") as logs:
            build(config)
        output.append(logs.output)
    return output


def test_settings_without_effect_are_named(ranks: RankPool) -> None:
    pattern, size = ranks.run(ask_for_nothing, 2)[0]
    assert len(pattern) == len(size) == 1
    assert "skip='nope*' matches no parameter" in pattern[0]
    assert "compresses nothing" in size[0] and "min_numel=1000000" in size[0]


def break_a_plain_residual() -> None:
    state, x, out = ResidualState(LoCoConfig()), torch.randn(2, 300), torch.empty(300)
    failing = mock.patch("torch.distributed.all_to_all_single", side_effect=RuntimeError("cut"))
    with failing, pytest.raises(RuntimeError, match="cut"):
        compressed_reduce_scatter(out, x, state=state)
    with pytest.raises(RuntimeError, match=r"broken.*cut.*reset"):
        compressed_reduce_scatter(out, x, state=state)
    state.reset()
    compressed_reduce_scatter(out, x, state=state)


def test_plain_residual_after_a_failed_exchange(ranks: RankPool) -> None:
    ranks.run(break_a_plain_residual, 2)


def call_wrongly() -> None:
    other = dist.new_group([0])
    out, x = torch.empty(3), torch.randn(3)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="not a member"):
            compressed_reduce_scatter(out, x, group=other)
    with pytest.raises(ValueError, match="input is a list"):
        compressed_reduce_scatter(out, [1.0], group=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sparse"):
        compressed_reduce_scatter(out, torch.eye(3).to_sparse(), group=None)


def test_wrong_arguments_get_a_sentence(ranks: RankPool) -> None:
    ranks.run(call_wrongly, 2)
