"""FID during training: which weights, which samples, which real images, all written down."""

import json
import math
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_diffusion.callbacks.parts.fid_inputs import refuse_unable, tested_split, try_one
from lit_diffusion.callbacks.parts.fid_measurement import SPLITS, FIDMeasurement
from lit_diffusion.callbacks.parts.inference import providers, weights_in_place
from lit_diffusion.callbacks.parts.triggers import RunsEveryNSteps, log_in_row_of_step
from lit_diffusion.counts import is_count
from lit_diffusion.files import user_cache
from lit_diffusion.metrics.batches import Where
from lit_diffusion.metrics.extractors import FIDProtocol, TrainedCNN, protocol_by_name
from lit_diffusion.metrics.image_count import ImageCount, counted, read_count
from lit_diffusion.metrics.record import FIDRecord, write_evaluation
from lit_diffusion.metrics.reference import Reference
from lit_diffusion.protocols import WeightsProvider


class FIDEvaluation(RunsEveryNSteps):
    """Scores samples by FID after every validation, or every so many optimizer steps.

    Samples are `pl_module.generate(seeds, labels)` for the seeds 0 .. num_samples - 1, with labels
    seed mod `num_classes` where the module has classes; process r of R takes the seeds r, r + R,
    .... They are made in eval mode, under the Trainer's precision, with the weights asked for; the
    extractor works in float32. Weights, modes and random state of training are as before.

    Logs `val/fid_<num_samples>` and beside it the floor, the FID of as many real images with the
    same labels; `trainer.test` logs `test/fid_...` where the data have a test split. Other weights
    than "ema" are part of the name. One line with the whole protocol goes to `evaluations.jsonl` in
    the Trainer's `default_root_dir`, and the best step so far is saved there as
    `checkpoints/best-fid.ckpt`. (With `every_n_steps` the FID goes to the loggers alone:
    `ModelCheckpoint(monitor=...)` would rank later weights under an older FID.) Samples that are
    not finite make the FID NaN and are named; training goes on. `fast_dev_run` checks the set-up.

    Args:
        num_samples: to generate, >= 2. An FID depends on it: compare equal numbers only.
        extractor: an FID protocol, or the name of one: "inception-v3-compat", "digits-cnn",
            "patches-cnn"; or a file of `lit-diffusion train-extractor`, which is copied to the
            Trainer's `default_root_dir`.
        reference: real images to compare with: a split of the data ("train", "val", "test"), a
            folder of images, or an .npz of them. Splits of foreign data are used as they come,
            augmented if they are.
        every_n_steps: optimizer steps between evaluations; None evaluates after every validation.
        weights: name of the weights to use, as a `WeightsProvider` among the callbacks has it;
            "raw" are the weights being trained.
        batch_size: samples at a time on each process, >= 1.
        save_best: whether to write best-fid.ckpt.
        cache_dir: folder for statistics of the real images; None is ~/.cache/lit-diffusion.
        repeats_at_end: further evaluations of the last step of a fit, with the next seeds, for
            `evaluations.jsonl` only: how much FIDs differ by their samples alone.
        images: where the images of a foreign batch are: an index, a key, or a function of the
            batch that gives them, (N, C, H, W). None takes the batch itself, its first part, or the
            one image tensor of a dictionary. Floats are taken if they are 256 levels over [0, 1] or
            over [-1, 1].
        second_look: whether `evaluations.jsonl` also tells what the same samples score by other
            measures: the FID beside held-out images, if `reference` is "train"; Frechet distances
            of pixels and of an untrained network's features; each with its floor; precision and
            recall, by the extractor and in pixels; and the share of samples that are nearer to a
            training image than the median held-out image is (0.5 is usual, copies give 1).

    Raises:
        ValueError: a number out of its range; at the start of a run, missing weights or data.
        FileNotFoundError: at the start of a run, for a missing weight file of the extractor.

    Source: as of `metrics.frechet.FrechetDistance`.

    Example:
        >>> FIDEvaluation(360, "digits-cnn").metric_name("val")
        'val/fid_360'
    """

    def __init__(
        self,
        num_samples: int,
        extractor: FIDProtocol | str,
        reference: str = "val",
        every_n_steps: int | None = None,
        weights: str = "ema",
        batch_size: int = 64,
        save_best: bool = True,
        cache_dir: str | None = None,
        repeats_at_end: int = 0,
        images: Where = None,
        second_look: bool = True,
    ) -> None:
        super().__init__(every_n_steps)
        _require(num_samples >= 2, "num_samples", ">= 2", num_samples)
        _require(batch_size >= 1, "batch_size", ">= 1", batch_size)
        exists = reference in SPLITS or Path(reference).exists()
        _require(exists, "reference", f"one of {', '.join(SPLITS)} or an existing path", reference)
        _require(repeats_at_end >= 0, "repeats_at_end", ">= 0", repeats_at_end)
        self.num_samples = num_samples
        self.protocol = protocol_by_name(extractor) if isinstance(extractor, str) else extractor
        self.reference = reference
        self.batch_size = batch_size
        self.weights_name = weights
        self.save_best = save_best
        self.repeats_at_end = repeats_at_end
        cache = user_cache() if cache_dir is None else Path(cache_dir)
        self._measurement = FIDMeasurement(
            num_samples, self.protocol, reference, weights, batch_size, cache, images, second_look
        )
        self._evaluated_step: int | None = None
        self.best_score: float | None = None
        self.best_step: int | None = None
        self._unsaved = False  # of the best
        self._best_against: dict[str, str] = {}  # see _measured_with
        self.image_count: ImageCount | None = None  # of the fit
        self._checkpoint_step: int | None = None

    def metric_name(self, stage: str) -> str:
        """Name that the FID is logged under; `stage` is "val" or "test"."""
        thousands, rest = divmod(self.num_samples, 1000)
        count = self.num_samples if rest else f"{thousands}k"
        weights = "" if self.weights_name == "ema" else f"_{self.weights_name}"
        return f"{stage}/fid_{count}{weights}"

    def metric_names(self) -> list[str]:
        """The FID and its floor."""
        return [self.metric_name("val"), self.metric_name("val") + "_floor"]

    # What has to be right before the first step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise now rather than at step 10,000."""
        super().setup(trainer, pl_module, stage)
        self._measurement.looks.clear()  # the data may be others than in the last run
        self._evaluated_step, self._unsaved = None, False
        if stage == "fit":  # what a checkpoint has is loaded after this
            self.best_score = self.best_step = self.image_count = None
        if stage == "predict":
            return
        refuse_unable(pl_module, "FIDEvaluation")
        self._refuse_unknown_weights(trainer)
        self.protocol.check()
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, FIDEvaluation) and other is not self:
                self._refuse_beside(other)

    def _refuse_unknown_weights(self, trainer: Trainer) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if self.weights_name != "raw" and not providers(trainer, self.weights_name):
            known = [c.names() for c in callbacks if isinstance(c, WeightsProvider)]
            raise ValueError(
                f"FIDEvaluation(weights={self.weights_name!r}): the callbacks provide "
                f"{', '.join(sorted({'raw'}.union(*known)))}; add lit_diffusion.callbacks.EMA or "
                "choose one of these."
            )

    def _refuse_beside(self, other: "FIDEvaluation") -> None:
        name, both = self.metric_name("val"), "two FIDEvaluation callbacks would both"
        if other.metric_name("val") == name:
            raise ValueError(f"{both} log {name}: give one another num_samples or other weights.")
        if self.save_best and other.save_best:
            raise ValueError(f"{both} write best-fid.ckpt: pass save_best=False to one of them.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the real images."""
        super().on_train_start(trainer, pl_module)
        self.image_count = counted(trainer, self.image_count)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            if isinstance(self.protocol, TrainedCNN) and trainer.is_global_zero:
                self.protocol.copy_to(Path(trainer.default_root_dir))
            reference = self._measurement.real(trainer, pl_module, "val").views[0].reference
            varying = self._measurement.varying(trainer, pl_module)
            self._forget_best_of_others(self._measured_with(reference, varying))

    # When

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate after a validation; where that only checks that it works, so does this."""
        by_steps = self.every_n_steps is not None and trainer.state.fn == TrainerFn.FITTING
        if trainer.sanity_checking:
            try_one(trainer, pl_module)
        elif not by_steps:
            pl_module.log_dict(self._evaluate(trainer, pl_module, "val"), sync_dist=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the best, once the loggers have what was measured."""
        self._save_best(trainer)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate against the test split, or what the data have in its place."""
        numbers = self._evaluate(trainer, pl_module, tested_split(trainer))
        pl_module.log_dict(numbers, sync_dist=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the last step again with other samples, for evaluations.jsonl alone."""
        if trainer.fast_dev_run or not self.repeats_at_end:  # type: ignore[attr-defined]
            return
        if self._evaluated_step != trainer.global_step:
            self.at_step(trainer, pl_module)
        for repeat in range(1, self.repeats_at_end + 1):
            record = self._record(trainer, pl_module, "val", repeat * self.num_samples)
            self._write(trainer, record)

    def at_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate, for the loggers."""
        log_in_row_of_step(trainer, self._evaluate(trainer, pl_module, "val"))
        self._save_best(trainer)

    # What is done with one

    def _evaluate(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> dict[str, float]:
        """One evaluation, from weights to files; what is to be logged. All processes call it."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return try_one(trainer, pl_module)
        record = self._record(trainer, pl_module, stage)
        self._write(trainer, record)
        if trainer.state.fn == TrainerFn.FITTING:
            self._evaluated_step = record.step
            best = math.inf if self.best_score is None else self.best_score
            if self.save_best and record.value is not None and record.value < best:
                self.best_score, self.best_step = record.value, record.step
                self._unsaved = True
        value = math.nan if record.value is None else record.value
        return {record.metric: value, f"{record.metric}_floor": record.floor}

    def _record(
        self, trainer: Trainer, pl_module: LightningModule, stage: str, first_seed: int = 0
    ) -> FIDRecord:
        # A Trainer that only evaluates a checkpoint knows neither its steps nor its images.
        evaluates = trainer.state.fn != TrainerFn.FITTING and trainer.ckpt_path is not None
        step = (self._checkpoint_step or 0) if evaluates else trainer.global_step
        trained = trainer.train_dataloader is not None and not evaluates
        images = self.image_count.now(trainer) if self.image_count and trained else None
        name = self.metric_name(stage)
        return self._measurement.record(trainer, pl_module, name, step, first_seed, images)

    def _write(self, trainer: Trainer, record: FIDRecord) -> None:
        if record.value is None:
            rank_zero_warn(
                f"{record.metric} at step {record.step} is NaN: {record.non_finite} of "
                f"{record.num_fake} samples are not finite (seeds {record.non_finite_seeds}...). "
                "Training goes on; the weights may have diverged."
            )
        else:
            rank_zero_info(
                f"{record.metric} = {record.value:.4g} at step {record.step} (floor "
                f"{record.floor:.4g}), {record.seconds['total']:.1f} s."
            )
        if trainer.is_global_zero:
            write_evaluation(Path(trainer.default_root_dir) / "evaluations.jsonl", record)

    def _save_best(self, trainer: Trainer) -> None:
        if not self._unsaved:
            return
        self._unsaved = False
        path = Path(trainer.default_root_dir) / "checkpoints" / "best-fid.ckpt"
        # Validation may have the averages in place; a checkpoint holds what is trained.
        with weights_in_place(trainer, "raw"):
            trainer.save_checkpoint(path, weights_only=False)

    def _measured_with(self, reference: Reference, varying: dict[str, Any]) -> dict[str, str]:
        return {
            "extractor_sha256": self.protocol.sha256,
            "reference": reference.name,
            "data": reference.fingerprint,
            **{name: json.dumps(value, sort_keys=True) for name, value in varying.items()},
        }

    def _forget_best_of_others(self, used: dict[str, str]) -> None:
        # Checkpoints of earlier versions do not tell all of it.
        known = used | self._best_against
        differing = [name for name in used if known[name] != used[name]]
        if self.best_score is not None and differing:
            rank_zero_warn(
                f"The best FID of the checkpoint, {self.best_score:.4g} at step {self.best_step}, "
                f"had another {' and '.join(differing)}: it is dropped, and best-fid.ckpt starts "
                "anew."
            )
            self.best_score = self.best_step = None
        self._best_against = used

    @property
    def state_key(self) -> str:
        """Tells callbacks of another number, weights or extractor apart."""
        about = {"metric": self.metric_name("val"), "extractor": self.protocol.sha256[:16]}
        return f"{type(self).__qualname__}{about}"

    def state_dict(self) -> dict[str, Any]:
        """The best FID so far, its step and what it was measured with; the images seen."""
        return {
            "best_score": self.best_score,
            "best_step": self.best_step,
            "best_against": self._best_against,
            "images": self.image_count and list(self.image_count),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        score, step = state_dict["best_score"], state_dict["best_step"]
        _require(isinstance(score, float | None), "best_score", "a number or None", score)
        _require(step is None or is_count(step), "best_step", "a count or None", step)
        against = state_dict["best_against"]
        texts = isinstance(against, dict) and all(isinstance(v, str) for v in against.values())
        _require(texts, "best_against", "texts by name", against)
        self.best_score, self.best_step = score, step
        self._best_against = against
        self.image_count = read_count(state_dict.get("images"))

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember the step of the weights."""
        self._checkpoint_step = checkpoint["global_step"]


def _require(met: bool, name: str, rule: str, value: object) -> None:
    if not met:
        raise ValueError(f"{name} must be {rule}, got {value!r}.")
