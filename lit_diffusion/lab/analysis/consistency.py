"""Measure how similar the images are that models generate from the same noise.

Source: "Why diffusion models are stable and how to make them faster" (2023), section 3.1.
"""

import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from lit_diffusion.checkpoints.loading import LoadedModule
from lit_diffusion.cli.options import usable_device
from lit_diffusion.cli.run_data import protocol_of_run, read_data_settings
from lit_diffusion.data.base import require_at_least
from lit_diffusion.lab.analysis import common
from lit_diffusion.lab.analysis.common import Arrays
from lit_diffusion.metrics.extractors import protocol_by_name
from lit_diffusion.metrics.image_distances import MAX_PSNR, nearest_neighbors, pairwise_psnr, psnr
from lit_diffusion.metrics.reference import Scorer
from lit_diffusion.seeding import classes_of


@dataclass(frozen=True)
class Consistency:
    """Similarity of the images of M models from the same N seeds.

    Attributes:
        names: names of the models.
        paper: mean PSNR between the first model's images and the other models' images from the
            same seeds, in dB (Eq. 1 of the paper).
        all_pairs: mean PSNR between images from the same seeds, over all pairs of models, in dB.
        pairs: (M, M) mean PSNR between images from the same seeds, for each pair of models, in dB.
        shuffled: mean PSNR between images of different models and different seeds, in dB.
        same_class: mean PSNR between images of different models and different seeds of the same
            class, in dB. None if there are no classes, or if no class has two seeds.
        nearest: mean PSNR between images and their nearest training images, in dB. If `all_pairs`
            is not higher than `nearest`, models may agree only because they reproduce training
            images. None if no training images were given.
        same_nearest: fraction of pairs of images from the same seed that have the same nearest
            training image. None if no training images were given.
        features: similarity of features, `1 - d_same / d_other`. Here, d_same is the mean feature
            distance between images from the same seed, and d_other is the mean feature distance
            between images from different seeds (of the same class, if there are classes). The
            similarity is 1 for equal images and 0 for chance. None if no feature extractor was
            given, or if d_other is 0.
        per_seed: (N,) mean PSNR over all pairs of models, for each seed, in dB.

    Example:
        >>> images = torch.randint(256, (2, 4, 1, 8, 8), dtype=torch.uint8)
        >>> measure_consistency(images, names=["a", "b"]).pairs.shape
        (2, 2)
    """

    names: list[str]
    paper: float
    all_pairs: float
    pairs: NDArray[np.float64]
    shuffled: float
    same_class: float | None
    nearest: float | None
    same_nearest: float | None
    features: float | None
    per_seed: NDArray[np.float64]


