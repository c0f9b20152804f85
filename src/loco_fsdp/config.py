"""The settings of LoCo: one frozen dataclass, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Scale = Literal["block", "static"]
Feedback = Literal["moving_average", "classic", "none"]
ResidualDtype = Literal["int8", "bfloat16", "float32"]
ResidualCheckpoint = Literal["mean", "exact", "none"]

# DeepSpeed's names for the settings of its removed LoCo option.
_DEEPSPEED_KEYS = frozenset({"err_beta", "reset_T"})


@dataclass(frozen=True, kw_only=True)
class LoCoConfig:
    """How gradients are compressed, and what becomes of the rounding error.

    Every rank of a shard group must use equal settings; this is compared when the config is
    attached to a model. A bad value raises ``ValueError`` naming the setting, the value found
    and the values allowed.
    """

    bits: Literal[4, 8] = 4
    """Bits of one code on the wire."""

    block_size: int = 128
    """Elements that share one step, an even number from 16 to 8192."""

    scale: Scale = "block"
    """``block``: the step follows each block's largest element. ``static``: the paper's
    constant step ``1/static_scale``, which has to be tuned to the size of the gradients."""

    static_scale: float = 2.0**17
    """Codes per unit of gradient with ``scale="static"`` (the paper's s)."""

    static_residual_scale: float = 2.0**19
    """int8 residual codes per unit of gradient with ``scale="static"`` (the paper's s_e)."""

    feedback: Feedback = "moving_average"
    """``moving_average`` keeps ``(1 - gain) * e + gain * error``, ``classic`` keeps the whole
    error (gain 1), ``none`` forgets it."""

    feedback_gain: float = 0.2
    """Gain of the moving average, in (0, 1]. DeepSpeed's ``err_beta`` is 1 - gain."""

    residual_dtype: ResidualDtype = "int8"
    """Storage of the residual. ``int8`` is block coded: 1 byte an element and 2 a block."""

    reset_interval: int = 512
    """Optimizer steps after which all residuals become zero together; 0 is never."""

    warmup_steps: int = 0
    """First optimizer steps that reduce uncompressed."""

    skip: tuple[str, ...] = ()
    """Shell patterns of parameter names that travel uncompressed (``fnmatch``, case matters),
    beside the 1-D parameters, which always do."""

    min_numel: int = 4096
    """FSDP units with fewer elements than this travel uncompressed."""

    residual_checkpoint: ResidualCheckpoint = "mean"
    """What a checkpoint holds of the residuals. ``mean``: their mean over the ranks, which fits
    any number of ranks. ``exact``: every rank's as well, for a resume that is the same bit for
    bit. ``none``: nothing, they start at zero."""

    residual_checkpoint_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the mean in a checkpoint."""

    error_stats: bool = False
    """Measure the relative error of each call (one more pass over the gradient)."""

    def __post_init__(self) -> None:
        """Check every setting; raises ``ValueError``."""
        _check_choice("bits", self.bits, (4, 8))
        _check_choice("scale", self.scale, get_args(Scale))
        _check_choice("feedback", self.feedback, get_args(Feedback))
        _check_choice("residual_dtype", self.residual_dtype, get_args(ResidualDtype))
        _check_choice("residual_checkpoint", self.residual_checkpoint, get_args(ResidualCheckpoint))
        allowed = ("bfloat16", "float32")
        _check_choice("residual_checkpoint_dtype", self.residual_checkpoint_dtype, allowed)
        _check_int("block_size", self.block_size, minimum=16, maximum=8192)
        if self.block_size % 2:
            raise ValueError(f"block_size={self.block_size}: wanted an even number, 16 to 8192.")
        for name in ("static_scale", "static_residual_scale"):
            _check_float(name, getattr(self, name), minimum=2.0**-60, maximum=2.0**60)
        _check_float("feedback_gain", self.feedback_gain, minimum=2.0**-20, maximum=1.0)
        for name in ("reset_interval", "warmup_steps", "min_numel"):
            _check_int(name, getattr(self, name), minimum=0)
        _check_choice("error_stats", self.error_stats, (False, True))
        is_list = isinstance(self.skip, list | tuple)
        if not is_list or not all(isinstance(p, str) for p in self.skip):
            raise ValueError(f"skip={self.skip!r}: wanted a tuple of name patterns (str).")
        object.__setattr__(self, "skip", tuple(self.skip))  # YAML and JSON bring lists

    @property
    def gain(self) -> float:
        """The gain of the feedback rule in use: 1 for classic, 0 for none."""
        return {"moving_average": self.feedback_gain, "classic": 1.0, "none": 0.0}[self.feedback]

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> LoCoConfig:
        """Build a config from a mapping, also from DeepSpeed's ``{"err_beta", "reset_T"}``.

        Raises ``ValueError`` on a name that is no setting, or when both names of one are given.
        """
        known = {field.name for field in fields(cls)}
        translated = dict(settings)
        if "err_beta" in translated:
            _check_float("err_beta", translated["err_beta"], minimum=0.0, maximum=1 - 2.0**-20)
            _rename(
                translated, "err_beta", "feedback_gain", round(1.0 - translated["err_beta"], 12)
            )
        if "reset_T" in translated:
            _check_int("reset_T", translated["reset_T"], minimum=0)
            _rename(translated, "reset_T", "reset_interval", translated["reset_T"])
        unknown = sorted(str(name) for name in set(translated) - known)
        if unknown:
            allowed = ", ".join(sorted(known | _DEEPSPEED_KEYS))
            raise ValueError(f"{', '.join(unknown)}: no such setting. Allowed: {allowed}.")
        return cls(**translated)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values; ``from_dict`` reads them back."""
        return asdict(self)


def _rename(settings: dict[str, Any], foreign: str, ours: str, value: Any) -> None:
    if ours in settings:
        raise ValueError(f"{foreign} and {ours} are one setting: give only one of them.")
    del settings[foreign]
    settings[ours] = value


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    # True == 1 in Python: the type has to agree too.
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        listed = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{name}={value!r}: wanted one of {listed}.")


def _check_int(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> None:
    top = "or more" if maximum is None else f"to {maximum}"
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < minimum or (maximum is not None and value > maximum):
        raise ValueError(f"{name}={value!r}: wanted an integer, {minimum} {top}.")


def _check_float(name: str, value: Any, *, minimum: float, maximum: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= maximum:
        raise ValueError(f"{name}={value!r}: wanted a number from {minimum:g} to {maximum:g}.")
