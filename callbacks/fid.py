"""FID during training: which weights, which samples, which real images, all written down."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lit_diffusion.callbacks.fid_inputs import generated, picked, shares, split_images
from lit_diffusion.callbacks.inference import inference
from lit_diffusion.callbacks.triggers import EveryNSteps
from lit_diffusion.metrics.clock import Clock
from lit_diffusion.metrics.frechet import FrechetDistance
from lit_diffusion.metrics.images import open_images
from lit_diffusion.metrics.protocols import FIDProtocol, protocol_by_name
from lit_diffusion.metrics.record import FIDRecord, finite_or_none, short_count, write_evaluation
from lit_diffusion.metrics.reference import (
    RealImages,
    Reference,
    Scorer,
    default_cache,
    measure,
)
from lit_diffusion.protocols import CanGenerate, DescribesSampling, WeightsProvider

SPLITS = ("train", "val", "test")


class FIDEvaluation(Callback):
    """Scores samples by FID after every validation, or every so many optimizer steps.

    Samples are `pl_module.generate(seeds, labels)` for the seeds 0 .. num_samples - 1, with labels
    seed mod `num_classes` where the module has classes; process r of R takes the seeds r, r + R,
    ... and all processes compute. The module generates in eval mode, under the Trainer's precision,
    with the weights asked for, whatever other callbacks do and wherever they stand in the list; the
    extractor always works in float32. Training is not touched: weights, modes and random state are
    as before.

    Logs `val/fid_<num_samples>` and beside it the floor, the FID of as many real images
    (`metrics.reference.measure`); `trainer.test` logs `test/fid_...` against the test split. Other
    weights than "ema" are part of the name. One line with the whole protocol goes to
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
    ) -> None:
        _require(num_samples >= 2, "num_samples", ">= 2", num_samples)
        _require(batch_size >= 1, "batch_size", ">= 1", batch_size)
        exists = reference in SPLITS or Path(reference).exists()
        _require(exists, "reference", f"one of {', '.join(SPLITS)} or an existing path", reference)
        self.num_samples = num_samples
        self.protocol = protocol_by_name(extractor) if isinstance(extractor, str) else extractor
        self.reference = reference
        self.weights_name = weights
        self.batch_size = batch_size
        self.save_best = save_best
        self.cache = default_cache() if cache_dir is None else Path(cache_dir)
        self.best_score: float | None = None
        self.best_step: int | None = None
        self._best_against: dict[str, str] = {}  # see _measured_with
        self._scorer: Scorer | None = None
        self._references: dict[str, Reference] = {}
        self._checkpoint_step: int | None = None
        self._trigger = EveryNSteps(every_n_steps)

    def metric_name(self, stage: str) -> str:
        """Name that the FID is logged under; `stage` is "val" or "test"."""
        weights = "" if self.weights_name == "ema" else f"_{self.weights_name}"
        return f"{stage}/fid_{short_count(self.num_samples)}{weights}"

    # What has to be right before the first step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise now rather than at step 10,000."""
        self._references = {}  # the data may be others than in the last run
        if stage == "fit":
            self._forget_best()  # a checkpoint's is loaded after this
        if stage == "predict":
            return
        if not isinstance(pl_module, CanGenerate):
            raise TypeError(
                f"FIDEvaluation needs a module with generate(seeds, labels), which "
                f"{type(pl_module).__name__} has not: see lit_diffusion.protocols.CanGenerate."
            )
        self._providers(trainer, self.weights_name)
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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the real images, and refuse a Trainer under which nothing would be evaluated."""
        self._trigger.refuse_never(trainer, "FIDEvaluation")
        self._trigger.start(trainer.global_step)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            _, reference = self._measured(trainer, pl_module, "val")
            self._forget_best_of_others(self._measured_with(reference))

    # When

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate after a validation, but not the one that only checks that validation works."""
        by_steps = self._trigger.n is not None and trainer.state.fn == TrainerFn.FITTING
        if not trainer.sanity_checking and not by_steps:
            pl_module.log_dict(self._evaluate(trainer, pl_module, "val"), sync_dist=True)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate against the test split."""
        pl_module.log_dict(self._evaluate(trainer, pl_module, "test"), sync_dist=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate every so many optimizer steps."""
        if self._trigger.due(trainer.global_step):
            numbers = self._evaluate(trainer, pl_module, "val")
            for logger in trainer.loggers:
                # Lightning's own rows of this batch have the step before it.
                logger.log_metrics(numbers, step=trainer.global_step - 1)

    # What

    def _evaluate(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> dict[str, float]:
        """One evaluation, from weights to files; what is to be logged. All processes call it."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return {}
        clock = Clock(self.metric_name(stage), self.num_samples)
        scorer, reference = self._measured(trainer, pl_module, stage)
        metric = scorer.metric()
        if trainer.is_global_zero:
            metric.add_real_sums(reference.sums)
        with self._weights(trainer, self.weights_name), inference(trainer, pl_module):
            bad = self._add_samples(trainer, pl_module, scorer, metric, clock)
        bad_seeds = trainer.strategy.reduce(bad, reduce_op="sum").nonzero().flatten().tolist()
        value = float("nan") if bad_seeds else metric.compute().item()
        record = self._record(trainer, pl_module, reference, value, bad_seeds, clock)
        # One number for all: what follows has collectives, and rounding may differ between devices.
        record = trainer.strategy.broadcast(record)
        self._publish(trainer, record)
        return _logged(record)

    def _add_samples(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        scorer: Scorer,
        metric: FrechetDistance,
        clock: Clock,
    ) -> Tensor:
        """Add this process's share of features; (num_samples,), 1 where one is not finite."""
        bad = torch.zeros(self.num_samples, dtype=torch.int64, device=pl_module.device)
        place = (trainer.global_rank, trainer.world_size)
        for seeds in shares(self.num_samples, *place, self.batch_size):
            # A sharded module needs as many calls on every process: one without a seed left makes
            # a call for nothing.
            with clock.phase("generate"):
                images, failed = generated(pl_module, seeds or range(1))
            if seeds and images is not None:
                with clock.phase("features"):
                    features = scorer.features(images)
                    failed = picked(seeds, ~features.isfinite().all(1))
                    metric.update(features, real=False)
            bad[torch.tensor([s for s in failed if s in seeds], dtype=torch.int64)] = 1
            clock.tick(len(seeds) * trainer.world_size)
        return bad

    def _measured(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> tuple[Scorer, Reference]:
        """The extractor and the statistics of the real images, made when first needed."""
        if self._scorer is None or self._scorer.device != pl_module.device:
            extractor = self.protocol.build().to(pl_module.device)
            self._scorer = Scorer(self.protocol, extractor, pl_module.device, self.batch_size)
        name = "test" if stage == "test" and self.reference in SPLITS else self.reference
        if name not in self._references:
            with isolate_rng():  # a DataLoader draws a seed
                self._references[name] = self._measure(trainer, self._scorer, name)
        return self._scorer, self._references[name]

    def _measure(self, trainer: Trainer, scorer: Scorer, name: str) -> Reference:
        others = None
        if name in SPLITS:
            real = split_images(trainer, name)
            others = split_images(trainer, "val" if name == "train" else "train")
        else:
            real = RealImages(name, open_images(name))
        if real is None:
            raise ValueError(
                f"reference={name!r}, but the Trainer has no such data here; name a folder of "
                "images."
            )
        reference = measure(scorer, real, others, self.num_samples, self.cache)
        rank_zero_info(
            f"FID against {reference.num_images} real images ({name}) under {self.protocol.name}; "
            f"floor {reference.floor:.4g} ({reference.floor_images})."
        )
        fewest = min(self.num_samples, reference.num_images)
        if fewest <= scorer.num_features:
            rank_zero_warn(
                f"{fewest} images cannot fill a covariance of {scorer.num_features} features: the "
                "FID will be far above that of more samples; compare it with its floor only."
            )
        return reference

    @contextmanager
    def _weights(self, trainer: Trainer, name: str) -> Iterator[None]:
        """Context with the named weights, of every callback that has them, in place."""
        with ExitStack() as stack:
            for provider in self._providers(trainer, name):
                stack.enter_context(provider.weights(name))
            yield

    def _providers(self, trainer: Trainer, name: str) -> list[WeightsProvider]:
        known = [c for c in trainer.callbacks if isinstance(c, WeightsProvider)]  # type: ignore[attr-defined]
        chosen = [provider for provider in known if name in provider.names()]
        if not chosen and name != "raw":
            names = sorted({"raw", *(n for provider in known for n in provider.names())})
            raise ValueError(
                f"FIDEvaluation(weights={name!r}): the callbacks provide {', '.join(names)}; add "
                "lit_diffusion.callbacks.EMA or choose one of these."
            )
        return chosen

    # What is left of it

    def _record(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        reference: Reference,
        value: float,
        bad_seeds: list[int],
        clock: Clock,
    ) -> FIDRecord:
        num_classes = getattr(pl_module, "num_classes", None)
        return FIDRecord(
            metric=clock.title,
            value=finite_or_none(value),
            step=self._step(trainer),
            num_fake=self.num_samples,
            num_real=reference.num_images,
            reference=reference.name,
            data=reference.fingerprint,
            protocol=self.protocol.name,
            extractor_sha256=self.protocol.sha256,
            resize=self.protocol.resize,
            weights=self.weights_name,
            seeds=(0, self.num_samples),
            labels=f"seed % {num_classes}" if num_classes else None,
            sampling=_sampling_record(pl_module),
            floor=reference.floor,
            floor_images=reference.floor_images,
            non_finite=len(bad_seeds),
            non_finite_seeds=bad_seeds[:8],
            seconds=clock.seconds(),
        )

    def _step(self, trainer: Trainer) -> int:
        """Optimizer steps behind the weights; one that only evaluates has its checkpoint's."""
        if trainer.state.fn != TrainerFn.FITTING and trainer.ckpt_path is not None:
            return self._checkpoint_step or 0
        return trainer.global_step

    def _publish(self, trainer: Trainer, record: FIDRecord) -> None:
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
        root = Path(trainer.default_root_dir)
        if trainer.is_global_zero:
            write_evaluation(root / "evaluations.jsonl", record)
        if trainer.state.fn == TrainerFn.FITTING and self.save_best:
            self._save_if_best(trainer, record, root / "checkpoints" / "best-fid.ckpt")

    def _save_if_best(self, trainer: Trainer, record: FIDRecord, path: Path) -> None:
        if record.value is None or (
            self.best_score is not None and record.value >= self.best_score
        ):
            return
        self.best_score, self.best_step = record.value, record.step
        # Validation may have the averages in place; a checkpoint holds what is trained.
        with self._weights(trainer, "raw"):
            trainer.save_checkpoint(path, weights_only=False)

    def _measured_with(self, reference: Reference) -> dict[str, str]:
        """What two FIDs of one metric name must share to be compared."""
        return {
            "extractor_sha256": self.protocol.sha256,
            "reference": reference.name,
            "data": reference.fingerprint,
        }

    def _forget_best(self) -> None:
        self.best_score = self.best_step = None

    def _forget_best_of_others(self, used: dict[str, str]) -> None:
        """A best that a checkpoint brought decides only over FIDs that compare with it."""
        differing = [name for name in used if self._best_against.get(name) != used[name]]
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
        """The best FID so far, its step and what it was measured with."""
        return {
            "best_score": self.best_score,
            "best_step": self.best_step,
            "best_against": self._best_against,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.best_score, self.best_step = state_dict["best_score"], state_dict["best_step"]
        self._best_against = state_dict["best_against"]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember the step of the weights."""
        self._checkpoint_step = checkpoint["global_step"]


def _sampling_record(module: LightningModule) -> dict[str, Any]:
    return module.sampling_record() if isinstance(module, DescribesSampling) else {}


def _logged(record: FIDRecord) -> dict[str, float]:
    """The FID and its floor, as numbers for loggers."""
    numbers = {record.metric: record.value, f"{record.metric}_floor": record.floor}
    return {name: float("nan") if v is None else v for name, v in numbers.items()}


def _require(met: bool, name: str, rule: str, value: object) -> None:
    if not met:
        raise ValueError(f"{name} must be {rule}, got {value!r}.")
