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

SNAPSHOT = "last.pt"
PRINT_STEPS = 25
SNAPSHOT_STEPS = 250
AVERAGE_DECAY = 0.997
READING_AVERAGE_DECAY = 0.99
PLACE_LOSS_WEIGHT = 0.3
# AdamW's learning rate as a share of Muon's.
ADAM_SHARE = 0.25


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rate in a phase of `steps`: 50 steps of warm-up, then a cosine down to 2 % of the peak."""
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
        self.decay = AVERAGE_DECAY
        self.average = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.optimizers = self._optimizers()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of the blocks, AdamW for the rest."""
        matrices, others = [], []
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
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

    def freeze_tower(self) -> None:
        """Go on from the average, with the tower fixed but for its mergers.

        The tower is solved long before the reading order, and its backward pass is half of a step.
        """
        self.model.load_state_dict(self.average)
        visual = self.model.model.visual
        for part in (visual.patch_embed, visual.pos_embed, visual.blocks):
            part.requires_grad_(False)
        self.decay = READING_AVERAGE_DECAY
        self.optimizers = self._optimizers()

    def train_step(self, rate: float, reach: float) -> dict[str, float]:
        """One update; returns the batch's figures."""
        for optimizer, factor in zip(self.optimizers, (1.0, ADAM_SHARE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        losses = step_losses(
            self.model,
            self.heads,
            training_batch(self.seed, self.step, reach),
            tower_only=reach < 0,
        )
        (losses["answer"] + losses["slots"] + PLACE_LOSS_WEIGHT * losses["places"]).backward()
        nn.utils.clip_grad_norm_([*self.model.parameters(), *self.heads.parameters()], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._update_average()
        self.step += 1
        return {name: float(torch.as_tensor(value).detach()) for name, value in losses.items()}

    @torch.no_grad()
    def _update_average(self) -> None:
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
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

    def load(self, path: Path, steps: int) -> None:
        """Go on from a snapshot; after `steps` steps the tower is frozen."""
        state = torch.load(path, weights_only=True)
        self.step, self.average = state["step"], state["average"]
        if self.step > steps:
            self.freeze_tower()
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def rate_of(step: int, args: argparse.Namespace) -> float:
    """Learning rate of a step of the whole run."""
    if step < args.steps:
        return learning_rate(step, args.steps, args.peak)
    return learning_rate(step - args.steps, args.reading_steps, args.reading_peak)


def train(trainer: Trainer, args: argparse.Namespace) -> None:
    """Run both phases to the last step, with figures every 25 steps and a snapshot every 250."""
    sums: dict[str, float] = {}
    started, first = time.monotonic(), trainer.step
    while trainer.step < args.steps + args.reading_steps:
        if trainer.step == args.steps:
            trainer.freeze_tower()
        reach = (trainer.step - args.tower_steps) / args.curriculum
        for name, value in trainer.train_step(rate_of(trainer.step, args), reach).items():
            sums[name] = sums.get(name, 0) + value / PRINT_STEPS
        if trainer.step % PRINT_STEPS == 0:
            seconds = (time.monotonic() - started) / (trainer.step - first)
            figures = " ".join(f"{name} {value:.3f}" for name, value in sums.items())
            print(f"step {trainer.step} {seconds:.2f} s/step {figures}", flush=True)
            sums = {}
        if trainer.step % SNAPSHOT_STEPS == 0:
            trainer.save(args.snapshots / SNAPSHOT)
            save_reader(trainer.average, args.snapshots / "checkpoint")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--snapshots", type=Path, default=Path("/tmp/tiny-reader-snapshots"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--tower-steps", type=int, default=500, help="steps for the tower alone")
    parser.add_argument(
        "--curriculum", type=int, default=600, help="steps from one line to the hardest pages"
    )
    parser.add_argument("--peak", type=float, default=1.2e-2, help="highest learning rate")
    parser.add_argument(
        "--reading-steps", type=int, default=800, help="further steps with the tower frozen"
    )
    parser.add_argument("--reading-peak", type=float, default=4e-3, help="their highest rate")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    trainer = Trainer(args.seed, args.peak)
    snapshot = args.snapshots / SNAPSHOT
    if snapshot.exists():
        trainer.load(snapshot, args.steps)
    train(trainer, args)
    trainer.save(snapshot)
    save_reader(trainer.average, args.out)


if __name__ == "__main__":
    main()
