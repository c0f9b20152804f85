"""Where each part of a payload row lies, and the exact bytes of format version 1."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loco_fsdp import LoCoConfig, reference
from loco_fsdp.codecs import CODECS
from loco_fsdp.payload import PayloadLayout, Segment, single_segment
from strategies import FLOAT_DTYPES, configs

SIXTEEN = [1.0, -2.0, 7.0, -8.0, 3.0, -4.0, 5.0, -6.0, 2.0, -1.0, 0.0, 6.0, -7.0, 4.0, -3.0, -5.0]
BLOCK16 = LoCoConfig(block_size=16)
EMBEDDING = PayloadLayout(
    BLOCK16,
    (Segment("embed", 20), Segment("norm", 3, compressed=False, start=20), Segment("head", 7)),
)


@st.composite
def layouts(draw: st.DrawFn) -> PayloadLayout:
    numels = draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))
    segments, start = [], 0
    for index, numel in enumerate(numels):
        absent, compressed = draw(st.booleans()), draw(st.booleans())
        segments.append(Segment(f"p{index}", numel, compressed, None if absent else start))
        start += 0 if absent else numel
    return PayloadLayout(draw(configs()), tuple(segments), draw(st.sampled_from(FLOAT_DTYPES)))


def parts_of(layout: PayloadLayout) -> dict[str, list[slice]]:
    """Byte ranges of the three parts of a row, segment by segment."""
    pairs = list(zip(layout.segments, layout.slots, strict=True))
    return {
        "codes": [slot.data for segment, slot in pairs if segment.compressed],
        "steps": [slot.steps for segment, slot in pairs if segment.compressed],
        "values": [slot.data for segment, slot in pairs if not segment.compressed],
    }


@pytest.mark.parametrize("numel", range(1, 34))
def test_every_part_starts_on_a_multiple_of_16(numel: int) -> None:
    """Field cases 2 and 4: 1 to 33 elements per destination, odd ones too."""
    for bits in (4, 8):
        for block_size in (16, 18, 128):
            for dtype in FLOAT_DTYPES:
                config = LoCoConfig.from_dict({"bits": bits, "block_size": block_size})
                norm = Segment("norm", numel, compressed=False, start=numel)
                layout = PayloadLayout(config, (Segment("weight", numel), norm), dtype)
                assert layout.row_bytes % 16 == 0
                starts = [slices[0].start for slices in parts_of(layout).values()]
                assert [start % 16 for start in starts] == [0, 0, 0]
                # Both rows of two destinations, as their own types: a view fails if misaligned.
                payload = torch.zeros(2, layout.row_bytes, dtype=torch.uint8)
                for view in (layout.steps(payload, 0), layout.values(payload, 1)):
                    assert all(row.data_ptr() % 16 == 0 for row in view)


@given(layout=layouts())
def test_parts_follow_each_other_without_overlap(layout: PayloadLayout) -> None:
    parts = parts_of(layout)
    end = 16
    for slices in parts.values():
        end = -(-end // 16) * 16
        for part in slices:
            assert part.start == end
            end = part.stop
    assert layout.row_bytes == -(-end // 16) * 16
    code_bytes = layout.config.block_size * layout.config.bits // 8
    for segment, slot in zip(layout.segments, layout.slots, strict=True):
        size = slot.data.stop - slot.data.start
        if segment.compressed:
            blocks = -(-segment.numel // layout.config.block_size)
            assert size == blocks * code_bytes
            steps = blocks if layout.config.scale == "block" else min(blocks, 1)
            assert slot.steps.stop - slot.steps.start == 2 * steps
        else:
            assert size == segment.numel * layout.reduce_dtype.itemsize
    present = [segment.numel for segment in layout.segments if segment.start is not None]
    assert layout.row_numel == sum(present)


@given(layout=layouts())
def test_views_reach_every_segment_and_only_it(layout: PayloadLayout) -> None:
    """What is written into one segment is read from it, and no other byte changes."""
    for index, segment in enumerate(layout.segments):
        payload = torch.zeros(3, layout.row_bytes, dtype=torch.uint8)
        slot = layout.slots[index]
        written = [slot.data, slot.steps] if segment.compressed else [slot.data]
        if segment.compressed:
            layout.codes(payload, index).fill_(0xAB)
            layout.steps(payload, index).fill_(1.0)
            assert bool((layout.steps(payload, index) == 1.0).all())
        else:
            values = torch.arange(3 * segment.numel).view(3, -1).to(layout.reduce_dtype)
            layout.values(payload, index).copy_(values)
            assert torch.equal(layout.values(payload, index), values)
        for part in written:
            payload[:, part] = 0
        assert not payload.any()


def test_at_most_4_2_bits_per_element() -> None:
    for numel in (100_000, 100_001, 131_072, 1_000_003, 50257 * 768):
        layout = single_segment(LoCoConfig(), numel)
        bits = 8 * layout.row_bytes / numel
        assert 4.125 <= bits <= 4.2
        assert 16 * numel / (8 * layout.row_bytes) > 3.8  # times less than bfloat16
    exact = single_segment(LoCoConfig(), 128 * 4096)
    assert exact.row_bytes == 16 + 4096 * 64 + 4096 * 2
    static = single_segment(LoCoConfig(scale="static"), 128 * 4096)
    assert static.row_bytes == 16 + 4096 * 64 + 16


def test_golden_header() -> None:
    """Version, codec, bits, dtype, block size (little endian), 8 bytes of blake2b."""
    text = "block codec, 4 bits, block size 16; embed: 20 codes; norm: 3 float32; head: 7 codes"
    assert EMBEDDING.describe() == text
    assert EMBEDDING.header[:8].hex() == "0101040110000000"
    assert EMBEDDING.header[8:] == hashlib.blake2b(text.encode(), digest_size=8).digest()
    assert len(EMBEDDING.header) == 16
    other = PayloadLayout(
        LoCoConfig(scale="static", bits=8, block_size=8192), EMBEDDING.segments, torch.float64
    )
    assert other.header[:8].hex() == "0102080400200000"
    ids = {dtype: replace(EMBEDDING, reduce_dtype=dtype).header[3] for dtype in FLOAT_DTYPES}
    assert list(ids.values()) == [1, 2, 3, 4]


def variations() -> dict[str, PayloadLayout]:
    embed, norm, head = EMBEDDING.segments
    return {
        "name": replace(EMBEDDING, segments=(replace(embed, name="other"), norm, head)),
        "size": replace(EMBEDDING, segments=(replace(embed, numel=21), norm, head)),
        "order": replace(EMBEDDING, segments=(head, norm, embed)),
        "form": replace(EMBEDDING, segments=(replace(embed, compressed=False), norm, head)),
        "absent": replace(EMBEDDING, segments=(replace(embed, start=None), norm, head)),
        "missing": replace(EMBEDDING, segments=(norm, head)),
        "bits": replace(EMBEDDING, config=replace(BLOCK16, bits=8)),
        "block size": replace(EMBEDDING, config=replace(BLOCK16, block_size=32)),
        "codec": replace(EMBEDDING, config=replace(BLOCK16, scale="static")),
        "dtype": replace(EMBEDDING, reduce_dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("what", variations())
def test_header_tells_layouts_apart(what: str) -> None:
    """Two ranks whose rows mean different things never have equal headers."""
    other = variations()[what]
    assert other.header != EMBEDDING.header
    assert other.describe() != EMBEDDING.describe()


def test_header_ignores_what_the_receiver_need_not_know() -> None:
    """Residual settings do not change the meaning of the bytes, nor does the buffer's order."""
    other = replace(BLOCK16, feedback_gain=0.5, residual_dtype="float32", reset_interval=0)
    assert replace(EMBEDDING, config=other).header == EMBEDDING.header
    same = PayloadLayout(LoCoConfig(block_size=16), tuple(EMBEDDING.segments))
    assert same.header == EMBEDDING.header


