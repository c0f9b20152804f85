"""The README shows code that runs: all its Python blocks, in order, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rank_pool import RankPool

README = Path(__file__).parents[2] / "README.md"


class Model(nn.Module):
    """Something with ``layers``, as the README's model has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


def run_blocks(blocks: list[str], folder: Path) -> tuple[int, float]:
    names = {
        "model": Model(),
        "batches": [torch.randn(4, 64) for _ in range(3)],
        "group": dist.group.WORLD,
        "folder": folder,
        "torch": torch,
    }
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    calls = sum(unit.calls for unit in names["optimizer"].loco.stats())  # type: ignore[attr-defined]
    difference = names["decoded"] - names["h"]  # type: ignore[operator]
    return calls, (difference.norm() / names["h"].norm()).item()  # type: ignore[attr-defined]


def test_python_blocks_run(ranks: RankPool, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    for calls, error in ranks.run(run_blocks, 2, blocks, tmp_path):
        assert calls == 2 * 3  # two units compress, three batches
        assert 0.08 < error < 0.13


def test_settings_table_is_complete() -> None:
    from dataclasses import fields

    from loco_fsdp import LoCoConfig

    table = README.read_text().split("## Settings")[1].split("##")[0]
    for field in fields(LoCoConfig):
        assert f"`{field.name}`" in table, field.name


def test_files_named_exist() -> None:
    text = README.read_text()
    for path in re.findall(r"\((docs/[^)]+)\)|`((?:src|scripts|tests|configs)/[^`\s]+)`", text):
        (named,) = filter(None, path)
        assert (README.parent / named).exists(), named