def measure_consistency(
    images: Tensor,
    names: list[str],
    nearest_of: Callable[[Tensor], Tensor] | None = None,
    features_of: Callable[[Tensor], Tensor] | None = None,
    labels: Tensor | None = None,
) -> Consistency:
    """Compare the images of models, seed by seed.

    Args:
        images: uint8 (M, N, C, H, W), images of M >= 2 models from the same N >= 2 seeds.
        names: names of the models.
        nearest_of: function that returns the nearest training image of each image. Its input and
            output are uint8 (N, C, H, W).
        features_of: function that takes images, uint8 (N, C, H, W), and returns their features (N,
            F).
        labels: (N,) class of the images of each seed.

    Example:
        >>> images = torch.randint(256, (1, 4, 1, 8, 8), dtype=torch.uint8)
        >>> measure_consistency(images.repeat(2, 1, 1, 1, 1), names=["a", "b"]).paper
        100.0
    """
    num_models, num_seeds = images.shape[:2]
    psnrs = {(i, j): psnr(images[i], images[j]) for i in range(num_models) for j in range(i)}
    pairs = np.full((num_models, num_models), MAX_PSNR)
    for (i, j), values in psnrs.items():
        pairs[i, j] = pairs[j, i] = values.mean().item()
    per_pair = torch.stack(list(psnrs.values()))  # (pairs, N)

    other_seeds = ~torch.eye(num_seeds, dtype=torch.bool)
    same_class = torch.zeros_like(other_seeds)
    if labels is not None:
        same_class = other_seeds & (labels[:, None] == labels)

    def mean_of_pairs(values: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> float:
        """Mean of `compare(a, b)` over all pairs of models' values (M, ...)."""
        return torch.stack([compare(values[i], values[j]).mean() for i, j in psnrs]).mean().item()

    def chance_psnr(mask: Tensor) -> float:
        return mean_of_pairs(images, lambda a, b: pairwise_psnr(a, b)[mask])

    nearest = same_nearest = features = None
    if nearest_of is not None:
        neighbors = torch.stack([nearest_of(x) for x in images])
        nearest = psnr(images.flatten(0, 1), neighbors.flatten(0, 1)).mean().item()
        same_nearest = mean_of_pairs(neighbors, lambda a, b: (a == b).flatten(1).all(1).double())
    if features_of is not None:
        vectors = torch.stack([features_of(x).double() for x in images])
        chance_pairs = same_class if same_class.any() else other_seeds
        same = mean_of_pairs(vectors, lambda a, b: (a - b).norm(dim=1))
        other = mean_of_pairs(vectors, lambda a, b: torch.cdist(a, b)[chance_pairs])
        features = 1 - same / other if other else None
    return Consistency(
        names=names,
        paper=float(pairs[0, 1:].mean()),
        all_pairs=per_pair.mean().item(),
        pairs=pairs,
        shuffled=chance_psnr(other_seeds),
        same_class=chance_psnr(same_class) if same_class.any() else None,
        nearest=nearest,
        same_nearest=same_nearest,
        features=features,
        per_seed=per_pair.mean(0).numpy(),
    )


def draw_consistency(result: Consistency, images: Tensor, path: Path, seeds: int = 12) -> None:
    """Draw images (M, N, C, H, W) of the first seeds: one row per model, one column per seed."""
    rows, columns = len(images), min(seeds, images.shape[1])
    figure = Figure(figsize=(0.75 * columns + 2, 0.8 * rows + 0.6), layout="constrained")
    title = f"PSNR of two models' images of one seed: {result.all_pairs:.1f} dB; of different"
    title += f" seeds: {result.shuffled:.1f} dB\n(means over {images.shape[1]} seeds and all pairs)"
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(rows, columns, squeeze=False)
    for row, (name, model_images) in enumerate(zip(result.names, images, strict=True)):
        for axes, image in zip(panels[row], model_images[:columns], strict=True):
            pixels = image.movedim(0, -1).squeeze(-1).numpy()
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
        psnr_to_first = "" if row == 0 else f"\n{result.pairs[0, row]:.1f} dB to the first"
        text = {"rotation": 0, "ha": "right", "va": "center", "fontsize": "small"}
        panels[row, 0].set_ylabel(f"{name[-28:]}{psnr_to_first}", **text)
    common.save_figure(figure, path)


def compare_images(options: Namespace) -> str:
    """Run `lit-diffusion analyze consistency`; returns the text to print."""
    checkpoints, num, batch_size = options.checkpoints, options.num, options.batch_size
    num_models = len(checkpoints)
    if min(num_models, num) < 2:
        raise ValueError(f"pass at least two models and two seeds, got {num_models} and {num}.")
    require_at_least(1, batch_size=batch_size)
    loaded = [common.load_analyzed_module(path, options, moves=False) for path in checkpoints]
    protocol = protocol_by_name(options.extractor or protocol_of_run(checkpoints[0]))
    protocol.check()
    training_sets = _load_training_sets(loaded, options)
    start = time.monotonic()
    num_classes = check_same_images(loaded, training_sets)
    seconds = (time.monotonic() - start) * num
    common.print_cost(f"{num} images of each of {num_models} models", seconds)
    out = common.plan_analysis("consistency", options, *loaded)
    seeds = range(options.seed, options.seed + num)

    def generate(number: str) -> Arrays:
        module: Any = loaded[int(number)].module
        batches = (seeds[i : i + batch_size] for i in range(0, num, batch_size))
        return {"images": torch.cat([module.generate(batch).cpu() for batch in batches]).numpy()}

    names = [str(i) for i in range(num_models)]
    arrays = common.compute_pieces(out, names, generate, "model")
    images = torch.stack([torch.from_numpy(each["images"]) for each in arrays])
    device = usable_device(options.device)
    scorer = Scorer(protocol, protocol.build().to(device), device, batch_size)
    training_images = torch.cat(training_sets)
    result = measure_consistency(
        images,
        _shorten(checkpoints),
        lambda each: training_images[nearest_neighbors(each, training_images)[1]],
        lambda each: scorer.features(each).cpu(),
        torch.tensor(classes_of(seeds, num_classes)) if num_classes else None,
    )
    common.save_result(out / "consistency", vars(result))
    draw_consistency(result, images, out / "consistency.png")
    similarity = "-" if result.features is None else f"{result.features:.2f}"
    same_class = f"; of the same class {result.same_class:.2f} dB" if result.same_class else ""
    return (
        f"consistency (Eq. 1)    {result.paper:.2f} dB\n"
        f"over all pairs         {result.all_pairs:.2f} dB\n"
        f"chance: other seeds    {result.shuffled:.2f} dB{same_class}\n"
        f"nearest training image {result.nearest:.2f} dB; "
        f"the same for {result.same_nearest:.0%} of the pairs\n"
        f"similarity of features {similarity} (0 for chance, 1 for equal images; "
        f"{protocol.name})"
    )


def _load_training_sets(loaded: Sequence[LoadedModule], options: Namespace) -> list[Tensor]:
    """Training images of the models, uint8 (K, C, H, W), with each data set once."""
    sets = {}
    for each in loaded:
        settings = repr(read_data_settings(each.path, options.data)[0])
        if settings not in sets:
            sets[settings] = common.load_training_data(each, options).images("train")
    return list(sets.values())


def check_same_images(
    loaded: Sequence[LoadedModule], training_sets: Sequence[Tensor] = ()
) -> int | None:
    """Check that the models, and the training images (K, C, H, W) of each data set, are comparable.

    Returns:
        The number of classes; None if a model has none.

    Raises:
        ValueError: if image shapes or numbers of classes differ.
    """

    def shape_of(images: Tensor) -> str:
        return "x".join(map(str, images.shape[1:]))

    kinds: dict[str, tuple[str, int | None]] = {}
    for path, module in ((str(each.path), each.module) for each in loaded):
        if not hasattr(module, "generate"):
            raise ValueError(f"{path}: {type(module).__name__} cannot generate images.")
        shape = shape_of(module.generate([0]))  # type: ignore[operator]
        kinds[path] = shape, getattr(module, "num_classes", None)
    shapes, classes = (set(each) for each in zip(*kinds.values(), strict=True))
    if len(shapes) > 1 or len(classes - {None}) > 1:
        listed = "; ".join(f"{path} {shape}, {number}" for path, (shape, number) in kinds.items())
        rule = "all models must make images of one shape and number of classes"
        raise ValueError(f"{rule}: {listed}.")
    (shape,) = shapes
    if others := {shape_of(images) for images in training_sets} - {shape}:
        raise ValueError(
            f"the models make images of {shape}, but training images are {others.pop()}; name data "
            "of the models with --data."
        )
    return None if None in classes else classes.pop()


def _shorten(paths: Sequence[str]) -> list[str]:
    """Paths relative to their common parent folder."""
    absolute = [Path(path).absolute() for path in paths]
    common_folder = os.path.commonpath(absolute)
    short = [os.path.relpath(path, common_folder) for path in absolute]
    return list(paths) if "." in short else short
