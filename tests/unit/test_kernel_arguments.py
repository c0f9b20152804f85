"""Tensors that do not fit a table are refused before a byte is read or written.

The kernels do not look at sizes: a payload that is too short would be written beyond its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_calls import cut_into_segments
from loco_fsdp import LoCoConfig, kernels
from loco_fsdp.feedback import ResidualBuffer
from loco_fsdp.kernels import CallStats, WorkTable
from loco_fsdp.payload import PayloadLayout
from strategies import values_of_kind

CPU = torch.device("cpu")
ROWS = 3
SEGMENTS = tuple(cut_into_segments([300, 48, 130], ["codes", "values", "codes"]))

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one less": lambda t: t[..., :-1].contiguous(),
    "one more": lambda t: torch.cat([t, t[..., :1]], dim=-1),
    "a row less": lambda t: t[:-1].contiguous(),
    "a row more": lambda t: torch.cat([t, t[:1]]),
    "empty": lambda t: t[:0],
    "flat": lambda t: t.flatten(),
    "one dimension more": lambda t: t[None],
    "transposed": lambda t: t.T.contiguous().T,
    "float16": lambda t: t.half(),
    "float64": lambda t: t.double(),
    "int8": lambda t: t.to(torch.int8),
    "meta": lambda t: t.to("meta"),
}
WRONG = [
    *((name, change) for name in ("x", "payload") for change in CHANGES),
    *(("output", change) for change in ("one less", "one more", "empty", "meta")),
    ("output", "one dimension more"),
    *(
        (name, change)
        for name in ("loss_scale", "nonfinite_blocks")
        for change in ("one dimension more", "float16", "float64", "int8", "meta")
    ),
]


class Call:
    """Tensors that fit a unit of three segments, two of them with memory."""

    def __init__(self, config: LoCoConfig | None = None) -> None:
        self.layout = PayloadLayout(config or LoCoConfig(), SEGMENTS)
        self.residuals = ResidualBuffer(self.layout.config, ROWS, {"0": 300, "2": 130}, CPU)
        self.tensors = {
            "x": values_of_kind("normal", (ROWS, 478), 0),
            "payload": torch.zeros(ROWS, self.layout.row_bytes, dtype=torch.uint8),
            "nonfinite_blocks": torch.zeros((), dtype=torch.int64),
            "loss_scale": torch.ones(()),
            "output": torch.zeros(478),
        }

    def table(self) -> WorkTable:
        return kernels.work_table(self.layout, self.residuals, {"0", "2"}, CPU)

    def run(self, **other: Tensor) -> None:
        """Compress and reduce, with some tensors exchanged for others."""
        t = {**self.tensors, **other}
        if other.keys() != {"output"}:
            stats = CallStats(t["nonfinite_blocks"])
            kernels.compress(t["x"], self.table(), t["payload"], stats, t["loss_scale"])
        kernels.reduce(t["payload"], self.table(), t["output"], 0.5)

    def contents(self) -> list[Tensor]:
        """Copies of everything that a call may write."""
        written = ("payload", "nonfinite_blocks", "output")
        parts = [*(self.tensors[name] for name in written), self.residuals.data]
        return [tensor.clone() for tensor in (*parts, self.residuals.steps)]


@pytest.mark.parametrize(("name", "change"), WRONG)
def test_tensor_that_does_not_fit(name: str, change: str) -> None:
    """Size, rows, dimensions, strides, dtype and device of each: named, with what is wanted."""
    call = Call()
    before = call.contents()
    right = call.tensors[name]
    wrong = CHANGES[change](right)
    with pytest.raises(ValueError, match=name) as raised:
        call.run(**{name: wrong})
    for part in (wrong.dtype, right.dtype, list(wrong.shape), list(right.shape), wrong.device):
        assert str(part) in str(raised.value)
    assert all(torch.equal(a, b) for a, b in zip(before, call.contents(), strict=True))


def test_received_rows_of_another_layout() -> None:
    """``reduce`` alone, as behind an exchange: any number of rows, but whole ones."""
    call = Call()
    call.run()
    whole = call.tensors["payload"]
    for wrong in (whole[:, :-16].contiguous(), whole.view(torch.int8), whole[0]):
        with pytest.raises(ValueError, match="payload"):
            kernels.reduce(wrong, call.table(), call.tensors["output"], 0.5)
    kernels.reduce(whole[:1], call.table(), call.tensors["output"], 0.5)


@pytest.mark.parametrize(
    "other", [{"block_size": 64}, {"block_size": 256}, {"scale": "static"}], ids=str
)
def test_residual_of_other_settings(other: dict[str, Any]) -> None:
    """Its blocks would lie elsewhere, or their steps be missing."""
    call = Call()
    call.residuals = ResidualBuffer(LoCoConfig(**other), ROWS, {"0": 300, "2": 130}, CPU)
    with pytest.raises(ValueError, match=r"residual of 0 has rows of 300 elements"):
        call.run()


@pytest.mark.parametrize(("rows", "numel"), [(2, 300), (4, 300), (3, 299), (3, 301)])
def test_residual_of_another_shape(rows: int, numel: int) -> None:
    call = Call()
    call.residuals = ResidualBuffer(call.layout.config, rows, {"0": numel, "2": 130}, CPU)
    before = call.contents()
    with pytest.raises(ValueError, match=r"residual of 0 has|x is .* wanted"):
        call.run()
    assert all(torch.equal(a, b) for a, b in zip(before, call.contents(), strict=True))
