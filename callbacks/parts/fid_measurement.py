"""The part of FIDEvaluation that computes: weights and seeds in, a record out."""

import re
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lit_diffusion.callbacks.parts.fid_inputs import generated, shares, split_images
from lit_diffusion.callbacks.parts.inference import inference, providers, weights_in_place
from lit_diffusion.metrics.batches import Where
from lit_diffusion.metrics.clock import EvaluationClock
from lit_diffusion.metrics.extractors import FIDProtocol
from lit_diffusion.metrics.images import open_images
from lit_diffusion.metrics.record import FIDRecord, finite_or_none
from lit_diffusion.metrics.reference import RealImages, Reference, Scorer, measure
from lit_diffusion.metrics.second_look import LookedAt, SecondLook, View, look_closely
from lit_diffusion.protocols import DescribesSampling
from lit_diffusion.seeding import classes_of

SPLITS = ("train", "val", "test")


@dataclass
class FIDMeasurement:
    """Scores samples of a module against real images; the fields are as of FIDEvaluation."""

    num_samples: int
    protocol: FIDProtocol
    reference: str
    weights: str
    batch_size: int
    cache: Path
    images: Where = None
    second_look: bool = True
    _scorer: Scorer | None = None
    looks: dict[str, SecondLook] = field(default_factory=dict)

    def record(
        self,
        trainer: Trainer,
        module: LightningModule,
        metric: str,
        step: int,
        first_seed: int = 0,
        images: int | None = None,
    ) -> FIDRecord:
        """One evaluation, of the same result on all processes, all of which call it.

        `metric` begins with "val/" or "test/"; `step` and `images`, if known, are those of training
        behind the weights.
        """
        clock = EvaluationClock(metric, self.num_samples)
        look = self.real(trainer, module, metric.split("/")[0])
        samples = look.begin()
        seeds = range(first_seed, first_seed + self.num_samples)
        with weights_in_place(trainer, self.weights), inference(trainer, module):
            bad = self._add_samples(trainer, module, samples, clock, seeds)
        lost = trainer.strategy.reduce(bad, reduce_op="sum").nonzero().flatten().tolist()
        with clock.phase("second look"):
            value, more = (float("nan"), {}) if lost else samples.compute()
        record = FIDRecord(
            metric=metric,
            value=finite_or_none(value),
            step=step,
            images=images,
            non_finite=len(lost),
            non_finite_seeds=[seeds[i] for i in lost[:8]],
            second_look={name: finite_or_none(number) for name, number in more.items()},
            seconds=clock.seconds(),
            **self._how(module, look.views[0].reference, seeds),
            **self.varying(trainer, module),
        )
        # One number for all: what follows has collectives, and rounding may differ between devices.
        return trainer.strategy.broadcast(record)

    def _add_samples(
        self,
        trainer: Trainer,
        module: LightningModule,
        samples: LookedAt,
        clock: EvaluationClock,
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
                    failed = list(compress(mine, (~samples.add(images)).tolist()))
            lost = [seeds.index(seed) for seed in failed if seed in mine]
            bad[torch.tensor(lost, dtype=torch.int64)] = 1
            clock.tick(len(mine) * trainer.world_size)
        return bad

    def _how(self, module: LightningModule, reference: Reference, seeds: range) -> dict[str, Any]:
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

    def real(self, trainer: Trainer, module: LightningModule, stage: str) -> SecondLook:
        """The extractors and the statistics of the real images, made when first needed."""
        name = "test" if stage == "test" and self.reference in SPLITS else self.reference
        with isolate_rng():  # networks draw their first weights, a DataLoader a seed
            if self._scorer is None or self._scorer.device != module.device:
                extractor = self.protocol.build().to(module.device)
                self._scorer = Scorer(self.protocol, extractor, module.device, self.batch_size)
                self.looks.clear()
            if name not in self.looks:
                self.looks[name] = self._look(trainer, module, self._scorer, name)
        return self.looks[name]

    def _look(
        self, trainer: Trainer, module: LightningModule, scorer: Scorer, name: str
    ) -> SecondLook:
        others = None
        if name in SPLITS:
            real = split_images(trainer, name, self.images)
            others = split_images(trainer, "val" if name == "train" else "train", self.images)
        else:
            real = RealImages(name, open_images(name))
        if real is None:
            raise ValueError(
                f"reference={name!r}, but the Trainer has no such data here; name a folder of "
                "images."
            )
        num_classes = getattr(module, "num_classes", None)
        labels = classes_of(range(self.num_samples), num_classes) if num_classes else None
        about = (self.num_samples, self.cache, labels)
        reference = measure(scorer, real, others, *about)
        sd, draws = reference.floor_sd, len(reference.floors)
        spread = "" if sd is None else f" +- {sd:.2g} over {draws} draws"
        rank_zero_info(
            f"FID against {reference.num_images} real images ({name}) under {self.protocol.name}; "
            f"floor {reference.floor:.4g}{spread} ({reference.floor_images})."
        )
        fewest = min(self.num_samples, reference.num_images)
        if fewest <= scorer.num_features:
            rank_zero_warn(
                f"{fewest} images cannot fill a covariance of {scorer.num_features} features: the "
                "FID will be far above that of more samples; compare it with its floor only."
            )
        first = View("", scorer, reference)
        return (
            look_closely(first, real, others, *about) if self.second_look else SecondLook((first,))
        )


def averaging_decay(trainer: Trainer, name: str) -> float | None:
    """Decay of the named weights, where their providers' names tell one as EMA's do.

    That is "ema_<decay>" for each average, of which "ema" is the first.
    """
    found = set()
    for provider in providers(trainer, name):
        averages = [known for known in provider.names() if known.startswith("ema_")]
        chosen = averages[0] if name == "ema" and averages else name
        is_decay = re.fullmatch(r"ema_(0(\.\d+)?|\d+(\.\d+)?e-\d+)", chosen)
        found.add(float(chosen.removeprefix("ema_")) if is_decay else None)
    return found.pop() if len(found) == 1 else None
