"""Random gradients and configs for the property tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from loco_fsdp.codecs import CODECS
from loco_fsdp.config import LoCoConfig

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NONFINITE = (torch.nan, torch.inf, -torch.inf)
KINDS = ("normal", "ties", "zeros", "subnormal", "huge", "spread")
FLOAT32_MAX = torch.finfo(torch.float32).max

_HINTS = get_type_hints(LoCoConfig)
BITS: tuple[int, ...] = get_args(_HINTS["bits"])
FEEDBACKS: tuple[str, ...] = get_args(_HINTS["feedback"])
RESIDUAL_DTYPES: tuple[str, ...] = get_args(_HINTS["residual_dtype"])

seeds = st.integers(0, 2**32 - 1)
block_sizes = st.sampled_from((16, 18, 50, 128, 130, 1024, 8192))


def values_of_kind(kind: str, shape: Sequence[int], seed: int) -> Tensor:
    """Finite float32 values of one of ``KINDS``."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*shape, generator=generator)
    if kind == "normal":
        return normal
    if kind == "ties":  # few values, each sign: most blocks hold +max and -max
        return (normal * 2).round()
    if kind == "zeros":
        return torch.where(normal.abs() < 1.5, torch.copysign(torch.zeros(()), normal), normal)
    if kind == "subnormal":
        return normal * 2.0**-130
    if kind == "huge":
        return (normal * 2e38).clamp(-FLOAT32_MAX, FLOAT32_MAX)
    assert kind == "spread"  # every magnitude that float32 has
    exponents = torch.empty(*shape, dtype=torch.float64).uniform_(-150, 127, generator=generator)
    return (normal.double() * exponents.exp2()).clamp(-FLOAT32_MAX, FLOAT32_MAX).float()


@st.composite
def gradients(
    draw: DrawFn,
    rows: SearchStrategy[int] | int = st.integers(1, 4),  # noqa: B008
    numel: SearchStrategy[int] | int = st.integers(1, 400),  # noqa: B008
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    kinds: Sequence[str] = KINDS,
    nonfinite: bool = False,
) -> Tensor:
    """A gradient ``[W, N]`` with some columns of each of up to three kinds.

    Finite in its dtype, unless ``nonfinite``: then up to three elements are NaN or infinite.
    """
    shape = tuple(n if isinstance(n, int) else draw(n) for n in (rows, numel))
    seed, dtype = draw(seeds), draw(st.sampled_from(dtypes))
    cuts = sorted(draw(st.lists(st.integers(0, shape[1]), max_size=2)))
    gradient = torch.empty(shape)
    for index, (first, last) in enumerate(zip([0, *cuts], [*cuts, shape[1]], strict=True)):
        kind = draw(st.sampled_from(kinds))
        gradient[:, first:last] = values_of_kind(kind, (shape[0], last - first), seed + index)
    top = min(torch.finfo(dtype).max, FLOAT32_MAX)
    gradient = gradient.clamp(-top, top).to(dtype).clamp(-top, top)
    if nonfinite and gradient.numel():
        places = st.tuples(st.integers(0, gradient.numel() - 1), st.sampled_from(NONFINITE))
        for place, value in draw(st.lists(places, min_size=1, max_size=3)):
            gradient.view(-1)[place] = value
    return gradient


@st.composite
def configs(draw: DrawFn, /, **fixed: Any) -> LoCoConfig:
    """Any codec, bits, block size, feedback and residual storage, except what is ``fixed``."""
    settings: dict[str, Any] = {
        "bits": st.sampled_from(BITS),
        "block_size": block_sizes,
        "scale": st.sampled_from(sorted(CODECS)),
        "static_scale": st.sampled_from((2.0, 3.0, 2.0**17)),
        "static_residual_scale": st.sampled_from((16.0, 100.0, 2.0**19)),
        "feedback": st.sampled_from(FEEDBACKS),
        "feedback_gain": st.sampled_from((2.0**-20, 0.2, 0.5, 1.0)),
        "residual_dtype": st.sampled_from(RESIDUAL_DTYPES),
    }
    drawn = {name: draw(choice) for name, choice in settings.items() if name not in fixed}
    return LoCoConfig(**drawn, **fixed)
