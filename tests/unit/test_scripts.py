"""The training scripts: the model, the data, the settings, a run with resume."""

from __future__ import annotations

import json
import math
import sys
from contextlib import chdir
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rank_pool import RankPool

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from lm.data import Corpus, bits_per_token, decode, load_tokens, standard_library_files  # noqa: E402
from lm.model import Decoder, MixtureOfExperts, RotaryEmbedding  # noqa: E402
from lm.optimizer import build_optimizer, learning_rate  # noqa: E402
from lm.parallel import World, plain_reduction_bytes  # noqa: E402
from lm.report import comparison_rows  # noqa: E402
from lm.run import build_run  # noqa: E402
from lm.settings import (  # noqa: E402
    ModelSettings,
    MoESettings,
    OptimizerSettings,
    TrainSettings,
    run_folder,
)
from loco_fsdp import LoCoConfig  # noqa: E402
from train import read_settings  # noqa: E402

DENSE = ModelSettings(dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24)
EXPERTS = replace(DENSE, moe=MoESettings(num_experts=3, experts_per_token=2))


def decoder(settings: ModelSettings) -> Decoder:
    torch.manual_seed(0)
    return Decoder(settings, max_length=12)


# The model


@pytest.mark.parametrize("settings", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_later_token_changes_no_earlier_logit(settings: ModelSettings) -> None:
    model = decoder(settings)
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(tokens).logits, model(changed).logits
    assert before.shape == (2, 12, 256)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-5)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-4


def test_rotary_products_depend_on_the_distance_only() -> None:
    rotary = RotaryEmbedding(head_dim=8, max_length=64, base=10000.0)
    query, key = torch.randn(8), torch.randn(8)
    query_at, key_at = (rotary(x.expand(1, 1, 64, 8))[0, 0] for x in (query, key))
    products = query_at @ key_at.T  # [position of the query, position of the key]
    for distance in (0, 1, 5, 40):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)


def test_untouched_experts_get_a_gradient_of_zeros() -> None:
    model = decoder(EXPERTS)
    with torch.no_grad():
        for block in model.blocks:
            assert isinstance(block.ffn, MixtureOfExperts)
            block.ffn.router.weight.zero_()  # a tie: the choice is the same for every token
    output = model(torch.randint(256, (1, 12)))
    (output.logits.square().mean() + output.balance_loss).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    gradient = model.get_parameter("blocks.0.ffn.up").grad
    assert gradient is not None
    assert sum(bool(expert.any()) for expert in gradient.chunk(3)) == 2


def test_balance_loss_is_one_when_even_and_the_number_of_experts_at_worst() -> None:
    moe = MixtureOfExperts(DENSE, MoESettings(num_experts=4, experts_per_token=1))
    one_hot = torch.eye(4).repeat(3, 1)  # [N, E]: three tokens for each expert
    even = moe._balance_loss(one_hot, one_hot.argmax(dim=-1, keepdim=True))
    worst = moe._balance_loss(one_hot[:1], one_hot[:1].argmax(dim=-1, keepdim=True))
    assert (float(even), float(worst)) == (1.0, 4.0)


def test_single_expert_is_the_dense_layer() -> None:
    moe = MixtureOfExperts(DENSE, MoESettings(num_experts=1, experts_per_token=1))
    for matrix in (moe.gate, moe.up, moe.down):
        nn.init.normal_(matrix)
    x = torch.randn(2, 5, 16)
    dense = (nn.functional.silu(x @ moe.gate.T) * (x @ moe.up.T)) @ moe.down
    torch.testing.assert_close(moe(x)[0], dense)


# The data


def corpus(count: int = 4000, **changes: Any) -> Corpus:
    """Tokens that count up modulo 256, and what is asked for in ``changes``."""
    settings: dict[str, Any] = {
        "tokens": np.arange(count).astype(np.uint8),
        "is_bytes": True,
        "sequence_length": 20,
        "batch_size": 4,
        "vocab_size": 256,
        "seed": 3,
    }
    return Corpus(**settings | changes)


def test_a_batch_is_a_function_of_seed_step_rank_and_micro_batch() -> None:
    reference = corpus().training_batch(5, 1, 2)
    assert torch.equal(reference.inputs, corpus().training_batch(5, 1, 2).inputs)
    assert torch.equal(reference.inputs[:, 1:], reference.targets[:, :-1])
    others = [
        corpus().training_batch(6, 1, 2),
        corpus().training_batch(5, 0, 2),
        corpus().training_batch(5, 1, 0),
        corpus(seed=4).training_batch(5, 1, 2),
    ]
    assert not any(torch.equal(reference.inputs, other.inputs) for other in others)


