"""The bytes that the figures speak of are the bytes that the network carries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from fcntl import ioctl
from math import ceil, prod
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, socket
from struct import pack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from distributed.models import Probe, gradients, to_rows
from loco_fsdp import (
    CommStats,
    LoCoConfig,
    ResidualState,
    attach,
    compressed_reduce_scatter,
    reference,
)
from rank_pool import RankPool

TESTS = Path(__file__).parents[1]

# Linux: ioctl request and flags that bring an interface up.
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40


def sent_over_loopback() -> int:
    """Bytes of packets that this network namespace's loopback has sent, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    raise AssertionError("no loopback in /proc/net/dev")


def measure(reduce: Callable[[], None], sent: Callable[[], int]) -> dict[str, int]:
    """What the loopback carries, and what this rank says it has sent, in one round."""
    reduce()  # connections are made, residuals allocated
    rounds = []
    for _ in range(4):
        dist.barrier()
        before, sent_before = sent_over_loopback(), sent()
        dist.barrier()
        reduce()
        reduce()
        dist.barrier()
        rounds.append({"carried": sent_over_loopback() - before, "sent": sent() - sent_before})
    # TCP sends packets again on a busy machine, which only adds: the quietest round counts.
    return min(rounds, key=lambda figures: figures["carried"])


def fsdp_traffic(warmup_steps: int) -> dict[str, int]:
    """Forward and backward of two units, which reduce and do nothing else: they stay gathered."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)))
    for module in (*model, model):
        fully_shard(module)
        assert isinstance(module, FSDPModule)
        module.set_reshard_after_forward(False)
        module.set_reshard_after_backward(False)
    handle = attach(model, LoCoConfig(warmup_steps=warmup_steps))
    x = torch.randn(4, 1024)

    def reduce() -> None:
        loss: Tensor = model(x).square().mean()
        loss.backward()

    return measure(reduce, lambda: sum(stats.bytes_sent for stats in handle.stats()))


def plain_traffic() -> dict[str, int]:
    """A compressed reduce-scatter by itself, of 4 Mi elements."""
    world_size = dist.get_world_size()
    numel = 2**22 // world_size
    x = torch.randn(world_size * numel)
    output, state = torch.empty(numel), ResidualState()
    sent = 0

    def reduce() -> None:
        nonlocal sent
        compressed_reduce_scatter(output, x, state=state)
        sent += (world_size - 1) * numel * 33 // 64  # 4 bits a code, 16 a step of 128 codes

    return measure(reduce, lambda: sent)


def main() -> None:
    """Measure in a fresh network namespace, where nothing else uses the loopback."""
    with socket(AF_INET, SOCK_DGRAM) as control:
        ioctl(control, SIOCSIFFLAGS, pack("16sH14s", b"lo", IFF_UP | IFF_RUNNING, b""))
    pool = RankPool()
    results = {
        world_size: {
            "fsdp": pool.run(fsdp_traffic, world_size, 0),
            "warm-up": pool.run(fsdp_traffic, world_size, 100),
            "plain": pool.run(plain_traffic, world_size),
        }
        for world_size in (2, 3)
    }
    pool.close()
    print(json.dumps(results))


def namespace_command() -> list[str]:
    """What runs a command in a network namespace of its own; skips if that is not permitted."""
    for flags in (["--net"], ["--net", "--map-root-user"]):
        try:
            subprocess.run(["unshare", *flags, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return ["unshare", *flags]
    pytest.skip("network namespaces are not permitted here (unshare --net)")


def test_figures_agree_with_the_network() -> None:
    """``bytes_sent`` of all ranks within 3 % of what /proc/net/dev counts, TCP headers included."""
    paths = [str(TESTS), str(TESTS / "distributed"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [*namespace_command(), sys.executable, "-c", "import test_traffic; test_traffic.main()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for world_size, results in json.loads(done.stdout).items():
        assert results.keys() == {"fsdp", "warm-up", "plain"}
        for name, ranks in results.items():
            sent = sum(figures["sent"] for figures in ranks)
            for figures in ranks:  # each rank has read the counter by itself
                excess = figures["carried"] / sent - 1
                assert abs(excess) < 0.03, (world_size, name, figures["carried"], sent)
        assert results["warm-up"][0]["sent"] / results["fsdp"][0]["sent"] > 7.7


SHAPES = {"weight": (7, 40), "skipped": (4, 6), "bias": (5,)}


def figures_of_a_unit() -> Any:
    """One unit's figures after two calls, with what they have to be."""
    config = LoCoConfig(min_numel=0, skip=("skipped",), error_stats=True)
    model = Probe(SHAPES)
    fully_shard(model)
    handle = attach(model, config)
    fresh = handle.stats()
    world_size = dist.get_world_size()
    for step in range(2):
        e = to_rows(handle.residual("weight"), world_size)
        given = gradients(SHAPES, step)
        model(given).backward()
    h = reference.compensate(to_rows(given["weight"], world_size), e)
    decoded = reference.decompress(reference.compress(h, config), h.shape[1], config)
    error = float((h - decoded).norm() / h.norm())
    [stats] = handle.stats()
    given["weight"][3, 3] = torch.inf
    given["weight"][6, 39] = torch.nan
    given["bias"][0] = torch.nan  # in full precision: no block
    model(given).backward()
    residual_norm = float(handle.residual("weight").norm())
    return fresh, stats, error, handle.stats()[0], residual_norm


@pytest.mark.parametrize("world_size", [2, 3])
def test_figures_of_a_unit(ranks: RankPool, world_size: int) -> None:
    rows = [ceil(shape[0] / world_size) * prod(shape[1:]) for shape in SHAPES.values()]
    peers = world_size - 1
    blocks = ceil(rows[0] / 128)
    # Header, codes of whole blocks, steps, and 4 bytes for each element in full precision.
    parts = [16, 64 * blocks, 2 * blocks, *(4 * count for count in rows[1:])]
    for fresh, stats, error, last, residual_norm in ranks.run(figures_of_a_unit, world_size):
        assert fresh == [
            CommStats(
                unit="root",
                calls=0,
                bytes_sent=0,
                bytes_bf16=0,
                bytes_fp32=0,
                relative_error=None,
                residual_norm=0.0,
                nonfinite_blocks=0,
            )
        ]
        assert (stats.unit, stats.calls, stats.nonfinite_blocks) == ("root", 2, 0)
        assert stats.bytes_sent == 2 * peers * sum(16 * ceil(size / 16) for size in parts)
        assert stats.bytes_bf16 == 2 * peers * 2 * sum(rows)
        assert stats.bytes_fp32 == 2 * peers * 4 * sum(rows)
        assert stats.relative_error == pytest.approx(error, rel=1e-6)
        assert last.calls == 3
        assert last.nonfinite_blocks == 2
        assert last.residual_norm == pytest.approx(residual_norm, rel=1e-6)
        assert 0 < residual_norm < float("inf")
