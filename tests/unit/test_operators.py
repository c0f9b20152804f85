"""The operators ``loco::compress`` and ``loco::reduce``, and how a backend is chosen for them."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_calls import assert_same_bits
from loco_fsdp import LoCoConfig, kernels, reference
from loco_fsdp.backends import eager
from loco_fsdp.feedback import ResidualBuffer
from loco_fsdp.kernels import CallStats
from loco_fsdp.payload import HEADER_BYTES, PayloadLayout, single_segment
from loco_fsdp.tiles import tile_table
from strategies import values_of_kind

CPU = torch.device("cpu")
CONFIG = LoCoConfig()
CODEC = (CONFIG.scale, 4, 128, CONFIG.static_scale, CONFIG.static_residual_scale)


def no_stats() -> CallStats:
    return CallStats(torch.zeros((), dtype=torch.int64))


def call(x: Tensor, residuals: ResidualBuffer | None = None) -> tuple[Tensor, Tensor]:
    """Compress ``x`` and reduce what comes out: payload and output."""
    layout = single_segment(CONFIG, x.shape[1])
    table = kernels.work_table(layout, residuals, {""}, x.device)
    payload = torch.zeros(x.shape[0], layout.row_bytes, dtype=torch.uint8)
    kernels.compress(x, table, payload, no_stats())
    output = torch.empty(x.shape[1])
    kernels.reduce(payload, table, output, 0.5)
    return payload, output


def arguments(with_memory: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of both operators, for a unit of a coded and a plain segment."""
    segments = (*single_segment(CONFIG, 300).segments,)
    layout = PayloadLayout(CONFIG, segments)
    residuals = ResidualBuffer(CONFIG, 2, {"": 300}, CPU) if with_memory else None
    table = kernels.work_table(layout, residuals, {""}, CPU)
    tiles = table.tiles
    parts = (tiles.segments, tiles.tiles, tiles.tile_blocks, tiles.aligned)
    x = values_of_kind("normal", (2, 300), 0)
    payload = torch.zeros(2, layout.row_bytes, dtype=torch.uint8)
    memory = (None, None) if residuals is None else (residuals.data, residuals.steps)
    errors = torch.zeros(8, 2, dtype=torch.float64) if with_memory else None
    scale = torch.tensor(2.0) if with_memory else None
    counter = torch.zeros((), dtype=torch.int64)
    compress = (x, *parts, payload, *memory, counter, errors, scale, *CODEC, CONFIG.gain)
    return compress, (payload, *parts, torch.zeros(300), torch.float32, 0.5, *CODEC)


@pytest.mark.parametrize("with_memory", [True, False])
def test_operators_are_well_formed(with_memory: bool) -> None:
    """Schema, mutations, fake tensors, dispatch under torch.compile: what PyTorch checks."""
    compress, reduce = arguments(with_memory)
    torch.library.opcheck(torch.ops.loco.compress.default, compress)
    torch.library.opcheck(torch.ops.loco.reduce.default, reduce)


def test_operators_compile_without_a_break() -> None:
    """What users ask for (12): one graph, the bits of the plain call."""
    compress, reduce = arguments(with_memory=True)
    again, reduce_again = arguments(with_memory=True)

    def both(first: tuple[Any, ...], second: tuple[Any, ...]) -> Tensor:
        torch.ops.loco.compress(*first)
        torch.ops.loco.reduce(first[5], *second[1:])
        output: Tensor = second[5]
        return output * 1.0

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(compress, reduce), both(again, reduce_again))
    assert torch.equal(compress[6], again[6]), "the residual moved on otherwise"


def test_fake_tensors_pass() -> None:
    operators = (torch.ops.loco.compress, torch.ops.loco.reduce)
    both = arguments(with_memory=True)
    with FakeTensorMode() as mode:
        for operator, real in zip(operators, both, strict=True):
            operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in real))


def test_nothing_fake_is_kept(fresh: None) -> None:
    """What is tried out and laid out under FakeTensorMode serves real tensors later."""
    tile_table.cache_clear()
    layout = single_segment(CONFIG, 300)
    with FakeTensorMode():
        table = kernels.work_table(layout, None, (), CPU)
        assert type(table.tiles.segments) is Tensor
        backend = kernels.fast_backend(CPU)
    assert kernels.work_table(layout, None, (), CPU).tiles is table.tiles
    assert backend is not None and backend is kernels.fast_backend(CPU)
    x = values_of_kind("normal", (2, 300), 0)
    expected = reference.compress(x)[:, HEADER_BYTES:]
    assert torch.equal(call(x)[0][:, HEADER_BYTES:], expected)


