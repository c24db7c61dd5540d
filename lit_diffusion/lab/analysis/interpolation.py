"""Compute losses on the line between two sets of weights, optionally with aligned features.

Two runs may learn the same features in a different order. Interpolated weights then mix different
features, unless a permutation has aligned them. Alignment covers the hidden layers of residual
blocks and MLPs, and all layers of a DCGAN. Features between blocks cannot be permuted
independently, because skip connections tie them together.

Source: "Why diffusion models are stable and how to make them faster" (2023), Eq. 2; Goodfellow et
al. 2015, "Qualitatively characterizing neural network optimization problems"; Ainsworth et al.
2023, "Git Re-Basin" (arXiv 2209.04836), section 3.2, for weight matching.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from lit_diffusion.data.base import require_at_least
from lit_diffusion.lab.analysis import common
from lit_diffusion.lab.analysis.common import Arrays
from lit_diffusion.lab.analysis.fixed_losses import (
    WeightState,
    check_same_losses,
    copy_weights,
    describe_losses,
    evaluate_losses,
)
from lit_diffusion.lab.gan.dcgan import DCGANDiscriminator, DCGANGenerator
from lit_diffusion.networks.layers import MLP, TimestepMLP
from lit_diffusion.networks.unet import ResBlock
from lit_diffusion.signals import print_error


def barrier(alphas: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Compute the largest rise of values above the straight line between their ends.

    Args:
        alphas: (K,) positions in [0, 1].
        values: (K,) losses at these positions.

    Example:
        >>> barrier(np.array([0.0, 0.5, 1.0]), np.array([1.0, 5.0, 3.0]))
        3.0
    """
    line = alphas * values[-1] + (1 - alphas) * values[0]
    return float((values - line).max())


@dataclass(frozen=True)
class FeatureAxis:
    """A dimension of a tensor in the state dict that is indexed by hidden features.

    The list of features may be repeated along this dimension. For example, a tensor that contains
    the scales of all features, followed by the shifts of all features, has two `copies` of the
    list.
    """

    name: str
    dim: int
    copies: int = 1

    def rows(self, tensor: Tensor) -> Tensor:
        """View a tensor as (copies, features, ...)."""
        return torch.unflatten(tensor.movedim(self.dim, 0), 0, (self.copies, -1))

    def reorder(self, tensor: Tensor, order: Tensor) -> Tensor:
        """Permute features: feature i of the result is feature order[i] of `tensor`."""
        rows = self.rows(tensor)[:, order.to(tensor.device)]
        return rows.flatten(0, 1).movedim(0, self.dim).contiguous()


@dataclass(frozen=True)
class HiddenFeatures:
    """Features of a hidden layer, which can be permuted without changing the output.

    Args:
        axes: dimensions of weights and biases that have one index per feature. A permutation of the
            features must reorder all these dimensions in the same way.
        groups: number of groups of the group norm on these features. A permutation may reorder the
            features within a group, and may reorder whole groups.
    """

    axes: tuple[FeatureAxis, ...]
    groups: int = 1


def find_hidden_features(network: nn.Module) -> list[HiddenFeatures]:
    """Find the hidden layers of a network whose features can be permuted."""
    features: list[HiddenFeatures] = []
    for name, module in network.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, ResBlock):
            emb, conv, norm = module.emb_layers[1], module.in_layers[2], module.out_layers[0]
            copies = len(emb.weight) // len(conv.weight)  # type: ignore[arg-type]
            before = {"in_layers.2": 1, "emb_layers.1": copies, "out_layers.0": 1}
            features.append(_between(prefix, before, "out_layers.3", norm.num_groups))  # type: ignore[arg-type]
        elif isinstance(module, MLP):
            features.append(_between(prefix, {"fc1": 1}, "fc2"))
        elif isinstance(module, TimestepMLP):
            features.append(_between(prefix, {"0": 1}, "2"))
        elif isinstance(module, DCGANGenerator | DCGANDiscriminator):
            features += _between_convolutions(f"{prefix}layers.", module.layers)
    return features


def _between(prefix: str, before: dict[str, int], after: str, groups: int = 1) -> HiddenFeatures:
    """Features that are outputs of the layers `before` (name -> copies), and inputs of `after`."""
    axes = [
        FeatureAxis(f"{prefix}{name}.{kind}", 0, copies)
        for name, copies in before.items()
        for kind in ("weight", "bias")
    ]
    return HiddenFeatures((*axes, FeatureAxis(f"{prefix}{after}.weight", 1)), groups)


def _between_convolutions(prefix: str, layers: nn.Sequential) -> list[HiddenFeatures]:
    """Features between successive convolutions, including the batch norms between them."""
    convolutions = [
        (i, isinstance(layer, nn.ConvTranspose2d))
        for i, layer in enumerate(layers)
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)
    ]
    features = []
    for (i, is_transposed), (j, reader_is_transposed) in pairwise(convolutions):
        axes = [FeatureAxis(f"{prefix}{i}.weight", int(is_transposed))]
        if isinstance(layers[i + 1], nn.BatchNorm2d):
            kinds = ("weight", "bias", "running_mean", "running_var")
            axes += [FeatureAxis(f"{prefix}{i + 1}.{kind}", 0) for kind in kinds]
        axes.append(FeatureAxis(f"{prefix}{j}.weight", int(not reader_is_transposed)))
        features.append(HiddenFeatures(tuple(axes)))
    return features


