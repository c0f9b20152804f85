"""The handle on a model whose gradients are compressed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from torch import Tensor

from loco_fsdp.checkpoint import (
    RESIDUAL,
    Entry,
    Meta,
    ShardedParameter,
    collect,
    has_residual,
    restore,
    saved_keys,
    validate,
)
from loco_fsdp.config import LoCoConfig
from loco_fsdp.metrics import CommStats, UnitSummary, format_table
from loco_fsdp.unit import Unit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SkippedUnit:
    """A unit that FSDP reduces as ever, and why."""

    name: str
    reason: str
    parameters: int
    elements: int
    num_bytes: int
    """Sent by this rank in one reduction, in the unit's reduce dtype."""


class Installation(Protocol):
    """What an adapter has put into the framework."""

    def undo(self) -> None:
        """Give the framework its plain collectives back."""

    def replaced(self) -> list[str]:
        """Names of the units that someone else has given another collective since."""

    def compressible_parameters(self) -> list[ShardedParameter]:
        """The parameters that may have a residual, as they are sharded now."""

    def recover(self) -> None:
        """Make the framework forget a backward that an exception has ended."""


class LoCoHandle:
    """What ``attach`` returns: figures, residuals, and the way back.

    Everything here is about this rank. ``LoCoOptimizer`` calls ``check`` and ``step``; a loop of
    your own around ``attach`` has to call ``step()`` after each optimizer step.
    """

    def __init__(
        self,
        config: LoCoConfig,
        units: Sequence[Unit],
        skipped: Sequence[SkippedUnit],
        installation: Installation,
    ) -> None:
        self.config = config
        self.units = tuple(units)
        self.skipped = tuple(skipped)
        self.steps = 0
        """Optimizer steps so far that followed at least one reduction."""
        self.loss_scale: Callable[[], Tensor | None] = lambda: None
        """Returns the scale of the gradients now, a 0-d tensor, or None if they carry none."""
        self.saved_ranks: int | None = None
        """Data-parallel ranks of the job whose ``exact`` checkpoint is loaded next, if they are
        not as many as here: its rows then fit. Loading clears it."""
        self.attached = True
        self._installation = installation
        self._calls_at_last_step = 0

    @property
    def compressing(self) -> bool:
        """False during the warm-up steps, which reduce in full precision."""
        return self.steps >= self.config.warmup_steps

    @property
    def has_reduced(self) -> bool:
        """True if gradients were reduced since the last step, or since they were cleared."""
        return self._calls() != self._calls_at_last_step

    def forget_reduction(self) -> None:
        """The gradients that were reduced are gone: no step will follow that uses them."""
        self._calls_at_last_step = self._calls()

    def check(self) -> None:
        """Raise ``RuntimeError`` if the gradients are not what a step should use.

        That is if a unit is broken, if ranks sent different layouts (on GPUs this is where it is
        found out), or if a unit is not compressed any more. It belongs before the step.
        """
        for unit in self.units:
            unit.check()
        replaced = self._installation.replaced() if self.attached else []
        if replaced:
            raise RuntimeError(
                f"FSDP unit {', '.join(map(repr, replaced))}: another reduce-scatter was set after "
                "LoCo was attached, so its gradients are not compressed. Attach LoCo after it, or "
                "call detach() to do without."
            )

    def step(self) -> None:
        """Count one optimizer step, and reset the residuals when it is time.

        Does nothing if nothing was reduced since the last call.
        """
        self.check()
        if not self.has_reduced:
            return
        self.forget_reduction()
        self.saved_ranks = None  # nothing was loaded, and a job that trains saves its own rows
        self.steps += 1
        interval = self.config.reset_interval
        if interval and self.steps % interval == 0:
            for unit in self.units:
                unit.forget()

    def detach(self) -> None:
        """Give FSDP its plain collective back, bit for bit; the residuals stay readable."""
        if self.attached:
            self.attached = False
            self._installation.undo()

    def reset(self) -> None:
        """Set all residuals to 0; broken units are whole again. Call it on every rank.

        After a failed backward it also makes FSDP forget that one, as
        ``model.reset_iter_state()`` does (torch 2.13 or later; restart the job before).
        """
        if any(unit.is_broken for unit in self.units):
            self._installation.recover()
        for unit in self.units:
            unit.reset()

    def compressible_parameters(self) -> list[ShardedParameter]:
        """The parameters that may have a residual, as they are sharded now."""
        return self._installation.compressible_parameters()

    def state_dict(self, *, is_untouched: bool = False) -> dict[str, dict[str, Tensor]]:
        """Return what a checkpoint needs: parameter name -> tensors, all of them copies.

        Collective: every rank has to call it. `LoCoOptimizer.state_dict` has it in it already; this
        is for jobs that save their own way, and makes the handle a DCP ``Stateful``. Each
        parameter that may be compressed has ``loco_meta`` and, by ``config.residual_checkpoint``,
        ``loco_residual`` (DTensor, placed like the parameter) and ``loco_residual_rows`` (float32
        DTensor ``[ranks, *shape]``).

        ``is_untouched`` says that the optimizer has done no step. Raises ``RuntimeError`` while a
        unit is broken.
        """
        for unit in self.units:
            unit.check()
        parameters = self.compressible_parameters()
        meta = Meta.of(self.config, self.steps, is_untouched)
        names = [parameter.name for parameter in parameters]
        return dict(zip(names, collect(parameters, meta, self.saved_ranks), strict=True))

    def load_state_dict(
        self, state_dict: Mapping[str, Entry], *, only: Collection[str] | None = None
    ) -> None:
        """Continue where ``state_dict()`` was called, also on another number of ranks.

        Collective. Broken units are whole again. Residuals that are not in ``state_dict`` become
        0, and a warning says so. ``only``: the names of the parameters to load, all by default.
        Raises ``ValueError`` on an unknown format version, a tensor of a wrong shape or one that
        is not finite, on every rank and before anything is changed.
        """
        found = self._entries(state_dict, only)
        validate(found)
        metas = [meta for _, entry in found if (meta := Meta.read(entry)) is not None]
        if any(unit.is_broken for unit in self.units):
            self.reset()
        for p, _ in found:
            p.unit.forget([p.name])
        self.steps = metas[0].steps if metas else 0
        self.forget_reduction()
        self.saved_ranks = None
        restore(found)
        self._warn_of_missing(found, state_dict)

    def validate(
        self, state_dict: Mapping[str, Entry], *, only: Collection[str] | None = None
    ) -> None:
        """Raise what ``load_state_dict`` would, and load nothing. Collective."""
        validate(self._entries(state_dict, only))

    def _entries(
        self, state_dict: Mapping[str, Entry], only: Collection[str] | None
    ) -> list[tuple[ShardedParameter, Entry]]:
        return [
            (p, state_dict.get(p.name, {}))
            for p in self.compressible_parameters()
            if only is None or p.name in only
        ]

    def _warn_of_missing(
        self, found: Sequence[tuple[ShardedParameter, Entry]], state_dict: Mapping[str, Entry]
    ) -> None:
        wanted = RESIDUAL in saved_keys(self.config)
        names = [p.name for p, entry in found if p.ranks > 1 and not has_residual(entry)]
        if names and wanted:
            logger.warning(
                "LoCo: the loaded state has no residual for %d of %d compressed parameters, such "
                "as '%s': they start at zero.",
                *(len(names), len(found), names[0]),
            )
        left = state_dict.keys() - {p.name for p, _ in found}
        left = {name for name in left if has_residual(state_dict[name])}
        if left:
            logger.warning(
                "LoCo: the loaded state has residuals of %d parameters that are not compressed "
                "here, such as '%s': they are dropped.",
                *(len(left), min(left)),
            )

    def residual(self, fqn: str) -> Tensor:
        """Return this rank's residual of one parameter.

        Float32, in the parameter's full, unsharded shape, in units of unscaled gradients as FSDP
        hands them over: in float16 it has divided them before, which checkpoints undo. Zeros
        before the first reduction. Raises ``KeyError`` for an unknown name and ``ValueError``
        for a parameter that is not compressed.
        """
        return self._find(fqn).residual(fqn)

    def load_residual(self, fqn: str, tensor: Tensor) -> None:
        """Set this rank's residual of one parameter; inverse of ``residual``.

        Raises as ``residual`` does, and ``ValueError`` on a wrong shape or non-finite values.
        """
        self._find(fqn).load_residual(fqn, tensor)

    def memory_bytes(self) -> int:
        """Bytes of residual that this rank holds once training has begun.

        Known before the first step. The figure is about one byte for each unsharded element.
        """
        return sum(unit.planned_bytes() for unit in self.units)

    @property
    def bytes_sent(self) -> int:
        """Gradient bytes that left this rank since LoCo was attached; waits for nothing."""
        return sum(unit.bytes_sent for unit in self.units)

    def stats(self) -> list[CommStats]:
        """Figures of each unit since it was attached; waits for the device."""
        return [unit.stats() for unit in self.units]

    def describe(self) -> str:
        """Return a table of all units: what is compressed, why not, and what it saves."""
        rows = [unit.summary() for unit in self.units]
        rows += [
            UnitSummary(
                unit=unit.name,
                parameters=unit.parameters,
                elements=unit.elements,
                compressed=f"no: {unit.reason}",
                bytes_before=unit.num_bytes,
                bytes_after=unit.num_bytes,
                residual_bytes=0,
            )
            for unit in self.skipped
        ]
        return format_table(rows)

    def _calls(self) -> int:
        return sum(unit.calls for unit in self.units)

    def _find(self, fqn: str) -> Unit:
        for unit in self.units:
            if fqn in unit.parameters:
                return unit
        names = [name for unit in self.units for name in unit.parameters]
        close = get_close_matches(fqn, names, n=3) or names[:3]
        raise KeyError(f"no FSDP unit holds a parameter '{fqn}'; there is {', '.join(close)}.")
