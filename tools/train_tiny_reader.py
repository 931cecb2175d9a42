"""Train the tiny reader on synthetic pages, on one CPU core.

    python tools/train_tiny_reader.py --out pipeline/models/tiny-reader --seed 0

A run resumes from the snapshot it finds in `--snapshots`. The batch of a step depends on the seed
and the step alone, so a resumed run sees what an unbroken one would have seen. The checkpoint
holds the running average of the weights, rounded to bfloat16.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from reader_batches import training_batch
from reader_model import new_reader, save_reader
from reader_training import SlotHeads, step_losses

AVERAGE_DECAY = 0.997
SLOT_LOSS_WEIGHT = 1.0
# AdamW's learning rate as a share of Muon's.
ADAM_SHARE = 0.25


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 50 steps, then a cosine down to 2 % of the peak."""
    if step < 50:
        return peak * (step + 1) / 50
    progress = (step - 50) / max(1, steps - 50)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


class Trainer:
    """Weights, optimizers and the running average of a run."""

    def __init__(self, seed: int, peak: float) -> None:
        self.seed, self.peak, self.step = seed, peak, 0
        self.model = new_reader(seed)
        self.heads = SlotHeads()
        self.average = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.optimizers = self._optimizers()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of the blocks, AdamW for the rest."""
        matrices, others = [], []
        for name, parameter in self.model.named_parameters():
            # Orthogonalising the mergers' 512 x 512 costs more than it gains.
            is_hidden = parameter.ndim == 2 and "embed" not in name and "merger" not in name
            (matrices if is_hidden else others).append(parameter)
        return [
            torch.optim.Muon(
                matrices, lr=self.peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                [*others, *self.heads.parameters()],
                lr=self.peak,
                betas=(0.9, 0.98),
                weight_decay=0.01,
            ),
        ]

    def train_step(self, steps: int, reach: float) -> dict[str, float]:
        """One update; returns the batch's figures."""
        rate = learning_rate(self.step, steps, self.peak)
        for optimizer, factor in zip(self.optimizers, (1.0, ADAM_SHARE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        losses = step_losses(
            self.model,
            self.heads,
            training_batch(self.seed, self.step, reach),
            tower_only=reach < 0,
        )
        (losses["answer"] + SLOT_LOSS_WEIGHT * losses["slots"]).backward()
        nn.utils.clip_grad_norm_([*self.model.parameters(), *self.heads.parameters()], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._update_average()
        self.step += 1
        return {name: float(torch.as_tensor(value).detach()) for name, value in losses.items()}

    @torch.no_grad()
    def _update_average(self) -> None:
        decay = min(AVERAGE_DECAY, (1 + self.step) / (10 + self.step))
        for name, tensor in self.model.state_dict().items():
            self.average[name].lerp_(tensor, 1 - decay)

    def save(self, path: Path) -> None:
        """Write a snapshot, replacing the last one only when complete."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "average": self.average,
        }
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self, path: Path) -> None:
        """Go on from a snapshot."""
        state = torch.load(path, weights_only=True)
        self.step, self.average = state["step"], state["average"]
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--snapshots", type=Path, default=Path("/tmp/tiny-reader-snapshots"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--stop", type=int, help="stop after this step of the schedule")
    parser.add_argument("--tower-steps", type=int, default=500, help="steps for the tower alone")
    parser.add_argument(
        "--curriculum", type=int, default=1000, help="steps from one line to the hardest pages"
    )
    parser.add_argument("--peak", type=float, default=8e-3, help="highest learning rate")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(args.seed, args.peak)
    snapshot = args.snapshots / "last.pt"
    if snapshot.exists():
        trainer.load(snapshot)
    sums: dict[str, float] = {}
    started, first = time.monotonic(), trainer.step
    while trainer.step < (args.stop or args.steps):
        reach = (trainer.step - args.tower_steps) / args.curriculum
        for name, value in trainer.train_step(args.steps, reach).items():
            sums[name] = sums.get(name, 0) + value / 25
        if trainer.step % 25 == 0:
            seconds = (time.monotonic() - started) / (trainer.step - first)
            print(
                f"step {trainer.step} {seconds:.2f} s/step",
                *(f"{k} {v:.3f}" for k, v in sums.items()),
                flush=True,
            )
            sums = {}
        if trainer.step % 250 == 0:
            trainer.save(snapshot)
            save_reader(trainer.average, args.snapshots / "checkpoint")
    save_reader(trainer.average, args.out)


if __name__ == "__main__":
    main()
