"""Settings of a training run: keyword-only dataclasses, read from YAML and flags by jsonargparse.

Each class checks itself when it is built: a bad value raises ``ValueError`` naming the setting,
the value found and the values allowed. All are frozen, so a run keeps the settings it logged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from loco_fsdp import LoCoConfig

DtypeName = Literal["float32", "bfloat16"]
DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class MoESettings:
    """A mixture of experts in place of each block's feed-forward layer."""

    num_experts: int = 4
    """Experts per block."""

    experts_per_token: int = 2
    """Experts that each token is sent to, at most ``num_experts``."""

    balance_weight: float = 0.01
    """Weight of the load-balancing loss beside the cross-entropy."""

    def __post_init__(self) -> None:
        """Check every setting; raises ``ValueError``."""
        _check_number("num_experts", self.num_experts, minimum=1)
        top = self.num_experts
        _check_number("experts_per_token", self.experts_per_token, minimum=1, maximum=top)
        _check_number("balance_weight", self.balance_weight, minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Shape of the LLaMA-style decoder."""

    vocab_size: int = 256
    """Tokens in the vocabulary. Text is read as bytes, so 256 is right for text."""

    dim: int = 128
    """Width of the residual stream."""

    num_layers: int = 4
    """Decoder blocks; each is one FSDP unit."""

    num_heads: int = 4
    """Query heads; must divide ``dim`` into an even head size (rotary pairs)."""

    num_kv_heads: int = 2
    """Key and value heads, shared by groups of query heads; must divide ``num_heads``."""

    ffn_dim: int = 384
    """Inner width of the feed-forward layer, or of each expert."""

    rope_base: float = 10000.0
    """Base of the rotary embedding's wavelengths."""

    moe: MoESettings | None = None
    """Experts, or null for the dense model."""

    def __post_init__(self) -> None:
        """Check every setting; raises ``ValueError``."""
        for name in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim"):
            _check_number(name, getattr(self, name), minimum=1)
        _check_number("vocab_size", self.vocab_size, minimum=2, maximum=2**16)
        _check_number("rope_base", self.rope_base, minimum=1.0)
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"num_heads={self.num_heads}: wanted a number that divides dim={self.dim} "
                "into an even head size."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads}: wanted a divisor of num_heads={self.num_heads}."
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer and its learning rate over time."""

    name: str = "torch.optim.AdamW"
    """Dotted name of any ``torch.optim.Optimizer`` class that takes ``(params, lr=...)``."""

    lr: float = 2e-3
    """Peak learning rate."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """More arguments of the optimizer, such as ``{momentum: 0.9}`` or ``{betas: [0.9, 0.95]}``."""

    warmup_steps: int = 20
    """Steps in which the rate grows linearly to its peak."""

    final_lr_ratio: float = 0.1
    """Rate of the last step over the peak; a cosine leads there."""

    max_grad_norm: float | None = 1.0
    """Gradients are clipped to this global norm; null leaves them as they are."""

    def __post_init__(self) -> None:
        """Check every setting; raises ``ValueError``."""
        if "." not in self.name:
            raise ValueError(f"name={self.name!r}: wanted a dotted name like torch.optim.AdamW.")
        _check_number("lr", self.lr, minimum=0.0)
        _check_number("warmup_steps", self.warmup_steps, minimum=0)
        _check_number("final_lr_ratio", self.final_lr_ratio, minimum=0.0, maximum=1.0)
        if self.max_grad_norm is not None:
            _check_number("max_grad_norm", self.max_grad_norm, minimum=1e-12)
        if "lr" in self.kwargs:
            raise ValueError(
                f"kwargs={self.kwargs!r}: the learning rate belongs in lr, beside kwargs."
            )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Everything that defines one run of ``scripts/train.py``."""

    name: str = "run"
    """Results go to ``runs/<name>/``; may hold slashes, as in ``sweep/lr3``."""

    seed: int = 0
    """Seed of the parameters, of the batches and of the text sample."""

    device: DeviceName = "auto"
    """``cpu`` (gloo), ``cuda`` (NCCL), or ``auto``: CUDA where there is a GPU."""

    steps: int = 200
    """Optimizer steps of the whole run; a resumed run counts the earlier ones too."""

    data: str | None = None
    """A text file, a folder of text files, or a ``.bin`` file of uint16 tokens.
    null: the source code of Python's own standard library."""

    batch_size: int = 8
    """Sequences of one rank and micro-batch."""

    sequence_length: int = 128
    """Tokens of one sequence."""

    accumulation_steps: int = 1
    """Micro-batches per optimizer step; only the last one reduces gradients."""

    model: ModelSettings = field(default_factory=ModelSettings)
    """The decoder."""

    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """The optimizer."""

    param_dtype: DtypeName = "float32"
    """Dtype of parameters and activations in forward and backward; the shards stay float32."""

    reduce_dtype: DtypeName = "float32"
    """Dtype in which FSDP hands gradients to the reduction, and sends them if loco is null."""

    loco: LoCoConfig | None = None
    """4-bit gradient communication; null leaves FSDP's own reduce-scatter in place."""

    validation_interval: int = 0
    """Steps between validations; 0 validates only at the end."""

    validation_batches: int = 16
    """Batches per rank of one validation, each of ``batch_size`` sequences."""

    checkpoint_interval: int = 0
    """Steps between checkpoints; 0 writes none."""

    resume: bool = False
    """Continue from the newest whole checkpoint of this run, if there is one."""

    sample_tokens: int = 200
    """Length of the sample generated at the end; 0 skips it."""

    timeout_seconds: float = 120.0
    """How long a collective may wait for the other ranks before the run fails."""

    def __post_init__(self) -> None:
        """Check every setting; raises ``ValueError``."""
        path = PurePosixPath(self.name)
        if not self.name.strip() or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"name={self.name!r}: wanted a relative path below runs/.")
        for name in ("device", "param_dtype", "reduce_dtype"):
            _check_choice(name, getattr(self, name))
        for name in ("steps", "batch_size", "sequence_length", "accumulation_steps"):
            _check_number(name, getattr(self, name), minimum=1)
        _check_number("validation_batches", self.validation_batches, minimum=1)
        for name in ("seed", "validation_interval", "checkpoint_interval", "sample_tokens"):
            _check_number(name, getattr(self, name), minimum=0)
        _check_number("timeout_seconds", self.timeout_seconds, minimum=1.0)


# Not a property of the class: jsonargparse would take public members for subcommands.
def run_folder(settings: TrainSettings) -> Path:
    """Where a run writes."""
    return Path("runs") / settings.name


_CHOICES = {
    "device": get_args(DeviceName),
    "param_dtype": get_args(DtypeName),
    "reduce_dtype": get_args(DtypeName),
}


def _check_choice(name: str, value: object) -> None:
    if value not in _CHOICES[name]:
        raise ValueError(f"{name}={value!r}: wanted one of {', '.join(_CHOICES[name])}.")


def _check_number(name: str, value: Any, *, minimum: float, maximum: float = float("inf")) -> None:
    """Check type and range; a setting with an integer minimum has to be an integer."""
    noun, kinds = ("an integer", (int,)) if isinstance(minimum, int) else ("a number", (int, float))
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    # A NaN fails each comparison, so it is refused too.
    if not (is_number and minimum <= value <= maximum and value < float("inf")):
        top = "or more" if maximum == float("inf") else f"to {maximum:g}"
        raise ValueError(f"{name}={value!r}: wanted {noun}, {minimum:g} {top}.")