@pytest.mark.parametrize(
    "view",
    [lambda t: t[::2], lambda t: t.t(), lambda t: t[:1].expand(4, -1), lambda t: t[:, ::2]],
    ids=["rows", "transposed", "expanded", "columns"],
)
def test_strided_tensors_are_refused(view: Any) -> None:
    """Field case 69: never read in memory order, on any backend; an offset of 1 is fine."""
    x = values_of_kind("normal", (8, 8), 0)
    with pytest.raises(ValueError, match=r"x is .* with strides .* wanted a contiguous"):
        call(view(x))
    shifted = values_of_kind("normal", (1, 1001), 0).view(-1)[1:].view(2, 500)
    payload, output = call(shifted)
    expected = reference.compress(shifted)
    assert torch.equal(payload[:, HEADER_BYTES:], expected[:, HEADER_BYTES:])
    assert_same_bits(output, reference.reduce(reference.decompress(expected, 500), 0.5))
    layout = single_segment(CONFIG, 500)
    table = kernels.work_table(layout, None, (), CPU)
    with pytest.raises(ValueError, match=r"output is .* with strides"):
        kernels.reduce(expected, table, torch.zeros(1000)[::2], 1.0)
    with pytest.raises(ValueError, match=r"payload is .* with strides"):
        kernels.compress(shifted, table, expected.t(), no_stats())


# Choosing a backend


@pytest.fixture
def fresh() -> Any:
    """Backends are tried out anew, before and after."""
    kernels.fast_backend.cache_clear()
    yield
    kernels.fast_backend.cache_clear()


def broken(*_: Any) -> None:
    raise RuntimeError("no such\ninstruction")


