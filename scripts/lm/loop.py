"""One rank's part in a run: an optimizer step, a validation, and the building of both."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lm.data import Batch, Corpus, load_tokens
from lm.model import Decoder
from lm.optimizer import build_optimizer, learning_rate
from lm.parallel import World, full_value, plain_reduction_bytes, shard
from lm.runlog import Record
from lm.settings import TrainSettings
from loco_fsdp import LoCoOptimizer


@dataclass(kw_only=True)
class Trainer:
    """One rank's part in a run."""

    settings: TrainSettings
    """Settings of the run."""

    world: World
    """The ranks."""

    model: Decoder
    """The sharded decoder."""

    optimizer: torch.optim.Optimizer
    """The optimizer that the settings name, or ``LoCoOptimizer`` around it."""

    corpus: Corpus
    """The data."""

    reduction_bytes: int
    """Bytes this rank sends in one reduction without LoCo."""

    bytes_counted: int = 0
    """LoCo's count of sent bytes after the last step."""

    def train_step(self, step: int) -> Record:
        """Do optimizer step ``step`` (counted from 0) and return its line for the log."""
        started = time.perf_counter()
        rate = learning_rate(step, self.settings.steps, self.settings.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._accumulate(step)
        grad_norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean_loss = self.world.mean(loss)  # waits for the device, so the time is the whole step's
        seconds = time.perf_counter() - started
        return {
            "step": step + 1,
            "loss": mean_loss,
            "tokens_per_second": self._tokens_per_step() / seconds,
            "bytes_sent": self._bytes_sent(),
            "grad_norm": grad_norm,
            "lr": rate,
            "step_seconds": seconds,
        }

    @torch.no_grad()
    def validate(self) -> float:
        """Mean cross-entropy of the validation set over all ranks, in nats per token."""
        batches = self.corpus.validation_batches(
            self.world.rank, self.world.size, self.settings.validation_batches
        )
        losses = [self._losses(batch)[0].float() for batch in batches]
        return self.world.mean(torch.stack(losses).mean())

    def _accumulate(self, step: int) -> Tensor:
        """Run the micro-batches of a step; only the last one's backward reduces gradients.

        Returns this rank's mean cross-entropy, a scalar.
        """
        count = self.settings.accumulation_steps
        total = torch.zeros((), device=self.world.device)
        for micro_batch in range(count):
            assert isinstance(self.model, FSDPModule)
            self.model.set_requires_gradient_sync(micro_batch == count - 1)
            batch = self.corpus.training_batch(step, self.world.rank, micro_batch)
            cross_entropy, balance_loss = self._losses(batch)
            ((cross_entropy + balance_loss) / count).backward()
            total += cross_entropy.detach() / count
        return total

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy and weighted load-balancing loss of a batch, both scalar float32."""
        device = self.world.device
        output = self.model(batch.inputs.to(device))
        logits = output.logits.float().flatten(0, 1)  # [B*T, V]
        cross_entropy = F.cross_entropy(logits, batch.targets.to(device).flatten())
        moe = self.settings.model.moe
        return cross_entropy, output.balance_loss * (moe.balance_weight if moe else 0.0)

    def _clip(self) -> float:
        """Clip the gradients by their norm over all ranks; returns the norm before."""
        limit = self.settings.optimizer.max_grad_norm
        # An infinite limit measures the norm and changes nothing.
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), float("inf") if limit is None else limit
        )
        return full_value(norm)

    def _bytes_sent(self) -> int:
        """Bytes of gradients that this rank sent in the step just done."""
        if not isinstance(self.optimizer, LoCoOptimizer):
            return self.reduction_bytes
        before = self.bytes_counted
        self.bytes_counted = self.optimizer.loco.bytes_sent
        return self.bytes_counted - before

    def _tokens_per_step(self) -> int:
        settings = self.settings
        per_rank = settings.batch_size * settings.sequence_length * settings.accumulation_steps
        return per_rank * self.world.size


def build_trainer(settings: TrainSettings, world: World) -> Trainer:
    """Read the data, build and shard the model, build the optimizer."""
    tokens, is_bytes = load_tokens(settings.data)
    corpus = Corpus(
        tokens=tokens,
        is_bytes=is_bytes,
        sequence_length=settings.sequence_length,
        batch_size=settings.batch_size,
        vocab_size=settings.model.vocab_size,
        seed=settings.seed,
    )
    torch.manual_seed(settings.seed)  # every rank builds the same parameters
    with world.device:
        model = Decoder(settings.model, max_length=settings.sequence_length)
    dtype = getattr(torch, settings.reduce_dtype)
    reduction_bytes = plain_reduction_bytes(model, dtype, world.size)
    shard(model, settings, world)
    inner = build_optimizer(model, settings.optimizer)
    optimizer = inner if settings.loco is None else LoCoOptimizer(inner, model, settings.loco)
    return Trainer(
        settings=settings,
        world=world,
        model=model,
        optimizer=optimizer,
        corpus=corpus,
        reduction_bytes=reduction_bytes,
    )
