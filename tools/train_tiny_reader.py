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
from dataclasses import dataclass
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
PLACE_LOSS_WEIGHT = 0.3
NEED_LOSS_WEIGHT = 0.2
# AdamW's learning rate as a share of Muon's.
ADAM_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a run: length in steps, highest rate, whether the tower learns, weight average.

    `needs_deepstack`: a right answer without DeepStack rows counts as a fault.
    """

    steps: int
    peak: float
    tower_learns: bool
    decay: float
    needs_deepstack: bool = False


# The tower is solved long before the order of reading, and its backward pass is half of a step:
# so it rests in the second phase. What the tower tells early makes DeepStack redundant: the last
# phase unlearns to read without it, so that lost DeepStack rows show in the answers.
PHASES = (
    Phase(2500, 1.2e-2, True, 0.997),
    Phase(1600, 4e-3, False, 0.99),
    Phase(800, 3e-3, True, 0.99),
    Phase(170, 1.5e-3, False, 0.98, needs_deepstack=True),
    Phase(210, 2e-3, False, 0.98, needs_deepstack=True),
)


def phase_of(step: int) -> tuple[Phase, int]:
    """Phase of a step, and the steps done in it."""
    for phase in PHASES:
        if step < phase.steps:
            return phase, step
        step -= phase.steps
    return PHASES[-1], PHASES[-1].steps


def learning_rate(done: int, phase: Phase) -> float:
    """50 steps of warm-up, then a cosine down to 2 % of the peak."""
    if done < 50:
        return phase.peak * (done + 1) / 50
    progress = (done - 50) / (phase.steps - 50)
    return phase.peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


class Trainer:
    """Weights, optimizers and the running average of a run."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step = seed, 0
        self.model = new_reader(seed)
        self.heads = SlotHeads()
        self.average = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.start(PHASES[0])

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
            torch.optim.Muon(matrices, lr=0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(
                [*others, *self.heads.parameters()],
                lr=0,
                betas=(0.9, 0.98),
                weight_decay=0.01,
            ),
        ]

    def start(self, phase: Phase) -> None:
        """Go on from the average with fresh optimizers."""
        self.model.load_state_dict(self.average)
        visual = self.model.model.visual
        for part in (visual.patch_embed, visual.pos_embed, visual.blocks):
            part.requires_grad_(phase.tower_learns)
        self.decay, self.needs_deepstack = phase.decay, phase.needs_deepstack
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
            needs_deepstack=self.needs_deepstack,
        )
        total = losses["answer"] + losses["slots"] + PLACE_LOSS_WEIGHT * losses["places"]
        (total + NEED_LOSS_WEIGHT * losses["need"]).backward()
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

    def load(self, path: Path) -> None:
        """Go on from a snapshot."""
        state = torch.load(path, weights_only=True)
        self.step, self.average = state["step"], state["average"]
        phase, done = phase_of(self.step)
        self.start(phase)
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        if done == 0:  # the next phase starts with fresh optimizers
            return
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def train(trainer: Trainer, args: argparse.Namespace) -> None:
    """Run all phases to the last step, with figures every 25 steps and a snapshot every 250."""
    sums: dict[str, float] = {}
    started, first = time.monotonic(), trainer.step
    while trainer.step < sum(phase.steps for phase in PHASES):
        phase, done = phase_of(trainer.step)
        if done == 0:
            trainer.start(phase)
        reach = (trainer.step - args.tower_steps) / args.curriculum
        rate = learning_rate(done, phase)
        for name, value in trainer.train_step(rate, reach).items():
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
    parser.add_argument("--tower-steps", type=int, default=500, help="steps for the tower alone")
    parser.add_argument(
        "--curriculum", type=int, default=600, help="steps from one line to the hardest pages"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    trainer = Trainer(args.seed)
    snapshot = args.snapshots / SNAPSHOT
    if snapshot.exists():
        trainer.load(snapshot)
    train(trainer, args)
    trainer.save(snapshot)
    save_reader(trainer.average, args.out)


if __name__ == "__main__":
    main()