@pytest.mark.parametrize("tokens", [42, 63, 1000, 60_000])
def test_training_never_sees_a_validation_token(tokens: int) -> None:
    # Each token is its own position.
    position = corpus(tokens=np.arange(tokens, dtype=np.uint16), vocab_size=tokens)
    trained = {
        int(token)
        for step in range(200)
        for window in (position.training_batch(step, 0),)
        for token in torch.cat((window.inputs, window.targets)).unique()
    }
    validated = {
        int(token)
        for batch in position.validation_batches(0, 1, limit=100)
        for token in torch.cat((batch.inputs, batch.targets)).unique()
    }
    assert trained and validated and not trained & validated


def test_validation_is_fixed_and_shared_out_evenly() -> None:
    shares = [list(corpus(20_000).validation_batches(rank, 3, limit=4)) for rank in range(3)]
    again = list(corpus(20_000, seed=9).validation_batches(1, 3, limit=4))
    assert [len(share) for share in shares] == [4, 4, 4]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(shares[1], again, strict=True))
    assert not torch.equal(shares[0][0].inputs, shares[1][0].inputs)


def test_bits_per_byte_of_a_guess_is_eight() -> None:
    assert bits_per_token(math.log(256)) == pytest.approx(8.0)


def test_default_text_is_the_standard_library() -> None:
    files = standard_library_files()
    assert files == sorted(files)
    assert not any("site-packages" in file.parts or "test" in file.parts for file in files)
    tokens, is_bytes = load_tokens(None)
    assert is_bytes
    assert len(tokens) > 2**20
    text = decode(tokens[:400].tolist(), is_bytes)
    assert files[0].read_text()[:100] in text


def test_folders_files_and_token_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    tokens, is_bytes = load_tokens(str(tmp_path))
    assert (bytes(tokens), is_bytes) == (b"first\n\nsecond\n\n", True)
    numbers = np.array([7, 40_000, 3], dtype="<u2")
    numbers.tofile(tmp_path / "x.bin")
    tokens, is_bytes = load_tokens(str(tmp_path / "x.bin"))
    assert (tokens.tolist(), is_bytes) == ([7, 40_000, 3], False)
    assert decode([7, 40_000], is_bytes) == "7 40000"


def test_unusable_data(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    for name, message in {
        "missing": "no such file",
        "folder": r"no \*\.txt",
        "odd.bin": "has 3 bytes",
        "empty.txt": "is empty",
    }.items():
        with pytest.raises(ValueError, match=rf"data='.*{name}'.*{message}"):
            load_tokens(str(tmp_path / name))
    with pytest.raises(ValueError, match="data has 41 tokens: wanted at least 42"):
        corpus(41)
    with pytest.raises(ValueError, match="vocab_size=100: wanted more than"):
        corpus(vocab_size=100).training_batch(0, 0)


# The settings


@pytest.mark.parametrize(
    ("build", "changes", "message"),
    [
        (ModelSettings, {"dim": 0}, "dim=0: wanted an integer, 1 or more"),
        (ModelSettings, {"num_heads": 3}, "num_heads=3: wanted a number that divides dim=128"),
        (ModelSettings, {"num_kv_heads": 3}, "num_kv_heads=3: wanted a divisor of num_heads=4"),
        (ModelSettings, {"vocab_size": 2**17}, "vocab_size=131072: wanted an integer, 2 to 65536"),
        (MoESettings, {"experts_per_token": 9}, "experts_per_token=9: wanted an integer, 1 to 4"),
        (OptimizerSettings, {"name": "AdamW"}, "name='AdamW': wanted a dotted name"),
        (OptimizerSettings, {"lr": float("nan")}, "lr=nan: wanted a number, 0 or more"),
        (OptimizerSettings, {"kwargs": {"lr": 1}}, "the learning rate belongs in lr"),
        (TrainSettings, {"name": "../x"}, "name='../x': wanted a relative path below runs/"),
        (TrainSettings, {"steps": 1.5}, "steps=1.5: wanted an integer"),
        (TrainSettings, {"device": "tpu"}, "device='tpu': wanted one of auto, cpu, cuda"),
        (TrainSettings, {"reduce_dtype": "int8"}, "reduce_dtype='int8': wanted one of float32"),
    ],
)
def test_bad_settings_name_setting_value_and_choice(
    build: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        build(**changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "torch.optim.AdamZ"}, "optimizer.name='torch.optim.AdamZ'"),
        ({"name": "no_such_module.Adam"}, "optimizer.name='no_such_module.Adam'"),
        ({"name": "torch.nn.Linear"}, "derived from torch.optim.Optimizer"),
        ({"kwargs": {"momentun": 0.9}}, "optimizer.kwargs={'momentun': 0.9}"),
    ],
)
def test_bad_optimizers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        build_optimizer(nn.Linear(2, 2), OptimizerSettings(**settings))
    assert message in str(error.value)


