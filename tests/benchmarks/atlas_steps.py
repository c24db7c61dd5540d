"""CPU time of a training step of each arm of the atlas, as a ratio to a step of its control.

    python tests/benchmarks/atlas_steps.py digits-textbook --csv docs/results

All arms train in one process and take turns, batch by batch: each has a thread with a Trainer, and
only the thread that has the turn runs. A turn lasts from the start of a batch to the start of the
next, so it contains the data loading and all callbacks. Times are CPU times of the process, on one
thread of torch, so waiting does not count. A ratio is a ratio of sums over all rounds, because some
callbacks work in every fifth or tenth step only. Writes atlas-steps-STUDY.csv.
"""

import argparse
import os
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from atlas import CONFIGS, STUDIES, Study, arm_name
from atlas_table import control_of
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from lit_diffusion.checkpoints.loading import instantiate
from lit_diffusion.lab.compare.sweep import BASELINE, fit_settings
from lit_diffusion.lab.compare.tables import to_csv

WARM_UP = 10
"""Steps of each arm that are not measured. The first steps are slower, as memory is allocated."""


class Turns(Callback):
    """Waits for its turn before each batch, and passes the turn on before the next batch."""

    def __init__(self, turn: threading.Semaphore, next_turn: threading.Semaphore) -> None:
        self.turn, self.next_turn = turn, next_turn
        self.start: float | None = None
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        if self.start is not None:
            self.end_turn()
        self.turn.acquire()
        self.start = time.process_time()

    def on_train_end(self, *_: Any) -> None:
        self.end_turn()

    def end_turn(self) -> None:
        assert self.start is not None
        self.seconds.append(time.process_time() - self.start)
        self.next_turn.release()


def exit_on_error(error: threading.ExceptHookArgs) -> None:
    """End the process, because the other threads would wait for the turn of this one."""
    traceback.print_exception(error.exc_value)
    os._exit(1)


def fit(study: Study, arm: str, turns: Turns, rounds: int) -> threading.Thread:
    """A thread that trains an arm with all of its callbacks, except those that evaluate."""
    names = [*study.experiment, *(f"arms/{name}" for name in arm.split("+") if name)]
    settings = fit_settings(arm, [str(CONFIGS / f"{name}.yaml") for name in names], [])
    callbacks = [
        instantiate([spec], Callback, (), arm)
        for spec in settings["trainer"]["callbacks"]
        if spec["class_path"].rpartition(".")[2] not in ("FIDEvaluation", "SampleGrid")
    ]
    trainer = Trainer(
        accelerator="cpu",
        max_steps=rounds,
        limit_val_batches=0,
        callbacks=[turns, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = instantiate([settings["model"]], LightningModule, (), arm)
    data = instantiate([settings["data"]], LightningDataModule, (), arm)
    return threading.Thread(target=trainer.fit, args=(module, data), daemon=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    threading.excepthook = exit_on_error
    study = STUDIES[args.study]
    turns = [threading.Semaphore(0) for _ in study.arms]
    measured: dict[str, Turns] = {}
    threads = []
    for k, arm in enumerate(study.arms):
        name = arm_name(arm)
        measured[name] = Turns(turns[k], turns[(k + 1) % len(turns)])
        threads.append(fit(study, arm, measured[name], WARM_UP + args.rounds))
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join()
    totals = {name: sum(each.seconds[WARM_UP:]) for name, each in measured.items()}
    rows = [
        {
            "arm": name,
            "milliseconds": 1e3 * total / args.rounds,
            "ratio to control": total / totals[control_of(name)],
            "ratio to baseline": total / totals[BASELINE],
        }
        for name, total in totals.items()
    ]
    (args.csv / f"atlas-steps-{args.study}.csv").write_text(to_csv(rows))


if __name__ == "__main__":
    main()
