"""Compute the FID during training, and record the settings under which it was computed."""

import json
import math
import re
from contextlib import suppress
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lit_diffusion.callbacks.evaluation import (
    PeriodicEvaluation,
    generate_images,
    inference_mode,
    refuse_other_run,
    require_generate,
    split_images,
    swap_weights,
    weights_providers,
)
from lit_diffusion.files import check_regular, checked_read, user_cache
from lit_diffusion.metrics.auxiliary_metrics import (
    AuxiliaryMetrics,
    FeatureComparison,
    MetricAccumulator,
    build_auxiliary_metrics,
)
from lit_diffusion.metrics.evaluation_record import (
    EvaluationClock,
    FIDRecord,
    ImageCount,
    finite_or_none,
    parse_image_count,
    start_image_count,
    write_evaluation,
)
from lit_diffusion.metrics.extractors import (
    FIDProtocol,
    TrainedCNN,
    distance_name,
    protocol_by_name,
)
from lit_diffusion.metrics.images import BatchKey, HasSplits, ImageSet, open_images
from lit_diffusion.metrics.reference import Scorer, measure_reference
from lit_diffusion.protocols import DescribesSampling, WeightsProvider
from lit_diffusion.seeding import classes_of

SPLITS = ("train", "val", "test")


class FIDEvaluation(PeriodicEvaluation):
    """Computes the FID of samples after every validation, or after every n optimizer steps.

    - Samples: the callback calls `pl_module.generate(seeds, labels)` for the seeds 0, ...,
      num_samples - 1. If the module has classes, the label is `seed % num_classes`. Process r of R
      generates the seeds r, r + R, and so on. The module generates in eval mode, in the Trainer's
      precision, and with the weights that the argument `weights` selects. The extractor computes in
      float32. The evaluation does not change the training.
    - Metrics: the callback logs the FID as `val/fid_<num_samples>`. It also logs the floor, which
      is the FID of real images, as `val/fid_<num_samples>_floor`. If the data have enough images,
      the floor uses as many real images as there are samples, with the same labels. If the data
      have a test split, `trainer.test` logs `test/fid_<num_samples>`. If `weights` is not "ema",
      the metric names contain the name of the weights. With the extractor "dinov2-vit-l-14", the
      names contain "fd_dinov2" instead of "fid", and with "clip-vit-b-32", they contain "fd_clip".
    - Files: each evaluation appends one line to `evaluations.jsonl` in the run folder. The line has
      the FID and all settings under which it was computed. The checkpoint with the best FID is
      `checkpoints/best-fid.ckpt` in the same folder.
    - Run folder: `lit-diffusion fit` sets the run folder. In other projects, it is the first
      logger's version directory, or `default_root_dir` if there is no logger. A new run raises an
      error if `evaluations.jsonl` in this folder has evaluations of another run.
    - With `every_n_steps`, the FID is sent to the loggers only. `ModelCheckpoint(monitor=...)`
      cannot use this FID, because at a validation, the last FID may come from an earlier step.
    - Auxiliary metrics: the callback computes more metrics of the same samples, and writes them to
      `evaluations.jsonl` under the key `second_look`. These metrics include Frechet distances
      between samples and real images, in pixels and in the features of an untrained network. If
      `reference` is "train", they also include the FID to held-out images. For each distance, a
      floor is written, which is measured with real images in place of samples. Precision and recall
      are computed in the extractor's features and in pixels.
    - Memorization: the auxiliary metric `memorized` is the fraction of samples that are close to a
      training image. A sample is close if its distance to the nearest training image is at most the
      median distance from a held-out image to its nearest training image. `memorized` is about 0.5
      if samples are as new as held-out images, and 1 if they are copies of training images.
    - If samples are not finite, the FID is NaN, a warning lists the seeds of these samples, and
      training continues.
    - `fast_dev_run` generates one sample and computes no FID.

    Args:
        num_samples: number of samples to generate, >= 2. FIDs of different numbers of samples are
            not comparable.
        extractor: the feature extractor, as an `FIDProtocol` or as one of the names
            "inception-v3-compat", "dinov2-vit-l-14", "clip-vit-b-32", "digits-cnn" and
            "patches-cnn". You can also pass the path of a file that `lit-diffusion train-extractor`
            has written. This file is copied to the run folder. The extractor also determines how
            images are resized.
        reference: real images to compare with: a split of the data ("train", "val", "test"), a
            folder of images, or an .npz file of images. If the images of a split are read from a
            DataLoader of the Trainer, they are augmented as the DataLoader's data set defines.
        every_n_steps: optimizer steps between evaluations; None evaluates after every validation.
        weights: name of the weights to use. A callback such as EMA provides named weights (see
            `protocols.WeightsProvider`). The name "raw" selects the weights being trained.
        batch_size: samples per call of `generate` on each process, >= 1.
        save_best: whether to write best-fid.ckpt.
        cache_dir: folder in which to cache statistics of the real images; None is
            ~/.cache/lit-diffusion.
        repeats_at_end: number of additional evaluations of the last weights at the end of a fit.
            Each evaluation uses the next `num_samples` seeds, to measure how much the FID varies
            between sets of samples. The results are written to `evaluations.jsonl` only.
        images: how to find the images in a batch of a DataLoader: an index, a key, or a function of
            the batch that returns images (N, C, H, W). None uses the whole batch if it is a tensor,
            the first item if it is a tuple or list, and the only 4-dimensional tensor if it is a
            dictionary. Floats must have 256 levels over [0, 1] or [-1, 1]. If the data module
            implements `metrics.images.HasSplits`, `images` is not used.
        auxiliary_metrics: whether to compute the auxiliary metrics.

    Raises:
        ValueError: if an argument is invalid. At the start of a run, the error is also raised if no
            callback provides the named weights, if there are no real images, or if another run has
            written to the run folder. Two FIDEvaluation callbacks raise the error if they would log
            the same metric or write the same file.
        FileNotFoundError: at the start of a run, if the extractor's weight file is missing.

    Source: Eq. 6 of Heusel et al. 2017, "GANs Trained by a Two Time-Scale Update Rule" (arXiv
    1706.08500). `metrics.frechet.FrechetDistance` computes this equation.

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
        images: BatchKey = None,
        auxiliary_metrics: bool = True,
    ) -> None:
        super().__init__(every_n_steps)
        _require(2 <= num_samples <= 10**8, "num_samples", "from 2 to 100,000,000", num_samples)
        _require(batch_size >= 1, "batch_size", ">= 1", batch_size)
        exists = reference in SPLITS or Path(reference).exists()
        _require(exists, "reference", f"one of {', '.join(SPLITS)} or an existing path", reference)
        _require(repeats_at_end >= 0, "repeats_at_end", ">= 0", repeats_at_end)
        self.num_samples = num_samples
        self.protocol = protocol_by_name(extractor) if isinstance(extractor, str) else extractor
        self.reference = reference
        self.weights_name = weights
        self.batch_size = batch_size
        self.save_best = save_best
        self.cache = user_cache() if cache_dir is None else Path(cache_dir)
        self.repeats_at_end = repeats_at_end
        self.images = images
        self.auxiliary_metrics = auxiliary_metrics
        self.best_score: float | None = None
        self.best_step: int | None = None
        self.image_count: ImageCount | None = None  # number of training images in the fit so far
        self._best_is_unsaved = False
        self._best_settings: dict[str, str] = {}  # `_comparable_settings` of the best FID
        self._evaluated_step: int | None = None
        self._checkpoint_step: int | None = None
        self._scorer: Scorer | None = None
        self._real: dict[str, AuxiliaryMetrics] = {}  # by split or path

    def metric_name(self, stage: str) -> str:
        """The name under which the FID is logged. `stage` is "val" or "test"."""
        thousands, rest = divmod(self.num_samples, 1000)
        count = self.num_samples if rest else f"{thousands}k"
        weights = "" if self.weights_name == "ema" else f"_{self.weights_name}"
        return f"{stage}/{distance_name(self.protocol)}_{count}{weights}"

    def metric_names(self) -> list[str]:
        """Names of the FID and its floor."""
        return [self.metric_name("val"), self.metric_name("val") + "_floor"]

    # Checks before the first step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise an error if the module, weights, extractor or other callbacks are unsuitable."""
        super().setup(trainer, pl_module, stage)
        self._real.clear()  # the data may have changed since the last run
        self._evaluated_step = self._checkpoint_step = None
        self._best_is_unsaved = False
        if stage == "fit":  # checkpoints are loaded after this hook
            self.best_score = self.best_step = self.image_count = None
        if stage == "predict":
            return
        require_generate(pl_module, "FIDEvaluation")
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if self.weights_name != "raw" and not weights_providers(trainer, self.weights_name):
            names = {"raw"}.union(*(c.names() for c in callbacks if isinstance(c, WeightsProvider)))
            raise ValueError(
                f"FIDEvaluation(weights={self.weights_name!r}): the callbacks provide "
                f"{', '.join(sorted(names))}; add lit_diffusion.callbacks.EMA or choose one of "
                "these."
            )
        self.protocol.check()
        name, both = self.metric_name("val"), "two FIDEvaluation callbacks would both"
        others = [c for c in callbacks if isinstance(c, FIDEvaluation) and c is not self]
        if any(other.metric_name("val") == name for other in others):
            raise ValueError(f"{both} log {name}: change num_samples or weights of one of them.")
        if self.save_best and any(other.save_best for other in others):
            raise ValueError(f"{both} write best-fid.ckpt: pass save_best=False to one of them.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute statistics of real images. Drop the checkpoint's best FID if settings changed."""
        super().on_train_start(trainer, pl_module)
        self.image_count = start_image_count(trainer, self.image_count)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        file = self.folder / "evaluations.jsonl"
        steps = []
        if file.exists():  # checked now, because the first evaluation may be hours away
            with checked_read(file, "list of evaluations", "repair or remove it"):
                lines = file.read_text().splitlines()
                steps = [dict(json.loads(line)).get("step") for line in lines]
        # A line with step 0 comes from a validation before this fit.
        refuse_other_run(trainer, file, any(steps))
        if isinstance(self.protocol, TrainedCNN) and trainer.is_global_zero:
            self.protocol.copy_to(self.folder)
        settings = self._comparable_settings(trainer, pl_module)
        # Checkpoints from earlier versions of this library lack some settings.
        before = settings | self._best_settings
        changed = [name for name in settings if before[name] != settings[name]]
        if self.best_score is not None and changed:
            rank_zero_warn(
                f"The best FID of the checkpoint, {self.best_score:.4g} at step {self.best_step}, "
                f"was measured with another {' and '.join(changed)}: it is dropped, and the next "
                "evaluation writes best-fid.ckpt."
            )
            self.best_score = self.best_step = None
        self._best_settings = settings

    def _comparable_settings(self, trainer: Trainer, module: LightningModule) -> dict[str, str]:
        """Settings that must be equal in two evaluations, or their FIDs are not comparable."""
        reference = self._real_images(trainer, module, "val").comparisons[0].reference
        return {
            "extractor_sha256": self.protocol.sha256,
            "reference": reference.name,
            "data": reference.fingerprint,
            "ema_decay": json.dumps(averaging_decay(trainer, self.weights_name)),
            "sampling": json.dumps(_sampling_record(module), sort_keys=True),
        }

    # Schedule of the evaluations

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate after a validation; in the sanity check, generate one sample."""
        by_steps = self.every_n_steps is not None and trainer.state.fn == TrainerFn.FITTING
        if trainer.sanity_checking:
            self._generate_one(trainer, pl_module)
        elif not by_steps:
            pl_module.log_dict(self.measure(trainer, pl_module), sync_dist=True)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate against the split on which the data module tests."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        stage = getattr(data, "tests_on", "val" if isinstance(data, HasSplits) else "test")
        pl_module.log_dict(self.measure(trainer, pl_module, stage), sync_dist=True)

    def measure_after_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate, log, and save a checkpoint if the FID is the best so far."""
        super().measure_after_step(trainer, pl_module)
        self._save_best(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the last weights with new seeds, and write the results to evaluations.jsonl."""
        if trainer.fast_dev_run or not self.repeats_at_end:  # type: ignore[attr-defined]
            return
        if self._evaluated_step != trainer.global_step:
            self.measure_after_step(trainer, pl_module)
        for repeat in range(1, self.repeats_at_end + 1):
            self._evaluate(trainer, pl_module, "val", first_seed=repeat * self.num_samples)

    # Evaluation, called on every process

    def measure(
        self, trainer: Trainer, pl_module: LightningModule, stage: str = "val"
    ) -> dict[str, float]:
        """Return the FID and its floor by metric name, or {} under `fast_dev_run`."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._generate_one(trainer, pl_module)
            return {}
        record = self._evaluate(trainer, pl_module, stage)
        if trainer.state.fn == TrainerFn.FITTING:
            self._evaluated_step = record.step
            best = math.inf if self.best_score is None else self.best_score
            if self.save_best and record.value is not None and record.value < best:
                self.best_score, self.best_step = record.value, record.step
                self._best_is_unsaved = True
        value = math.nan if record.value is None else record.value
        return {record.metric: value, f"{record.metric}_floor": record.floor}

    def _generate_one(self, trainer: Trainer, module: LightningModule) -> None:
        """Check before training that the module can generate samples."""
        with inference_mode(trainer, module):
            generate_images(module, [0])

    def _evaluate(
        self, trainer: Trainer, module: LightningModule, stage: str, first_seed: int = 0
    ) -> FIDRecord:
        """Score the samples of `num_samples` seeds and write the record to evaluations.jsonl."""
        # A Trainer that only evaluates a checkpoint has no count of training steps and images.
        is_from_checkpoint = trainer.state.fn != TrainerFn.FITTING and trainer.ckpt_path is not None
        if is_from_checkpoint and self._checkpoint_step is None:
            self._checkpoint_step = _saved_step(str(trainer.ckpt_path))
        step = (self._checkpoint_step or 0) if is_from_checkpoint else trainer.global_step
        is_training = trainer.train_dataloader is not None and not is_from_checkpoint
        seeds = range(first_seed, first_seed + self.num_samples)
        clock = EvaluationClock(self.metric_name(stage), self.num_samples)
        real = self._real_images(trainer, module, stage)
        samples = real.accumulator()
        with swap_weights(trainer, self.weights_name), inference_mode(trainer, module):
            non_finite = self._add_samples(trainer, module, samples, clock, seeds)
        with clock.phase("second look"):
            value, auxiliary = (math.nan, {}) if non_finite else samples.compute()
        reference, num_classes = real.comparisons[0].reference, getattr(module, "num_classes", None)
        record = FIDRecord(
            metric=self.metric_name(stage),
            value=finite_or_none(value),
            step=step,
            images=self.image_count.now(trainer) if self.image_count and is_training else None,
            num_fake=len(seeds),
            num_real=reference.num_images,
            reference=reference.name,
            data=reference.fingerprint,
            protocol=self.protocol.name,
            extractor_sha256=self.protocol.sha256,
            resize=self.protocol.resize,
            weights=self.weights_name,
            ema_decay=averaging_decay(trainer, self.weights_name),
            seeds=(seeds.start, seeds.stop),
            labels=f"seed % {num_classes}" if num_classes else None,
            sampling=_sampling_record(module),
            floor=reference.floor,
            floor_sd=reference.floor_sd,
            floor_images=reference.floor_images,
            non_finite=len(non_finite),
            non_finite_seeds=non_finite[:8],
            second_look={name: finite_or_none(number) for name, number in auxiliary.items()},
            seconds=clock.seconds(),
        )
        # All ranks must use the same record, because collectives depend on it. Without the
        # broadcast, records could differ, because devices round differently.
        record = trainer.strategy.broadcast(record)
        if record.value is None:
            rank_zero_warn(
                f"{record.metric} at step {record.step} is NaN: {record.non_finite} of "
                f"{record.num_fake} samples are not finite (seeds {record.non_finite_seeds}...). "
                "Training continues; the weights may have diverged."
            )
        else:
            rank_zero_info(
                f"{record.metric} = {record.value:.4g} at step {record.step} (floor "
                f"{record.floor:.4g}), {record.seconds['total']:.1f} s."
            )
        if trainer.is_global_zero:
            write_evaluation(self.folder / "evaluations.jsonl", record)
        return record

    def _add_samples(
        self,
        trainer: Trainer,
        module: LightningModule,
        samples: MetricAccumulator,
        clock: EvaluationClock,
        seeds: range,
    ) -> list[int]:
        """Add this process's share of the samples. Return the non-finite seeds of all processes."""
        flags = torch.zeros(len(seeds), dtype=torch.int64, device=module.device)
        share = seeds[trainer.global_rank :: trainer.world_size]
        for start in range(0, math.ceil(len(seeds) / trainer.world_size), self.batch_size):
            # A sharded module needs the same number of calls on each process. If a process has no
            # seeds left, it still calls the module, and drops the images.
            batch = share[start : start + self.batch_size]
            with clock.phase("generate"):
                images, non_finite = generate_images(module, batch or seeds[:1])
            if batch and images is not None:
                with clock.phase("features"):
                    is_finite = samples.add(images).isfinite().all(1)
                    non_finite = list(compress(batch, (~is_finite).tolist()))
            positions = [seeds.index(seed) for seed in non_finite if seed in batch]
            flags[torch.tensor(positions, dtype=torch.int64)] = 1
            clock.tick(len(batch) * trainer.world_size)
        flagged: Tensor = trainer.strategy.reduce(flags, reduce_op="sum")
        return [seeds[i] for i in flagged.nonzero().flatten().tolist()]

    # The real images

    def _real_images(
        self, trainer: Trainer, module: LightningModule, stage: str
    ) -> AuxiliaryMetrics:
        """Return extractors and statistics of the real images, which are computed at first use."""
        name = "test" if stage == "test" and self.reference in SPLITS else self.reference
        with isolate_rng():  # extractors and DataLoaders consume random numbers
            if self._scorer is None or self._scorer.device != module.device:
                extractor = self.protocol.build().to(module.device)
                self._scorer = Scorer(self.protocol, extractor, module.device, self.batch_size)
                self._real.clear()
            if name not in self._real:
                self._real[name] = self._read_real_images(trainer, module, self._scorer, name)
        return self._real[name]

    def _read_real_images(
        self, trainer: Trainer, module: LightningModule, scorer: Scorer, name: str
    ) -> AuxiliaryMetrics:
        others = None
        if name in SPLITS:
            real = split_images(trainer, name, self.images)
            others = split_images(trainer, "val" if name == "train" else "train", self.images)
        else:
            real = ImageSet(name, open_images(name))
        if real is None:
            raise ValueError(
                f"reference={name!r}, but the Trainer has no such data here; pass the path of a "
                "folder of images as reference."
            )
        num_classes = getattr(module, "num_classes", None)
        labels = classes_of(range(self.num_samples), num_classes) if num_classes else None
        reference = measure_reference(scorer, real, others, self.num_samples, self.cache, labels)
        sd, num_draws = reference.floor_sd, len(reference.floors)
        deviation = "" if sd is None else f" +- {sd:.2g} over {num_draws} draws"
        rank_zero_info(
            f"FID against {reference.num_images} real images ({name}) under {self.protocol.name}; "
            f"floor {reference.floor:.4g}{deviation} ({reference.floor_images})."
        )
        num = min(self.num_samples, reference.num_images)
        if num <= scorer.num_features:
            rank_zero_warn(
                f"{num} images cannot fill a covariance of {scorer.num_features} features: "
                "the FID will be far higher than with more images; compare it with its floor only."
            )
        primary = FeatureComparison("", scorer, reference)
        if not self.auxiliary_metrics:
            return AuxiliaryMetrics((primary,))
        return build_auxiliary_metrics(primary, real, others, self.num_samples, self.cache, labels)

    # The best step, in checkpoints/best-fid.ckpt and in the callback's state

    def _save_best(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._best_is_unsaved:
            return
        self._best_is_unsaved = False
        path = self.folder / "checkpoints" / "best-fid.ckpt"
        # Averages may be swapped in during validation, but a checkpoint needs the raw weights.
        with swap_weights(trainer, "raw"):
            trainer.save_checkpoint(path, weights_only=False)

    on_validation_end = _save_best  # after the metrics of the validation were logged

    @property
    def state_key(self) -> str:
        """Key of the callback's state, with the metric's name and the extractor's hash."""
        parts = {"metric": self.metric_name("val"), "extractor": self.protocol.sha256[:16]}
        return f"{type(self).__qualname__}{parts}"

    def state_dict(self) -> dict[str, Any]:
        """Return the best FID, its step and settings, and the count of images trained on so far."""
        return {
            "best_score": self.best_score,
            "best_step": self.best_step,
            "best_against": self._best_settings,
            "images": self.image_count and list(self.image_count),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state. Raise ValueError if a value has a wrong type."""
        score, step = state_dict["best_score"], state_dict["best_step"]
        _require(isinstance(score, float | None), "best_score", "a number or None", score)
        is_count = step is None or (type(step) is int and step >= 0)
        _require(is_count, "best_step", "a count or None", step)
        settings = state_dict["best_against"]
        valid = isinstance(settings, dict) and all(isinstance(v, str) for v in settings.values())
        _require(valid, "best_against", "texts by name", settings)
        self.best_score, self.best_step = score, step
        self._best_settings = settings
        self.image_count = parse_image_count(state_dict.get("images"))

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store the optimizer step at which the checkpoint's weights were saved."""
        self._checkpoint_step = checkpoint["global_step"]


def averaging_decay(trainer: Trainer, weights: str) -> float | None:
    """Return the EMA decay of the weights called `weights`; None if it is unknown or ambiguous.

    EMA names its averages "ema_<decay>", so the function reads the decay from the name. For the
    name "ema", it returns the decay of the first average. The decay is ambiguous if several
    callbacks provide weights of this name with different decays.
    """
    decays = set()
    for provider in weights_providers(trainer, weights):
        averages = [name for name in provider.names() if name.startswith("ema_")]
        name = averages[0] if weights == "ema" and averages else weights
        is_decay = re.fullmatch(r"ema_(0(\.\d+)?|\d+(\.\d+)?e-\d+)", name)
        decays.add(float(name.removeprefix("ema_")) if is_decay else None)
    return decays.pop() if len(decays) == 1 else None


def _saved_step(path: str) -> int:
    """Read the step of a checkpoint without states of callbacks; 0 if it cannot be read.

    When Lightning loads such a checkpoint, it does not call the callbacks' `on_load_checkpoint`.
    """
    with suppress(Exception):  # for example, if the checkpoint is not on this machine
        checkpoint = torch.load(check_regular(path), "cpu", weights_only=True, mmap=True)
        return int(checkpoint["global_step"])
    return 0


def _sampling_record(module: LightningModule) -> dict[str, Any]:
    return module.sampling_record() if isinstance(module, DescribesSampling) else {}


def _require(condition: bool, name: str, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {rule}, got {value!r}.")