def align_features(
    state: WeightState, target: WeightState, features: Sequence[HiddenFeatures]
) -> WeightState:
    """Permute the hidden features of `state` to match the weights of `target`.

    The permutation does not change the outputs of the network. Several passes over all layers are
    needed, because the best order of a layer's features depends on the orders in neighboring
    layers.
    """
    state = dict(state)
    for _ in range(20):
        has_changed = False
        for layer in features:
            order = _best_permutation(state, target, layer)
            has_changed |= bool((order != torch.arange(len(order))).any())
            for axis in layer.axes:
                state[axis.name] = axis.reorder(state[axis.name], order)
        if not has_changed:
            break
    return state


def _best_permutation(state: WeightState, target: WeightState, layer: HiddenFeatures) -> Tensor:
    """Permutation (n,) that maximizes the sum of inner products between matched features."""
    products: Any = 0
    for axis in layer.axes:
        ours, theirs = (
            axis.rows(each[axis.name].detach().cpu().double()).movedim(0, 1).flatten(1)
            for each in (state, target)
        )  # (n, all else) each
        products = products + theirs @ ours.T  # (n, n)

    def assign(gains: NDArray[Any]) -> NDArray[Any]:
        return linear_sum_assignment(gains, maximize=True)[1]

    g, k = layer.groups, len(products) // layer.groups
    blocks = products.numpy().reshape(g, k, g, k).swapaxes(1, 2)  # (g, g, k, k)
    within = np.array([[assign(blocks[i, j]) for j in range(g)] for i in range(g)])  # (g, g, k)
    gains = np.take_along_axis(blocks, within[..., None], axis=3).sum(axis=(2, 3))  # (g, g)
    order = [j * k + within[i, j] for i, j in enumerate(assign(gains))]
    return torch.from_numpy(np.concatenate(order).astype(np.int64))


def draw_interpolations(
    names: Sequence[str],
    alphas: NDArray[np.float64],
    lines: Mapping[str, NDArray[np.float64]],
    path: Path,
    note: str,
) -> None:
    """Draw one panel per loss, at positions alphas (K,) between the weights.

    Each array in `lines` has the shape (len(names), K). Panel i shows row i of every array.
    """
    figure = Figure(figsize=(3.2 * len(names), 3), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for i, (axes, name) in enumerate(zip(panels, names, strict=True)):
        for kind, values in lines.items():
            axes.plot(alphas, values[i], label=kind)
        scale = "log" if min(values[i].min() for values in lines.values()) > 0 else "linear"
        axes.set(title=name, xlabel="alpha (0: second, 1: first)", yscale=scale)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("loss")
    if len(lines) > 1:
        panels[0].legend(fontsize="small")
    common.save_figure(figure, path, note)


def interpolate_weights(options: Namespace) -> str:
    """Run `lit-diffusion analyze interpolate`; returns the text to print."""
    require_at_least(2, points=options.points)
    paths = options.first, options.second
    at_one, at_zero = (common.load_analyzed_module(path, options) for path in paths)
    check_same_losses(at_one, at_zero)
    a, b = copy_weights(at_one.module), copy_weights(at_zero.module)
    endpoints = {"as they are": b}
    if options.align:
        features = find_hidden_features(at_one.module)
        if not features:
            raise ValueError("--align does not support this network; leave it out.")
        print_error(f"--align permutes the features of {len(features)} hidden layers.")
        endpoints["aligned"] = align_features(b, a, features)
    losses = common.load_losses(at_one, options)
    note = describe_losses(at_one.module, options.images, "interpolated")
    names, alphas = list(losses), np.linspace(0, 1, options.points)
    common.print_cost_of_losses(losses, len(alphas) * len(endpoints))
    out = common.plan_analysis("interpolation", options, at_one, at_zero)

    def interpolate(kind: str) -> Arrays:
        states = ({n: torch.lerp(endpoints[kind][n], a[n], alpha) for n in a} for alpha in alphas)
        return {"values": evaluate_losses(at_one.module, states, losses)}

    arrays = common.compute_pieces(out, list(endpoints), interpolate, "line")
    lines = {kind: each["values"] for kind, each in zip(endpoints, arrays, strict=True)}
    for kind, values in lines.items():
        file = out / f"interpolation{'-aligned' * (kind == 'aligned')}"
        common.save_result(file, {"names": names, "alphas": alphas, "values": values}, note)
    draw_interpolations(names, alphas, lines, out / "interpolation.png", note)
    texts = [
        f"{name}, {kind}: {values[i, 0]:.4g} ... {values[i].max():.4g} ... "
        f"{values[i, -1]:.4g}; barrier {barrier(alphas, values[i]):.4g}"
        for i, name in enumerate(names)
        for kind, values in lines.items()
    ]
    return "\n".join([*texts, note])