def test_learning_rate_warms_up_and_ends_where_asked() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=4, final_lr_ratio=0.1)
    rates = [learning_rate(step, 20, settings) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
SMALL = sorted(set(CONFIGS) - {"moe", "llama_1b"})


def config(name: str, *flags: str) -> TrainSettings:
    return read_settings([f"--config={ROOT}/configs/{name}.yaml", *flags])


def test_small_configs_differ_in_the_reduction_only() -> None:
    wanted = {"baseline_fp32", "baseline_bf16", "loco4", "loco8", "classic4", "no_feedback4"}
    assert wanted | {"quickstart", "paper"} <= set(SMALL)
    first, *others = (
        replace(config(name), name="same", reduce_dtype="float32", loco=None) for name in SMALL
    )
    assert all(other == first for other in others)
    assert [config(name).name for name in CONFIGS] == CONFIGS


def test_flags_override_the_file() -> None:
    assert config("quickstart", "--loco.bits=8").loco == LoCoConfig(bits=8)
    assert config("quickstart", "--loco=null").loco is None
    assert config("baseline_fp32", "--loco.block_size=64").loco == LoCoConfig(block_size=64)
    assert config("baseline_fp32", "--optimizer.kwargs.betas=[0.8,0.9]").optimizer.kwargs[
        "betas"
    ] == [0.8, 0.9]
    with pytest.raises(SystemExit, match="block_size=17: wanted an even number"):
        config("quickstart", "--loco.block_size=17")


def test_large_config_has_the_size_it_claims() -> None:
    settings = config("llama_1b")
    with torch.device("meta"):
        model = Decoder(settings.model, max_length=8)
    assert 1.0e9 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e9


# A run


def train(folder: Path, settings: TrainSettings) -> list[dict[str, Any]]:
    """Complete a run in ``folder`` on this rank; returns the lines of its log."""
    with chdir(folder):
        world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
        build_run(settings, world).complete()
        dist.barrier()
        lines = (run_folder(settings) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def tiny(folder: Path, **changes: Any) -> TrainSettings:
    (folder / "text.txt").write_text(
        "".join(f"{n} bottles of beer on the wall\n" for n in range(400))
    )
    return TrainSettings(
        name="tiny",
        device="cpu",
        data=str(folder / "text.txt"),
        batch_size=2,
        sequence_length=16,
        model=DENSE,
        sample_tokens=8,
        validation_batches=2,
        **changes,
    )


def test_a_resumed_run_equals_one_without_interruption(ranks: RankPool, tmp_path: Path) -> None:
    settings = tiny(tmp_path, steps=20, checkpoint_interval=8, accumulation_steps=2)
    whole = ranks.run(train, 2, tmp_path, settings)[0]
    checkpoints = tmp_path / "runs/tiny/checkpoints"
    with pytest.raises(AssertionError, match="holds a checkpoint of step 16"):
        ranks.run(train, 2, tmp_path, settings)
    # What a save leaves that was interrupted is no checkpoint.
    (checkpoints / "step-00000016").rename(checkpoints / "step-00000016.partial")
    resumed = ranks.run(train, 2, tmp_path, replace(settings, resume=True))[0]
    assert [line["step"] for line in resumed] == list(range(1, 21))
    for before, after in zip(whole, resumed, strict=True):
        for key in ("step", "loss", "grad_norm", "lr", "bytes_sent"):
            assert before[key] == after[key]
    other = replace(settings, resume=True, model=EXPERTS)
    with pytest.raises(AssertionError, match=r"ValueError: model=.* the checkpoint"):
        ranks.run(train, 2, tmp_path, other)


def test_loco_run(ranks: RankPool, tmp_path: Path) -> None:
    settings = tiny(tmp_path, steps=6, loco=LoCoConfig(min_numel=0), accumulation_steps=2)
    lines = ranks.run(train, 2, tmp_path, settings)[0]
    plain = plain_reduction_bytes(decoder(DENSE), torch.float32, 2)
    assert all(0 < line["bytes_sent"] < plain / 4 for line in lines)
    summary = json.loads((tmp_path / "runs/tiny/summary.json").read_text())
    assert summary["gradient_bytes_per_step"] == lines[0]["bytes_sent"]
    assert summary["steps"] == 6
    saved = read_settings([f"--config={tmp_path}/runs/tiny/settings.yaml"])
    assert asdict(saved) == asdict(settings)


# The comparison


def test_comparison_rows() -> None:
    def summary(bits: float, sent: float) -> dict[str, Any]:
        shared = {"step_seconds": 0.5, "steps": 10, "world_size": 2}
        return {"val_bits_per_byte": bits, "gradient_bytes_per_step": sent, **shared}

    rows = comparison_rows(
        {
            "baseline_fp32": summary(2.0, 800.0),
            "baseline_bf16": summary(2.0, 400.0),
            "loco4": summary(2.01, 100.0),
        }
    )
    assert [row["name"] for row in rows] == ["baseline_fp32", "baseline_bf16", "loco4"]
    assert rows[2]["gap_percent"] == pytest.approx(0.5)
    assert (rows[2]["ratio_vs_bf16"], rows[2]["ratio_vs_fp32"]) == (4.0, 8.0)
