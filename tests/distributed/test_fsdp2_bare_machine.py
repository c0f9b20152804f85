"""Nothing but torch is needed to run on CPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError from here on
rank, store = int(sys.argv[1]), sys.argv[2]
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from loco_fsdp import LoCoConfig, LoCoOptimizer
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Linear(24, 8)
fully_shard(model)
before = model.weight.full_tensor().clone()
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = LoCoOptimizer(inner, model, LoCoConfig(min_numel=0))
model(torch.ones(2, 24) * (rank + 1)).square().sum().backward()
optimizer.step()
assert not torch.equal(model.weight.full_tensor(), before)
assert optimizer.loco.stats()[0].calls == 1
assert "triton" not in {name.split(".")[0] for name, module in sys.modules.items() if module}
dist.barrier()
dist.destroy_process_group()
"""


def test_runs_without_triton(tmp_path: Path) -> None:
    """Field case 12: import and a 2-rank CPU step where Triton cannot be imported."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
