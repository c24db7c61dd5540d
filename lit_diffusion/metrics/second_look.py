"""A second look at the samples of an FID: by other features, beside other images, beside copies.

A recipe that was tuned on one FID may lead by that FID alone. All this costs little beside drawing
the samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset
from torch_fidelity.metric_prc import prc_features_to_metric

from lit_diffusion.distributed import all_gather_objects, call_on_rank_zero, rank_and_world_size
from lit_diffusion.files import atomic_write
from lit_diffusion.metrics.copies import Copies
from lit_diffusion.metrics.extractors import Features
from lit_diffusion.metrics.plain_extractors import Pixels, RandomCNN
from lit_diffusion.metrics.reference import (
    FEWEST,
    RealImages,
    Reference,
    Scorer,
    evenly_spaced,
    measure,
)

MOST_REAL = 50_000
"""Real images that the plain extractors look at: evenly over a larger set."""

NEIGHBOURS = 5_000
"""Images of either kind, at most, whose neighbourhoods make precision and recall."""

DISTANCES = ("held-out", "pixels", "random-cnn")
"""Frechet distances of a second look; each has its floor beside it, as "pixels floor"."""

SHARES = ("precision", "recall", "pixel precision", "pixel recall", "memorized")


@dataclass(frozen=True)
class View:
    """One extractor beside one set of real images; the FID's own comes first and has no name.

    `neighbours` are features (N, F) of real images, for precision and recall, where these are
    measured; on the first process alone.
    """

    name: str
    scorer: Scorer
    reference: Reference
    neighbours: Tensor | None = None


@dataclass(frozen=True)
class SecondLook:
    """What samples are looked at with; `copies` is on the first process alone.

    Of `num_samples`, neighbours and copies are looked for evenly.
    """

    views: tuple[View, ...]
    copies: Copies | None = None
    num_samples: int = 0

    def begin(self) -> "LookedAt":
        """Where the samples of an evaluation are added."""
        return LookedAt(self)


class LookedAt:
    """The samples of one evaluation; of this process, until `compute`.

    Process r of n adds samples r, r + n, ..., in order.
    """

    def __init__(self, look: SecondLook) -> None:
        self._look = look
        self._chosen = frozenset(evenly_spaced(look.num_samples, NEIGHBOURS))
        self._next, self._stride = rank_and_world_size()
        self._distances = [view.scorer.metric() for view in look.views]
        self._kept = [[torch.zeros(0, view.scorer.num_features)] for view in look.views]
        for view, distance in zip(look.views, self._distances, strict=True):
            if rank_and_world_size()[0] == 0:
                distance.add_real_sums(view.reference.sums)

    def add(self, images: Tensor) -> Tensor:
        """Add images uint8 (N, C, H, W); which of them have finite features in the FID's view."""
        features: dict[int, Tensor] = {}
        places = range(self._next, self._next + len(images) * self._stride, self._stride)
        chosen = torch.tensor([i in self._chosen for i in places], dtype=torch.bool)
        for view, distance, kept in zip(self._look.views, self._distances, self._kept, strict=True):
            if id(view.scorer) not in features:
                features[id(view.scorer)] = view.scorer.features(images)
            found = features[id(view.scorer)]
            distance.update(found, real=False)
            kept.append(found.cpu()[chosen])
        self._next = places.stop
        return features[id(self._look.views[0].scorer)].isfinite().all(1)

    def compute(self) -> tuple[float, dict[str, float]]:
        """The FID and the second look, the latter on the first process. A collective."""
        fid, *values = (distance.compute().item() for distance in self._distances)
        found = dict[str, float]()
        for view, value in zip(self._look.views[1:], values, strict=True):
            found |= {view.name: value, f"{view.name} floor": view.reference.floor}
        return fid, found | (self._beside_neighbours() if values else {})

    def _beside_neighbours(self) -> dict[str, float]:
        found = dict[str, float]()
        for view, kept in zip(self._look.views, self._kept, strict=True):
            if view.name not in ("", Pixels.name):
                continue
            samples = torch.cat(all_gather_objects(torch.cat(kept)))
            if view.neighbours is not None:
                kind = "pixel " if view.name else ""
                found |= _precision_and_recall(samples, view.neighbours, kind)
            if view.name and self._look.copies is not None:
                found["memorized"] = self._look.copies.share(samples)
        return found


