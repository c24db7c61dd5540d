"""The part of FIDEvaluation that computes: weights and seeds in, a record out."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lit_diffusion.callbacks.fid_inputs import generated, picked, shares, split_images
from lit_diffusion.callbacks.inference import inference
from lit_diffusion.metrics.clock import Clock
from lit_diffusion.metrics.frechet import FrechetDistance
from lit_diffusion.metrics.images import open_images
from lit_diffusion.metrics.protocols import FIDProtocol
from lit_diffusion.metrics.record import FIDRecord, finite_or_none
from lit_diffusion.metrics.reference import RealImages, Reference, Scorer, measure
from lit_diffusion.protocols import DescribesSampling, WeightsProvider

SPLITS = ("train", "val", "test")


class FIDMeasurement:
    """Scores samples of a module against real images.

    Args:
        num_samples: to generate, >= 2.
        protocol: of the extractor.
        reference: real images to compare with: a split, or a path.
        weights: name of the weights that generate.
        batch_size: samples at a time on each process, >= 1.
        cache: folder for statistics of the real images.
    """

    def __init__(
        self,
        num_samples: int,
        protocol: FIDProtocol,
        reference: str,
        weights: str,
        batch_size: int,
        cache: Path,
    ) -> None:
        self.num_samples = num_samples
        self.protocol = protocol
        self.reference = reference
        self.weights = weights
        self.batch_size = batch_size
        self.cache = cache
        self._scorer: Scorer | None = None
        self._references: dict[str, Reference] = {}

    def forget_references(self) -> None:
        """The data may be others than in the last run."""
        self._references = {}

    def record(
        self,
        trainer: Trainer,
        module: LightningModule,
        metric: str,
        step: int,
        first_seed: int = 0,
        images: int | None = None,
    ) -> FIDRecord:
        """One evaluation, the same on all processes, all of which call it.

        Args:
            trainer: that runs the module.
            module: with `generate(seeds, labels)`.
            metric: name of the FID, which begins with "val/" or "test/".
            step: optimizer steps behind the weights.
            first_seed: of `num_samples` consecutive ones.
            images: training images behind the weights; None where that is not known.
        """
        clock = Clock(metric, self.num_samples)
        scorer, reference = self.real(trainer, module, metric.split("/")[0])
        distance = scorer.metric()
        if trainer.is_global_zero:
            distance.add_real_sums(reference.sums)
        seeds = range(first_seed, first_seed + self.num_samples)
        with weights_in_place(trainer, self.weights), inference(trainer, module):
            bad = self._add_samples(trainer, module, scorer, distance, clock, seeds)
        lost = trainer.strategy.reduce(bad, reduce_op="sum").nonzero().flatten().tolist()
        value = float("nan") if lost else distance.compute().item()
        record = FIDRecord(
            metric=metric,
            value=finite_or_none(value),
            step=step,
            images=images,
            non_finite=len(lost),
            non_finite_seeds=[seeds[i] for i in lost[:8]],
            seconds=clock.seconds(),
            **self._how(module, reference, seeds),
            **self.varying(trainer, module),
        )
        # One number for all: what follows has collectives, and rounding may differ between devices.
        return trainer.strategy.broadcast(record)

    def _add_samples(
        self,
        trainer: Trainer,
        module: LightningModule,
        scorer: Scorer,
        distance: FrechetDistance,
        clock: Clock,
        seeds: range,
    ) -> Tensor:
        """Add this process's share of features; (num_samples,), 1 where one is not finite."""
        bad = torch.zeros(len(seeds), dtype=torch.int64, device=module.device)
        place = (trainer.global_rank, trainer.world_size)
        for share in shares(len(seeds), *place, self.batch_size):
            # A sharded module needs as many calls on every process: one without a seed left makes
            # a call for nothing.
            mine = [seeds[i] for i in share]
            with clock.phase("generate"):
                images, failed = generated(module, mine or seeds[:1])
            if mine and images is not None:
                with clock.phase("features"):
                    features = scorer.features(images)
                    failed = picked(mine, ~features.isfinite().all(1))
                    distance.update(features, real=False)
            lost = [seeds.index(seed) for seed in failed if seed in mine]
            bad[torch.tensor(lost, dtype=torch.int64)] = 1
            clock.tick(len(mine) * trainer.world_size)
        return bad

    def _how(self, module: LightningModule, reference: Reference, seeds: range) -> dict[str, Any]:
        """What an FID depends on besides the weights, as the record names it."""
        num_classes = getattr(module, "num_classes", None)
        return {
            "num_fake": len(seeds),
            "num_real": reference.num_images,
            "reference": reference.name,
            "data": reference.fingerprint,
            "protocol": self.protocol.name,
            "extractor_sha256": self.protocol.sha256,
            "resize": self.protocol.resize,
            "weights": self.weights,
            "seeds": (seeds.start, seeds.stop),
            "labels": f"seed % {num_classes}" if num_classes else None,
            "floor": reference.floor,
            "floor_sd": reference.floor_sd,
            "floor_images": reference.floor_images,
        }

    def varying(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        """What of this a resume may change under the same metric name, for one set of images."""
        return {
            "ema_decay": averaging_decay(trainer, self.weights),
            "sampling": module.sampling_record() if isinstance(module, DescribesSampling) else {},
        }

    def real(
        self, trainer: Trainer, module: LightningModule, stage: str
    ) -> tuple[Scorer, Reference]:
        """The extractor and the statistics of the real images, made when first needed."""
        if self._scorer is None or self._scorer.device != module.device:
            extractor = self.protocol.build().to(module.device)
            self._scorer = Scorer(self.protocol, extractor, module.device, self.batch_size)
        name = "test" if stage == "test" and self.reference in SPLITS else self.reference
        if name not in self._references:
            with isolate_rng():  # a DataLoader draws a seed
                self._references[name] = self._measure_real(trainer, module, self._scorer, name)
        return self._scorer, self._references[name]

    def _measure_real(
        self, trainer: Trainer, module: LightningModule, scorer: Scorer, name: str
    ) -> Reference:
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
        num_classes = getattr(module, "num_classes", None)
        labels = [seed % num_classes for seed in range(self.num_samples)] if num_classes else None
        reference = measure(scorer, real, others, self.num_samples, self.cache, labels)
        rank_zero_info(
            f"FID against {reference.num_images} real images ({name}) under {self.protocol.name}; "
            f"floor {_floor(reference)} ({reference.floor_images})."
        )
        fewest = min(self.num_samples, reference.num_images)
        if fewest <= scorer.num_features:
            rank_zero_warn(
                f"{fewest} images cannot fill a covariance of {scorer.num_features} features: the "
                "FID will be far above that of more samples; compare it with its floor only."
            )
        return reference


def _floor(reference: Reference) -> str:
    if reference.floor_sd is None:
        return f"{reference.floor:.4g}"
    return f"{reference.floor:.4g} +- {reference.floor_sd:.2g} over {len(reference.floors)} draws"


@contextmanager
def weights_in_place(trainer: Trainer, name: str) -> Iterator[None]:
    """Context with the named weights, of every callback that has them, in place."""
    with ExitStack() as stack:
        for provider in providers(trainer, name):
            stack.enter_context(provider.weights(name))
        yield


def averaging_decay(trainer: Trainer, name: str) -> float | None:
    """Decay of the named weights, where their providers' names tell one.

    They do as EMA's: "ema_<decay>" for each average, of which "ema" is the first.
    """
    found = {_decay(provider.names(), name) for provider in providers(trainer, name)}
    return found.pop() if len(found) == 1 else None


def _decay(names: list[str], wanted: str) -> float | None:
    averages = [name for name in names if name.startswith("ema_")]
    chosen = averages[0] if wanted == "ema" and averages else wanted
    if chosen not in averages:
        return None
    try:
        decay = float(chosen.removeprefix("ema_"))
    except ValueError:  # another provider may mean another thing by it
        return None
    return decay if 0 <= decay < 1 else None


def providers(trainer: Trainer, name: str) -> list[WeightsProvider]:
    """The callbacks that have the named weights.

    Raises:
        ValueError: If there are none, and the name is not "raw".
    """
    known = [c for c in trainer.callbacks if isinstance(c, WeightsProvider)]  # type: ignore[attr-defined]
    chosen = [provider for provider in known if name in provider.names()]
    if not chosen and name != "raw":
        names = sorted({"raw", *(n for provider in known for n in provider.names())})
        raise ValueError(
            f"FIDEvaluation(weights={name!r}): the callbacks provide {', '.join(names)}; add "
            "lit_diffusion.callbacks.EMA or choose one of these."
        )
    return chosen