@given(layout=layouts(), used=st.integers(0, 31))
def test_row_size_does_not_depend_on_which_parameters_got_a_gradient(
    layout: PayloadLayout, used: int
) -> None:
    segments = tuple(
        replace(segment, start=0 if used >> index & 1 else None)
        for index, segment in enumerate(layout.segments)
    )
    assert replace(layout, segments=segments).row_bytes == layout.row_bytes


# Header: fixed part, layout hash. Then codes, steps (bfloat16, little endian); each part is filled
# with zeros up to a multiple of 16 bytes. Worked out by hand, the hashes apart.
NO_CODES = "0000000000000000"  # 16 codes of 4 bits are 8 bytes
STEP_FILL = "0000000000000000000000000000"
GOLDEN = {
    ("block", 4): (
        "0101040110000000 13741701ecdcce66 21fe0768934cd5ba" + NO_CODES + "803f" + STEP_FILL,
        "0101040110000000 13741701ecdcce66 21fe0768934cd5ba" + NO_CODES + "0040" + STEP_FILL,
    ),
    ("block", 8): (
        "0101080110000000 517f75097e9634d4 10e0708030c050a0 20f000609040d0b0 803d" + STEP_FILL,
        "0101080110000000 517f75097e9634d4 10e0708030c050a0 20f000609040d0b0 003e" + STEP_FILL,
    ),
    ("static", 4): (
        "0102040110000000 ad80b5c7186ae23d 21fe0768934cd5ba" + NO_CODES + "803f" + STEP_FILL,
        "0102040110000000 ad80b5c7186ae23d 42ec07788678a788" + NO_CODES + "803f" + STEP_FILL,
    ),
    ("static", 8): (
        "0102080110000000 1b269f7fdb9abdda 01fe07f803fc05fa 02ff0006f904fdfb 803f" + STEP_FILL,
        "0102080110000000 1b269f7fdb9abdda 02fc0ef006f80af4 04fe000cf208faf6 803f" + STEP_FILL,
    ),
}


def test_every_codec_has_golden_bytes() -> None:
    assert {scale for scale, _ in GOLDEN} == set(CODECS)


@pytest.mark.parametrize(("scale", "bits"), GOLDEN)
def test_golden_payload(scale: str, bits: int) -> None:
    """Field case 72: the whole payload of two rows, byte for byte, both ways.

    A change here needs a new format version.
    """
    config = LoCoConfig.from_dict(
        {"scale": scale, "bits": bits, "block_size": 16, "static_scale": 1.0}
    )
    h = torch.tensor([SIXTEEN, [2 * value for value in SIXTEEN]])
    golden = [bytes.fromhex(row) for row in GOLDEN[scale, bits]]
    payload = reference.compress(h, config)
    assert [bytes(row).hex() for row in payload.tolist()] == [row.hex() for row in golden]
    received = torch.tensor([list(row) for row in golden], dtype=torch.uint8)
    decoded = reference.decompress(received, 16, config)
    half = 2 ** (bits - 1)
    assert torch.equal(decoded, h if scale == "block" else h.clamp(-half, half - 1))
