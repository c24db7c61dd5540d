"""FID during training: which weights, which samples, which real images, all written down."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_diffusion.callbacks.fid_measurement import (
    SPLITS,
    FIDMeasurement,
    providers,
    weights_in_place,
)
from lit_diffusion.callbacks.strategies import refuse_split_sampling
from lit_diffusion.callbacks.triggers import EveryNSteps
from lit_diffusion.metrics.protocols import FIDProtocol, protocol_by_name
from lit_diffusion.metrics.record import (
    FIDRecord,
    ImageCount,
    batches_done,
    images_of_a_batch,
    short_count,
    write_evaluation,
)
from lit_diffusion.metrics.reference import Reference, default_cache
from lit_diffusion.protocols import CanGenerate


class FIDEvaluation(Callback):
    """Scores samples by FID after every validation, or every so many optimizer steps.

    Samples are `pl_module.generate(seeds, labels)` for the seeds 0 .. num_samples - 1, with labels
    seed mod `num_classes` where the module has classes; process r of R takes the seeds r, r + R,
    ... and all processes compute. The module generates in eval mode, under the Trainer's precision,
    with the weights asked for, whatever other callbacks do and wherever they stand in the list; the
    extractor always works in float32. Training is not touched: weights, modes and random state are
    as before.

    Logs `val/fid_<num_samples>` and beside it the floor, the FID of as many real images with the
    same labels (`metrics.reference.measure`); `trainer.test` logs `test/fid_...` against the test
    split. Other weights than "ema" are part of the name. One line with the whole protocol goes to
    `evaluations.jsonl` in the Trainer's `default_root_dir`, and the best step so far is saved there
    as `checkpoints/best-fid.ckpt`, at that very step. (`ModelCheckpoint(monitor=...)` would rank
    later weights under an older FID, so with `every_n_steps` the FID goes to the loggers alone and
    cannot be monitored.) Samples that are not finite make the FID NaN and are named; training goes
    on. `fast_dev_run` checks the set-up only.

    Args:
        num_samples: to generate, >= 2. An FID depends on it: compare equal numbers only.
        extractor: an FID protocol, or the name of one: "inception-v3-compat", "digits-cnn",
            "patches-cnn".
        reference: real images to compare with: a split of the data ("train", "val", "test"), a
            folder of images, or an .npz of them. Splits of foreign data must be uint8, and are used
            as they come, augmented if they are.
        every_n_steps: optimizer steps between evaluations; None evaluates after every validation.
        weights: name of the weights to use, as a `WeightsProvider` among the callbacks has it;
            "raw" are the weights being trained.
        batch_size: samples at a time on each process, >= 1.
        save_best: whether to write best-fid.ckpt.
        cache_dir: folder for statistics of the real images; None is ~/.cache/lit-diffusion.
        repeats_at_end: further evaluations of the last step of a fit, >= 0, with the seeds
            num_samples .. 2 num_samples - 1 and so on. They show how much of a difference between
            two FIDs is due to the samples alone, and go to `evaluations.jsonl` only.

    Raises:
        ValueError: If a number is out of its range or `reference` does not exist; at the start of a
            run also if weights or data are missing.
        FileNotFoundError: At the start of a run, if the extractor's weight file is missing.

    Source: Heusel et al. 2017, "GANs Trained by a Two Time-Scale Update Rule Converge to a Local
    Nash Equilibrium".

    Example:
        >>> FIDEvaluation(360, "digits-cnn").metric_name("val")
        'val/fid_360'
        >>> FIDEvaluation(50_000, "inception-v3-compat", weights="raw").metric_name("val")
        'val/fid_50k_raw'
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
    ) -> None:
        _require(num_samples >= 2, "num_samples", ">= 2", num_samples)
        _require(batch_size >= 1, "batch_size", ">= 1", batch_size)
        exists = reference in SPLITS or Path(reference).exists()
        _require(exists, "reference", f"one of {', '.join(SPLITS)} or an existing path", reference)
        _require(repeats_at_end >= 0, "repeats_at_end", ">= 0", repeats_at_end)
        self.num_samples = num_samples
        self.protocol = protocol_by_name(extractor) if isinstance(extractor, str) else extractor
        self.weights_name = weights
        self.save_best = save_best
        self.repeats_at_end = repeats_at_end
        cache = default_cache() if cache_dir is None else Path(cache_dir)
        self._measurement = FIDMeasurement(
            num_samples, self.protocol, reference, weights, batch_size, cache
        )
        self._evaluated_step: int | None = None
        self.best_score: float | None = None
        self.best_step: int | None = None
        self._unsaved = False  # of the best
        self._best_against: dict[str, str] = {}  # see _measured_with
        self.image_count: ImageCount | None = None  # of the fit
        self._checkpoint_step: int | None = None
        self._trigger = EveryNSteps(every_n_steps)

    def metric_name(self, stage: str) -> str:
        """Name that the FID is logged under; `stage` is "val" or "test"."""
        weights = "" if self.weights_name == "ema" else f"_{self.weights_name}"
        return f"{stage}/fid_{short_count(self.num_samples)}{weights}"

    # What has to be right before the first step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise now rather than at step 10,000."""
        self._measurement.forget_references()
        self._evaluated_step, self._unsaved = None, False
        if stage == "fit":
            self._forget_best()  # a checkpoint's is loaded after this
            self.image_count = None
        if stage == "predict":
            return
        if not isinstance(pl_module, CanGenerate):
            raise TypeError(
                f"FIDEvaluation needs a module with generate(seeds, labels), which "
                f"{type(pl_module).__name__} has not: see lit_diffusion.protocols.CanGenerate."
            )
        providers(trainer, self.weights_name)
        self.protocol.check()
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, FIDEvaluation) and other is not self:
                self._refuse_beside(other)

    def _refuse_beside(self, other: "FIDEvaluation") -> None:
        name = self.metric_name("val")
        if other.metric_name("val") == name:
            raise ValueError(
                f"two FIDEvaluation callbacks would both log {name}: give one of them another "
                "num_samples or other weights."
            )
        if self.save_best and other.save_best:
            raise ValueError(
                "two FIDEvaluation callbacks would both write best-fid.ckpt: pass save_best=False "
                "to one of them."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a Trainer under which nothing would be evaluated."""
        self._trigger.refuse_never(trainer, "FIDEvaluation")
        refuse_split_sampling(pl_module, "FIDEvaluation")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the real images."""
        self._trigger.start(trainer.global_step)
        each = images_of_a_batch(trainer)
        count = self.image_count or ImageCount(0, 0, each)
        self.image_count = count.resumed(batches_done(trainer), each)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            _, reference = self._measurement.real(trainer, pl_module, "val")
            varying = self._measurement.varying(trainer, pl_module)
            self._forget_best_of_others(self._measured_with(reference, varying))

    # When

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate after a validation, but not the one that only checks that validation works."""
        by_steps = self._trigger.n is not None and trainer.state.fn == TrainerFn.FITTING
        if not trainer.sanity_checking and not by_steps:
            pl_module.log_dict(self._evaluate(trainer, pl_module, "val"), sync_dist=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the best, once the loggers have what was measured."""
        self._save_best(trainer)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate against the test split."""
        pl_module.log_dict(self._evaluate(trainer, pl_module, "test"), sync_dist=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate every so many optimizer steps."""
        if self._trigger.due(trainer.global_step):
            self._log_at_step(trainer, self._evaluate(trainer, pl_module, "val"))
            self._save_best(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the last step again with other samples, to tell how far the FID depends on them.

        The callbacks' checkpoints and the loggers' curves know nothing of these evaluations.
        """
        if trainer.fast_dev_run or not self.repeats_at_end:  # type: ignore[attr-defined]
            return
        if self._evaluated_step != trainer.global_step:
            self._log_at_step(trainer, self._evaluate(trainer, pl_module, "val"))
            self._save_best(trainer)
        for repeat in range(1, self.repeats_at_end + 1):
            record = self._record(trainer, pl_module, "val", repeat * self.num_samples)
            self._write(trainer, record)

    # What is done with one

    def _evaluate(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> dict[str, float]:
        """One evaluation, from weights to files; what is to be logged. All processes call it."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return {}
        record = self._record(trainer, pl_module, stage)
        self._write(trainer, record)
        if trainer.state.fn == TrainerFn.FITTING:
            self._evaluated_step = record.step
            if self.save_best:
                self._note_best(record)
        return _logged(record)

    def _record(
        self, trainer: Trainer, pl_module: LightningModule, stage: str, first_seed: int = 0
    ) -> FIDRecord:
        name, step = self.metric_name(stage), self._step(trainer)
        images = self._images_seen(trainer)
        return self._measurement.record(trainer, pl_module, name, step, first_seed, images)

    def _log_at_step(self, trainer: Trainer, numbers: dict[str, float]) -> None:
        """Log outside of validation, in the row that Lightning has of the batch before."""
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step - 1)

    def _step(self, trainer: Trainer) -> int:
        """Optimizer steps behind the weights; one that only evaluates has its checkpoint's."""
        return (self._checkpoint_step or 0) if _of_checkpoint(trainer) else trainer.global_step

    def _images_seen(self, trainer: Trainer) -> int | None:
        """Training images behind the weights, where this Trainer has trained them."""
        trained = trainer.train_dataloader is not None and not _of_checkpoint(trainer)
        return self.image_count.at(batches_done(trainer)) if self.image_count and trained else None

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

    def _note_best(self, record: FIDRecord) -> None:
        """Remember the FID where it is the best so far; what it was measured on is yet to save."""
        if record.value is None or (
            self.best_score is not None and record.value >= self.best_score
        ):
            return
        self.best_score, self.best_step = record.value, record.step
        self._unsaved = True

    def _save_best(self, trainer: Trainer) -> None:
        if not self._unsaved:
            return
        self._unsaved = False
        path = Path(trainer.default_root_dir) / "checkpoints" / "best-fid.ckpt"
        # Validation may have the averages in place; a checkpoint holds what is trained.
        with weights_in_place(trainer, "raw"):
            trainer.save_checkpoint(path, weights_only=False)

    def _measured_with(self, reference: Reference, varying: dict[str, Any]) -> dict[str, str]:
        """What two FIDs of one metric name must share to be compared."""
        return {
            "extractor_sha256": self.protocol.sha256,
            "reference": reference.name,
            "data": reference.fingerprint,
            **{name: json.dumps(value, sort_keys=True) for name, value in varying.items()},
        }

    def _forget_best(self) -> None:
        self.best_score = self.best_step = None

    def _forget_best_of_others(self, used: dict[str, str]) -> None:
        """A best that a checkpoint brought decides only over FIDs that compare with it."""
        # Checkpoints of earlier versions do not tell all of it.
        known = used | self._best_against
        differing = [name for name in used if known[name] != used[name]]
        if self.best_score is not None and differing:
            rank_zero_warn(
                f"The best FID of the checkpoint, {self.best_score:.4g} at step {self.best_step}, "
                f"had another {' and '.join(differing)}: it is dropped, and best-fid.ckpt starts "
                "anew."
            )
            self._forget_best()
        self._best_against = used

    @property
    def state_key(self) -> str:
        """Tells callbacks of another number, weights or extractor apart."""
        return self._generate_state_key(
            metric=self.metric_name("val"), extractor=self.protocol.sha256[:16]
        )

    def state_dict(self) -> dict[str, Any]:
        """The best FID so far, its step and what it was measured with; the images seen."""
        return {
            "best_score": self.best_score,
            "best_step": self.best_step,
            "best_against": self._best_against,
            "images": self.image_count and list(self.image_count),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            ValueError: where it is not what `state_dict()` gives.
        """
        score, step = state_dict["best_score"], state_dict["best_step"]
        images = state_dict.get("images") or (None, 0, None)
        counts = [step, *images]
        _require(isinstance(score, float | None), "best_score", "a number or None", score)
        _require(all(n is None or _is_count(n) for n in counts), "steps", "counts", counts)
        against = state_dict["best_against"]
        texts = isinstance(against, dict) and all(isinstance(v, str) for v in against.values())
        _require(texts, "best_against", "texts by name", against)
        self.best_score, self.best_step = score, step
        self._best_against = against
        self.image_count = ImageCount(*images) if state_dict.get("images") else None

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember the step of the weights."""
        self._checkpoint_step = checkpoint["global_step"]


def _of_checkpoint(trainer: Trainer) -> bool:
    """Whether a Trainer only evaluates the weights of a checkpoint."""
    return trainer.state.fn != TrainerFn.FITTING and trainer.ckpt_path is not None


def _logged(record: FIDRecord) -> dict[str, float]:
    """The FID and its floor, as numbers for loggers."""
    numbers = {record.metric: record.value, f"{record.metric}_floor": record.floor}
    return {name: float("nan") if v is None else v for name, v in numbers.items()}


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _require(met: bool, name: str, rule: str, value: object) -> None:
    if not met:
        raise ValueError(f"{name} must be {rule}, got {value!r}.")