def look_closely(
    first: View,
    real: RealImages,
    others: RealImages | None,
    num_samples: int,
    cache: Path,
    labels: Sequence[int] | None,
) -> SecondLook:
    """The second look beside a first one, whose arguments of `measure` are given. A collective.

    Held-out images get an FID of their own where the reference is the training images.
    """
    few, few_others = _at_most(real), None if others is None else _at_most(others)
    channels, about = first.scorer.protocol.channels, (num_samples, cache, labels)
    pixels, untrained = (_with(first.scorer, kind(channels)) for kind in (Pixels, RandomCNN))
    views = [replace(first, neighbours=_features(first.scorer, few, NEIGHBOURS, cache))]
    if real.name == "train" and others is not None and len(others) >= FEWEST:
        held_out = measure(first.scorer, others, real, *about)
        views.append(View("held-out", first.scorer, held_out))
    neighbours = _features(pixels, few, NEIGHBOURS, cache)
    reference = measure(pixels, few, few_others, *about)
    views.append(View(Pixels.name, pixels, reference, neighbours))
    views.append(View(RandomCNN.name, untrained, measure(untrained, few, few_others, *about)))
    splits = {images.name: images for images in (few, few_others) if images is not None}
    return SecondLook(tuple(views), _copies(pixels, splits, cache), num_samples)


def _copies(pixels: Scorer, splits: dict[str, RealImages], cache: Path) -> Copies | None:
    """None where there are not both training and held-out images, and on later processes."""
    if not splits.keys() >= {"train", "val"}:
        return None
    bank = _features(pixels, splits["train"], MOST_REAL, cache)
    held_out = _features(pixels, splits["val"], NEIGHBOURS, cache)
    return None if bank is None or held_out is None else Copies.beside(bank, held_out)


def _with(scorer: Scorer, protocol: Features) -> Scorer:
    extractor = protocol.build().to(scorer.device)
    return replace(scorer, protocol=protocol, extractor=extractor)


def _at_most(real: RealImages) -> RealImages:
    """Real images, or so many as the plain extractors look at."""
    if len(real) <= MOST_REAL:
        return real
    return replace(real, dataset=Subset(real.dataset, evenly_spaced(len(real), MOST_REAL)))


def _features(scorer: Scorer, real: RealImages, most: int, cache: Path) -> Tensor | None:
    """Features of at most so many real images, on the first process; from the cache if known."""
    protocol, about = scorer.protocol, f"{call_on_rank_zero(real.fingerprint)}-{most}"
    path = cache / f"{protocol.name}-{protocol.sha256[:8]}-features-{about}.npy"
    if not call_on_rank_zero(lambda: _is_known(path)):
        own, _ = scorer.pool(real, evenly_spaced(len(real), most))
        found = torch.cat(all_gather_objects(own.cpu()))
        if rank_and_world_size()[0] == 0:
            cache.mkdir(parents=True, exist_ok=True)
            with atomic_write(path, shared=True) as file:
                np.save(file, found.numpy())
    return torch.from_numpy(np.load(path)) if rank_and_world_size()[0] == 0 else None


def _is_known(path: Path) -> bool:
    try:
        return path.is_file() and len(np.load(path, mmap_mode="r")) > 0
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a file of features ({error}); delete it.") from error


def _precision_and_recall(samples: Tensor, real: Tensor, kind: str) -> dict[str, float]:
    """Share of samples among the real images, and of real images among the samples.

    Source: Kynkaanniemi et al. 2019, "Improved Precision and Recall Metric for Assessing Generative
    Models", k = 3, by torch-fidelity.
    """
    if min(len(samples), len(real)) < FEWEST or not bool(samples.isfinite().all()):
        return {}
    found: dict[str, Any] = prc_features_to_metric(
        samples, real, prc_neighborhood=3, prc_batch_size=1000, save_cpu_ram=True, verbose=False
    )
    return {f"{kind}{name}": float(found[name]) for name in ("precision", "recall")}
