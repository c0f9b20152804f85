"""One FSDP unit: its parameters, their residuals, and one compressed reduction after another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp._torch import reduce_factor
from loco_fsdp.config import LoCoConfig
from loco_fsdp.feedback import ResidualBuffer, ResidualState
from loco_fsdp.kernels import CallStats
from loco_fsdp.layout import (
    UnitParameter,
    exemptions,
    full_to_rows,
    rows_to_full,
    summarize,
    unit_layout,
)
from loco_fsdp.metrics import CommStats, UnitSummary
from loco_fsdp.payload import PayloadLayout
from loco_fsdp.reduce_scatter import exchange, raise_mismatch

MAX_LAYOUTS = 256  # remembered for a unit


class Unit:
    """The gradients that one reduce-scatter reduces, and what is remembered about them."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[UnitParameter],
        group: dist.ProcessGroup,
        config: LoCoConfig,
        *,
        reduce_dtype: torch.dtype,
        device: torch.device,
        is_trainable: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.name = name
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self.group = group
        self.world_size = group.size()
        self.config = config
        self.exempt = exemptions(parameters, config, self.world_size)
        # One rank compresses nothing, but what a job of more ranks has left has to pass through.
        elsewhere = exemptions(parameters, config, max(2, self.world_size))
        self.compressible = tuple(name for name in self.parameters if name not in elsewhere)
        """Names of the parameters that are compressed wherever there are several ranks."""
        self.calls = 0
        self._reduce_dtype = reduce_dtype
        self._device = device
        self._is_trainable = is_trainable
        self._residuals = {
            name: ResidualState(config)
            for name in self.parameters
            if name not in self.exempt and config.feedback != "none"
        }
        self._buffer: ResidualBuffer | None = None
        self._layouts: dict[Any, PayloadLayout] = {}
        self._broken: str | None = None
        self._mismatch: tuple[Tensor, PayloadLayout] | None = None
        self.bytes_sent = self._elements_sent = 0
        self._nonfinite: Tensor | None = None
        self._last_call: CallStats | None = None

    def reduce(
        self,
        output: Tensor,
        buffer: Tensor,
        op: Any,
        *,
        trainable: Collection[str],
        in_buffer: Collection[str],
        with_gradient: Collection[str],
        compressed: bool,
        loss_scale: Tensor | None,
    ) -> None:
        """Reduce one flat gradient buffer into this rank's share.

        Args:
            output: ``[N]``, any float dtype, written.
            buffer: ``[W * N]``, FSDP's reduce-scatter input.
            op: AVG, SUM or PREMUL_SUM.
            trainable: names that have a place in the payload.
            in_buffer: names that lie in ``buffer``.
            with_gradient: those of them that got a gradient; the others keep their residual.
            compressed: False sends everything in full precision (warm-up).
            loss_scale: 0-d, the gradients' scale; None: they are not scaled.

        Raises:
            RuntimeError: the unit broke before, or the ranks sent different layouts.

        """
        self._require_sound()
        try:
            layout = self._layout(trainable, in_buffer, buffer.dtype, compressed)
            rows = self._rows(buffer, layout)
            stats = self._new_stats()
            mismatch = exchange(
                output,
                rows,
                layout,
                self._memory(trainable) if compressed else None,
                with_gradient,
                group=self.group,
                factor=reduce_factor(op, self.world_size),
                stats=stats,
                loss_scale=loss_scale,
            )
            # The GPU is not waited for here: `check` reads its flag once a step.
            self._keep_mismatch(mismatch, layout)
            if buffer.device.type == "cpu":
                self.check()
        except BaseException as error:
            # The residual may have moved on while the gradient never arrived.
            self._broken = self._broken or f"{type(error).__name__}: {error}"
            error.add_note(f"This happened in the reduction of FSDP unit '{self.name}'.")
            raise
        self._count(layout, stats)

    @property
    def is_broken(self) -> bool:
        """True from a failed exchange until ``reset``."""
        return self._broken is not None

    def check(self) -> None:
        """Raise ``RuntimeError`` if the unit is broken, or turns out to be.

        It is if the ranks of a past reduction sent different layouts.
        """
        self._require_sound()
        if self._mismatch is None:
            return
        flag, layout = self._mismatch
        self._mismatch = None
        if flag:
            self._broken = "the ranks sent different layouts"
            raise_mismatch(f"FSDP unit '{self.name}'", layout, self.group)

    def forget(self, names: Collection[str] | None = None) -> None:
        """Set the residuals to 0: all of them, or those of some parameters."""
        for name, residual in self._residuals.items():
            if names is None or name in names:
                residual.reset()

    def reset(self) -> None:
        """Set the residuals to 0; a broken unit is whole again."""
        self.forget()
        self._broken = self._mismatch = None

    def residual(self, name: str) -> Tensor:
        """This rank's residual of one parameter: float32, the parameter's full shape."""
        self._require_sound()
        parameter, state = self.parameters[name], self._state(name)
        if state.shape is None:
            return torch.zeros(parameter.shape, dtype=torch.float32, device=self._device)
        return rows_to_full(state.dense(), parameter)

    def load_residual(self, name: str, values: Tensor) -> None:
        """Set this rank's residual of one parameter from its full shape."""
        parameter, state = self.parameters[name], self._state(name)
        if tuple(values.shape) != parameter.shape:
            raise ValueError(
                f"residual of '{name}' has shape {tuple(values.shape)}: wanted {parameter.shape}."
            )
        self._memory({name})
        state.load_dense(full_to_rows(values.to(self._device), parameter, self.world_size))

    def planned_bytes(self) -> int:
        """Bytes that the residuals of this unit hold on this rank, once allocated."""
        return sum(
            ResidualState.planned_bytes(self.world_size, p.row_numel, self.config)
            for p in self.parameters.values()
            if p.name in self._residuals and (self._is_trainable(p.name) or p.name in self.held)
        )

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced and residuals lie."""
        return self._device

    @property
    def held(self) -> set[str]:
        """Names of the parameters whose residual this rank has allocated."""
        return {name for name, state in self._residuals.items() if state.shape is not None}

    def rows(self, name: str) -> Tensor:
        """This rank's residual of one parameter: float32 ``[W, row_numel]``, FSDP's chunks."""
        self._require_sound()
        if name in self.held:
            return self._residuals[name].dense()
        shape = self.world_size, self.parameters[name].row_numel
        return torch.zeros(shape, dtype=torch.float32, device=self._device)

    def encoded(self, name: str) -> tuple[Tensor, Tensor]:
        """The residual of a held parameter as it is stored, see ``ResidualState.encoded``."""
        self._require_sound()
        return self._residuals[name].encoded()

    def load_rows(self, name: str, rows: Tensor) -> None:
        """Undo ``rows``; a job of one rank keeps what it is given for the next one."""
        self._residuals.setdefault(name, ResidualState(self.config))
        self.load_residual(name, rows_to_full(rows, self.parameters[name]))

    def stats(self) -> CommStats:
        """Figures so far; reading them waits for the device."""
        norms = [r.norm() for r in self._residuals.values() if r.shape is not None]
        return CommStats(
            unit=self.name,
            calls=self.calls,
            bytes_sent=self.bytes_sent,
            bytes_bf16=2 * self._elements_sent,
            bytes_fp32=4 * self._elements_sent,
            relative_error=None if self._last_call is None else self._last_call.relative_error(),
            residual_norm=sum(norm**2 for norm in norms) ** 0.5,
            nonfinite_blocks=0 if self._nonfinite is None else int(self._nonfinite),
        )

    def summary(self) -> UnitSummary:
        """The unit's row of the table, for a reduction of all its parameters."""
        names = [name for name in self.parameters if self._is_trainable(name)]
        layout = self._layout(names, names, self._reduce_dtype, compressed=True)
        peers = self.world_size - 1 if names else 0  # FSDP reduces nothing where all is frozen
        reasons = [self.exempt.get(n) if n in names else "frozen" for n in self.parameters]
        exempt = summarize([reason for reason in reasons if reason is not None])
        if None in reasons:
            exempt = f"yes, except {exempt}" if exempt else "yes"
        return UnitSummary(
            unit=self.name,
            parameters=len(self.parameters),
            elements=sum(parameter.numel for parameter in self.parameters.values()),
            compressed=exempt,
            bytes_before=peers * layout.row_numel * self._reduce_dtype.itemsize,
            bytes_after=peers * layout.row_bytes,
            residual_bytes=self.planned_bytes(),
        )

    def agreement(self) -> str:
        """What has to be equal on all ranks of the group, in words."""
        listed = (f"{p.name} {list(p.shape)} dim {p.shard_dim}" for p in self.parameters.values())
        return f"unit '{self.name}': {'; '.join(listed)}"

    def _layout(
        self,
        trainable: Collection[str],
        in_buffer: Collection[str],
        dtype: torch.dtype,
        compressed: bool,
    ) -> PayloadLayout:
        key = (frozenset(trainable), frozenset(in_buffer), dtype, compressed)
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()  # layers dropped at random make a new set each time
        if key not in self._layouts:
            self._layouts[key] = unit_layout(
                list(self.parameters.values()),
                self.config,
                exempt=self.exempt if compressed else self.parameters.keys(),
                trainable=trainable,
                in_buffer=in_buffer,
                reduce_dtype=dtype,
            )
        return self._layouts[key]

    def _rows(self, buffer: Tensor, layout: PayloadLayout) -> Tensor:
        if buffer.numel() != self.world_size * layout.row_numel:
            raise RuntimeError(
                f"FSDP unit '{self.name}': the gradient buffer has {buffer.numel()} elements, "
                f"wanted {self.world_size * layout.row_numel} for {layout.describe()}."
            )
        return buffer.view(self.world_size, -1)

    def _memory(self, names: Collection[str]) -> ResidualBuffer | None:
        """Return the memory of the unit's residuals; it has room for these parameters' by now.

        Frozen parameters take none. Only one that is trained later makes it grow.
        """
        held = self.held
        wanted = [n for n in self.parameters if n in self._residuals and n in held | set(names)]
        if self.world_size > 1 and len(wanted) > len(held):
            sizes = {name: self.parameters[name].row_numel for name in wanted}
            buffer = ResidualBuffer(self.config, self.world_size, sizes, self._device)
            for name in wanted:
                self._residuals[name].move(buffer, name)
            self._buffer = buffer
        return self._buffer

    def _new_stats(self) -> CallStats:
        if self._nonfinite is None:
            self._nonfinite = torch.zeros((), dtype=torch.int64, device=self._device)
        return CallStats(self._nonfinite, measure=self.config.error_stats)

    def _keep_mismatch(self, flag: Tensor, layout: PayloadLayout) -> None:
        if self._mismatch is not None:
            earlier, first_layout = self._mismatch
            flag, layout = earlier | flag, first_layout
        self._mismatch = (flag, layout)

    def _count(self, layout: PayloadLayout, stats: CallStats) -> None:
        peers = self.world_size - 1
        self.calls += 1
        self.bytes_sent += peers * layout.row_bytes
        self._elements_sent += peers * layout.row_numel
        self._last_call = stats

    def _state(self, name: str) -> ResidualState:
        if name in self._residuals:
            return self._residuals[name]
        if name in self.exempt:
            raise ValueError(
                f"'{name}' has no residual, it is not compressed: {self.exempt[name]}."
            )
        raise ValueError(f"'{name}' has no residual: feedback=\"none\".")

    def _require_sound(self) -> None:
        if self._broken is not None:
            raise RuntimeError(
                f"FSDP unit '{self.name}' is broken since an exchange failed ({self._broken}): its "
                "residual may be half updated. Call optimizer.loco.reset() on every rank, or "
                "restart from a checkpoint."
            )