def does_nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("compress", "reason"),
    [(broken, "RuntimeError: no such instruction"), (does_nothing, "not give the reference's")],
)
def test_backend_that_does_not_work_here(
    fresh: None,
    compress: Any,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Field case 12: it fails or computes nonsense: one log line, plain PyTorch, right results."""
    backend = SimpleNamespace(
        compress=compress,
        reduce=eager.reduce,
        tile_blocks=eager.tile_blocks,
        DTYPES=eager.DTYPES,
        SCALES=eager.SCALES,
    )
    monkeypatch.setitem(sys.modules, "backend_under_test", backend)
    monkeypatch.setitem(kernels.FAST_BACKENDS, "cpu", "backend_under_test")
    x = values_of_kind("normal", (2, 300), 0)
    with caplog.at_level(logging.WARNING, "loco_fsdp"):
        for _ in range(3):
            payload, _ = call(x)
    assert torch.equal(payload[:, HEADER_BYTES:], reference.compress(x)[:, HEADER_BYTES:])
    assert len(caplog.messages) == 1 and reason in caplog.messages[0]
    assert "\n" not in caplog.messages[0]


def run_alone(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


WITHOUT = (
    "import sys; sys.modules['numba'] = sys.modules['triton'] = None\n"
    "import torch, loco_fsdp\n"
    "from loco_fsdp import kernels\n"
    "from loco_fsdp.payload import single_segment\n"
    "config, cpu = loco_fsdp.LoCoConfig(), torch.device('cpu')\n"
    "layout = single_segment(config, 300)\n"
    "payload = torch.zeros(2, layout.row_bytes, dtype=torch.uint8)\n"
    "for _ in range(2):\n"
    "    table = kernels.work_table(layout, None, (), cpu)\n"
    "    stats = kernels.CallStats(torch.zeros((), dtype=torch.int64))\n"
    "    kernels.compress(torch.ones(2, 300), table, payload, stats)\n"
    "assert payload.any()\n"
)


def test_without_numba_and_triton() -> None:
    """Field case 12: import and use work, with one line that says what is slower and why."""
    lines = run_alone(WITHOUT).splitlines()
    assert len(lines) == 1 and "several times slower" in lines[0] and "numba" in lines[0]


def test_import_compiles_and_loads_nothing() -> None:
    """The first gradient pays for the compiler, not the import."""
    program = "import sys, loco_fsdp; print([n for n in ('numba', 'triton') if n in sys.modules])"
    assert run_alone(program).strip() == "[]"


def test_no_folder_for_compiled_code() -> None:
    """In a read-only container each process compiles for itself: no slow fallback."""
    program = (
        "import numba.core.caching as caching\n"
        "caching.FunctionCache._impl_class._locator_classes = []\n"
        "import torch\n"
        "from loco_fsdp import kernels\n"
        "print(kernels.fast_backend(torch.device('cpu')).__name__)\n"
    )
    assert run_alone(program).strip() == "loco_fsdp.backends.compiled"


@pytest.mark.parametrize("scale", ["block", "static"])
@pytest.mark.parametrize("backend", ["compiled", "plain"])
@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.bfloat16),
        lambda: torch.set_default_device("meta"),
    ],
    ids=["float64", "bfloat16", "meta"],
)
def test_torchs_defaults_change_no_bit(
    fresh: None, setting: Any, backend: str, scale: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts set a default dtype, and build models on the meta device."""
    if backend == "plain":
        monkeypatch.setattr(kernels, "FAST_BACKENDS", {})
    config = LoCoConfig(scale=scale)
    x = values_of_kind("normal", (2, 300), 0)

    def twice() -> list[Tensor]:
        kernels.fast_backend.cache_clear()
        tile_table.cache_clear()
        layout = single_segment(config, 300)
        residuals = ResidualBuffer(config, 2, {"": 300}, CPU)
        table = kernels.work_table(layout, residuals, {""}, CPU)
        payload = torch.ones(2, layout.row_bytes, dtype=torch.uint8, device=CPU)
        output = torch.empty(300, dtype=x.dtype, device=CPU)
        stats = CallStats(torch.zeros((), dtype=torch.int64, device=CPU))
        for _ in range(2):
            kernels.compress(x, table, payload, stats)
            kernels.reduce(payload, table, output, 0.5)
        assert (kernels.fast_backend(CPU) is None) == (backend == "plain")
        return [payload, output, residuals.data, residuals.steps, stats.nonfinite_blocks]

    wanted = twice()
    dtype = torch.get_default_dtype()
    try:
        setting()
        found = twice()
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


PEAK = (
    "import sys, torch\n"
    "sys.modules['numba'] = None if sys.argv[1] == 'eager' else __import__('numba')\n"
    "from loco_fsdp import LoCoConfig, kernels\n"
    "from loco_fsdp.feedback import ResidualBuffer\n"
    "from loco_fsdp.payload import PayloadLayout, Segment, single_segment\n"
    "def peak():\n"
    "    status = open('/proc/self/status').read()\n"
    "    return int(status.split('VmHWM:')[1].split()[0]) * 1024\n"
    "config, cpu = LoCoConfig(), torch.device('cpu')\n"
    "def run(numel):\n"
    "    memory = ResidualBuffer(config, 2, {'': numel}, cpu)\n"
    "    memory.data.fill_(1)\n"
    "    layout = single_segment(config, numel)\n"
    "    table = kernels.work_table(layout, memory, {''}, cpu)\n"
    "    payload = torch.ones(2, layout.row_bytes, dtype=torch.uint8)\n"
    "    stats = kernels.CallStats(torch.zeros((), dtype=torch.int64))\n"
    "    x, output = torch.ones(2, numel), torch.ones(numel)\n"
    "    before = peak()\n"
    "    kernels.compress(x, table, payload, stats)\n"
    "    kernels.reduce(payload, table, output, 0.5)\n"
    "    codes = peak() - before\n"
    "    values = PayloadLayout(config, (Segment('', numel, compressed=False, start=0),))\n"
    "    table = kernels.work_table(values, None, (), cpu)\n"
    "    payload = torch.ones(2, values.row_bytes, dtype=torch.uint8)\n"
    "    before = peak()\n"
    "    kernels.reduce(payload, table, output, 0.5)\n"
    "    return max(codes, peak() - before)\n"
    "run(300_000)\n"
    "print(run(16 * 2**20))\n"
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("backend", "most"), [("eager", 16 * 2**20), ("compiled", 2**20)])
def test_transient_memory_of_a_call(backend: str, most: int) -> None:
    """For 32 Mi elements (128 MiB): eager pieces of 1 MiB, or next to nothing."""
    program = PEAK.replace("sys.argv[1]", repr(backend))
    assert int(run_alone(program).splitlines()[-1]) <= most
