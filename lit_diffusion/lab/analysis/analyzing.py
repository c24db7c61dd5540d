"""What `lit-diffusion analyze` does: four looks at checkpoints, whose results are kept."""

import hashlib
import math
import os
import re
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_diffusion.checkpoints.loading import LoadedModule
from lit_diffusion.cli.options import usable_device
from lit_diffusion.cli.run_data import protocol_of_run, read_data_settings
from lit_diffusion.cli.work_queue import Arrays, compute_pieces, prepare_folder
from lit_diffusion.data.base import require_at_least
from lit_diffusion.lab.analysis.alignment import aligned, hidden_units
from lit_diffusion.lab.analysis.consistency import Consistency, consistency
from lit_diffusion.lab.analysis.figures import (
    draw_consistency,
    draw_interpolation,
    draw_landscape,
    draw_spectra,
)
from lit_diffusion.lab.analysis.fixed_losses import (
    fixed_losses,
    movable,
    opened,
    refuse_other_losses,
    training_data,
)
from lit_diffusion.lab.analysis.hessian import Spectrum, difference_error, hessian_product, spectrum
from lit_diffusion.lab.analysis.interpolation import Interpolation, Losses, interpolate
from lit_diffusion.lab.analysis.landscape import (
    Direction,
    Landscape,
    Way,
    directions,
    filter_normalised,
    landscape,
    principal_plane,
    projected,
)
from lit_diffusion.lab.analysis.weights import State, state_of
from lit_diffusion.metrics.extractors import protocol_by_name
from lit_diffusion.metrics.image_distances import nearest_neighbors
from lit_diffusion.metrics.reference import Scorer
from lit_diffusion.seeding import classes_of
from lit_diffusion.signals import print_error

# Costs and plans


def _said_cost(losses: Losses, passes: int) -> None:
    """Say what so many evaluations of all losses will cost, by the time that one takes.

    Raises:
        ValueError: where a loss is not finite at the weights in place.
    """
    began = time.monotonic()
    with torch.no_grad():
        found = {name: loss().item() for name, loss in losses.items()}
    _say_minutes(f"{passes} times {len(losses)} losses", (time.monotonic() - began) * passes)
    if bad := [f"{value} of {name}" for name, value in found.items() if not math.isfinite(value)]:
        raise ValueError(f"losses must be finite where the analysis begins, got {', '.join(bad)}.")


def _say_minutes(what: str, seconds: float) -> None:
    print_error(f"{what}: about {seconds / 60:.1f} minutes by one process.")


def _plan(kind: str, args: Namespace, *loaded: LoadedModule) -> dict[str, Any]:
    left_out = ("out", "device", "trust", "batch_size")
    options = {k: v for k, v in vars(args).items() if k not in left_out}
    of = [
        f"{each.path} at step {each.step}, {each.weights}, {_fingerprint(each.module)}"
        for each in loaded
    ]
    return {"analysis": kind, "of": of, **options}


def _fingerprint(module: Any) -> str:
    """Of all weights in place."""
    found = hashlib.sha256()
    for name, value in state_of(module).items():
        found.update(name.encode() + value.float().cpu().numpy().tobytes())
    return found.hexdigest()[:12]


def _awaited(out: Path) -> str:
    return f"Other processes are at work for {out}; the same command, after them, ends it."


# Consistency


def compare_images(args: Namespace) -> str:
    """Images of the same seeds by all checkpoints, compared; what to print."""
    if min(len(args.checkpoints), args.num) < 2:
        raise ValueError(
            f"two models and two seeds are the least, got {len(args.checkpoints)} and {args.num}."
        )
    require_at_least(1, batch_size=args.batch_size)
    loaded = [opened(path, args) for path in args.checkpoints]
    protocol = protocol_by_name(args.extractor or protocol_of_run(args.checkpoints[0]))
    protocol.check()
    bank = _training_images(loaded, args)
    began = time.monotonic()
    _refuse_unlike(loaded)
    made_of = f"{args.num} images of each of {len(loaded)} models"
    _say_minutes(made_of, (time.monotonic() - began) * args.num)
    out = Path(args.out)
    prepare_folder(out, _plan("consistency", args, *loaded))

    def make(number: str) -> Arrays:
        module: Any = loaded[int(number)].module
        seeds = range(args.seed, args.seed + args.num)
        parts = [
            module.generate(seeds[i : i + args.batch_size]).cpu()
            for i in range(0, args.num, args.batch_size)
        ]
        return {"images": torch.cat(parts).numpy()}

    made = compute_pieces(out, [str(i) for i in range(len(loaded))], make, "model")
    if made is None:
        return _awaited(out)
    images = torch.stack([torch.from_numpy(each["images"]) for each in made])
    device = usable_device(args.device)
    scorer = Scorer(protocol, protocol.build().to(device), device, args.batch_size)
    found = consistency(
        images,
        _short(args.checkpoints),
        lambda each: bank[nearest_neighbors(each, bank)[1]],
        lambda each: scorer.features(each).cpu(),
        _classes(loaded, range(args.seed, args.seed + args.num)),
    )
    found.save(out / "consistency")
    draw_consistency(found, images, out / "consistency.png")
    return _told_consistency(found, protocol.name)


def _training_images(loaded: Sequence[LoadedModule], args: Namespace) -> Tensor:
    """uint8 (K, C, H, W) of all sets that a model was trained on."""
    sets = {}
    for each in loaded:
        settings = repr(read_data_settings(each.path, args.data)[0])
        if settings not in sets:
            sets[settings] = training_data(each, args).images("train")
    return torch.cat(list(sets.values()))


def _classes(loaded: Sequence[LoadedModule], seeds: range) -> Tensor | None:
    """(N,) labels of seeds; None where a model has no classes, or other ones."""
    known = {getattr(each.module, "num_classes", None) for each in loaded}
    (num_classes, *others) = known
    if others or num_classes is None:
        return None
    return torch.tensor(classes_of(seeds, num_classes))


def _refuse_unlike(loaded: Sequence[LoadedModule]) -> None:
    """Raise ValueError where images are of other shapes or classes."""
    made: dict[str, tuple[str, Any]] = {}
    for path, module in ((str(each.path), each.module) for each in loaded):
        if not hasattr(module, "generate"):
            raise ValueError(f"{path}: {type(module).__name__} cannot generate images.")
        num_classes = getattr(module, "num_classes", None)
        shape = "x".join(map(str, module.generate([0]).shape[1:]))  # type: ignore[operator]
        made[path] = shape, num_classes
    shapes, classes = (set(each) for each in zip(*made.values(), strict=True))
    if len(shapes) > 1 or len(classes - {None}) > 1:
        told = "; ".join(f"{path} {shape}, {known}" for path, (shape, known) in made.items())
        raise ValueError(f"all models must make images of one shape and number of classes: {told}.")


def _short(paths: Sequence[str]) -> list[str]:
    """Paths without the folders that all have in common."""
    whole = [Path(path).absolute() for path in paths]
    common = os.path.commonpath(whole)
    found = [os.path.relpath(path, common) for path in whole]
    return list(paths) if "." in found else found


def _told_consistency(found: Consistency, protocol: str) -> str:
    lines = [
        f"consistency (Eq. 1)    {found.paper:.2f} dB",
        f"over all pairs         {found.all_pairs:.2f} dB",
        f"chance: other seeds    {found.shuffled:.2f} dB"
        + (f"; of the same class {found.same_class:.2f} dB" if found.same_class else ""),
        f"to nearest training image {found.nearest:.2f} dB; the same one {found.same_nearest:.0%}",
        f"in features            {found.features:.2f} of the way from chance to the same "
        f"({protocol})",
    ]
    return "\n".join(lines)


# Interpolation


def interpolate_weights(args: Namespace) -> str:
    """Losses on the line between two checkpoints; what to print."""
    require_at_least(2, points=args.points)
    first, second = (movable(path, args) for path in (args.first, args.second))
    refuse_other_losses(first, [second])
    a, b = state_of(first.module), state_of(second.module)
    ends = {"as they are": b}
    if args.align:
        units = hidden_units(first.module)
        if not units:
            raise ValueError("--align knows no hidden features of this network; leave it out.")
        print_error(f"--align puts the features of {len(units)} hidden layers in order.")
        ends["aligned"] = aligned(b, a, units)
    losses = fixed_losses(first.module, training_data(first, args), args)
    out, alphas = Path(args.out), np.linspace(0, 1, args.points)
    _said_cost(losses, len(alphas) * len(ends))
    prepare_folder(out, _plan("interpolation", args, first, second))

    def make(kind: str) -> Arrays:
        return {"values": interpolate(first.module, a, ends[kind], losses, alphas).values}

    made = compute_pieces(out, list(ends), make, "line")
    if made is None:
        return _awaited(out)
    found = {
        kind: Interpolation(list(losses), alphas, each["values"])
        for kind, each in zip(ends, made, strict=True)
    }
    for kind, each in found.items():
        each.save(out / f"interpolation{'-aligned' * (kind == 'aligned')}")
    draw_interpolation(found, out / "interpolation.png")
    return "\n".join(
        f"{name}, {kind}: {each.values[i, 0]:.4g} ... {each.values[i].max():.4g} ... "
        f"{each.values[i, -1]:.4g}; barrier {each.barriers[name]:.4g}"
        for i, name in enumerate(losses)
        for kind, each in found.items()
    )


# Landscape


def survey(args: Namespace) -> str:
    """Losses on a plane through a checkpoint; what to print."""
    require_at_least(2, points=args.points)
    if not 0 < args.span < math.inf:
        raise ValueError(f"--span must be above 0 and finite, got {args.span}.")
    loaded = movable(args.checkpoint, args)
    losses = fixed_losses(loaded.module, training_data(loaded, args), args)
    on_the_way = [movable(path, args) for path in args.path or ()]
    plane, way = _plane(loaded, on_the_way, args.seed)
    reach = args.span if way is None else 1.2 * float(np.abs(way.points).max())
    out, axis = Path(args.out), np.linspace(-reach, reach, args.points)
    surfaces = [(plane, losses)] if way else _of_players(loaded.module, plane, losses)
    _said_cost(losses, args.points**2)
    prepare_folder(out, _plan("landscape", args, loaded, *on_the_way))

    def make(row: str) -> Arrays:
        at = [axis[int(row)]]
        parts = [landscape(loaded.module, p, each, axis, at).values for p, each in surfaces]
        return {"values": np.concatenate(parts)}

    made = compute_pieces(out, [str(i) for i in range(len(axis))], make, "row")
    if made is None:
        return _awaited(out)
    values = np.concatenate([each["values"] for each in made], axis=1)
    found = Landscape(list(losses), axis, axis, values)
    found.save(out / "landscape")
    draw_landscape(found, out / "landscape.png", None if way is None else way.points)
    told = [
        f"{name}: {np.nanmin(each):.4g} to {np.nanmax(each):.4g}"
        + (f"; {bad} points are not finite" if (bad := (~np.isfinite(each)).sum()) else "")
        for name, each in zip(losses, values, strict=True)
    ]
    if way is not None:
        way.save(out / "way")
        told.append(f"The plane holds {way.share:.1%} of the run's squared distance from its end.")
    return "\n".join(told)


def _of_players(
    module: Any, plane: Sequence[Direction], losses: Losses
) -> list[tuple[Sequence[Direction], Losses]]:
    """Losses with the plane that they are seen on: of a GAN each along its own network's weights.

    Along both, what one loss gains the other pays, and no center is at its lowest.
    """
    found: list[tuple[Sequence[Direction], Losses]] = []
    for name, loss in losses.items():
        if not isinstance(getattr(module, name, None), torch.nn.Module):
            return [(plane, losses)]
        own = [{n: d for n, d in each.items() if n.startswith(f"{name}.")} for each in plane]
        found.append((own, {name: loss}))
    return found


def _plane(
    loaded: LoadedModule, on_the_way: Sequence[LoadedModule], seed: int
) -> tuple[list[Direction], Way | None]:
    """Two directions, and a run's way in them."""
    if not on_the_way:
        drawn = directions(loaded.module, seed)
        return [filter_normalised(each, loaded.module) for each in drawn], None
    refuse_other_losses(loaded, on_the_way)
    center = state_of(loaded.module)
    states: list[State] = [state_of(each.module) for each in on_the_way]
    names = [name for name, p in loaded.module.named_parameters() if p.requires_grad]
    plane, share = principal_plane(states, center, names)
    points = projected(states, center, plane)
    return plane, Way([each.step for each in on_the_way], points, share)


# Hessian


def spectra(args: Namespace) -> str:
    """Spectra of the Hessian of each loss; what to print."""
    require_at_least(1, steps=args.steps, vectors=args.vectors)
    loaded = movable(args.checkpoint, args)
    losses = fixed_losses(loaded.module, training_data(loaded, args), args)
    out, parameters = Path(args.out), list(loaded.module.parameters())
    _refuse_jumps(losses, loaded.module, parameters, args.kinks)
    _say_memory(parameters, args.steps)
    _said_cost_of_products(losses, parameters, args.steps * args.vectors)
    prepare_folder(out, _plan("hessian", args, loaded))

    def make(piece: str) -> Arrays:
        name, seed = list(losses)[int(piece.split("-")[0])], int(piece.split("-")[1])
        product, like = hessian_product(losses[name], _of(name, loaded.module, parameters))
        found = spectrum(product, like, args.steps, [seed])
        return {"nodes": found.nodes, "weights": found.weights, "num": np.array(len(like))}

    names = [f"{i}-{seed}" for i in range(len(losses)) for seed in range(args.vectors)]
    made = compute_pieces(out, names, make, "vector")
    if made is None:
        return _awaited(out)
    found: dict[str, Spectrum] = {}
    for i, name in enumerate(losses):
        own: Sequence[Arrays] = made[i * args.vectors : (i + 1) * args.vectors]
        nodes, weights = (np.concatenate([each[k] for each in own]) for k in ("nodes", "weights"))
        found[name] = Spectrum(int(own[0]["num"]), nodes, weights)
        found[name].save(out / f"hessian-{i}")
    draw_spectra(found, out / "hessian.png")
    return "\n".join(_told_spectrum(name, each) for name, each in found.items())


def _said_cost_of_products(losses: Losses, parameters: Sequence[Tensor], count: int) -> None:
    """Say what so many products with each Hessian will cost, by the time that one takes."""
    began = time.monotonic()
    for loss in losses.values():
        product, like = hessian_product(loss, parameters)
        product(torch.ones_like(like))
    seconds = (time.monotonic() - began) * count
    _say_minutes(f"{count} products with the Hessians of {len(losses)} losses", seconds)


def _say_memory(parameters: Sequence[Tensor], steps: int) -> None:
    gigabytes = 8e-9 * steps * sum(p.numel() for p in parameters)
    print_error(f"{steps} steps keep as many vectors of all weights: {gigabytes:.1f} GB.")


def _refuse_jumps(losses: Losses, module: Any, parameters: Sequence[Tensor], allowed: bool) -> None:
    """Raise ValueError where autograd's Hessian is not what gradients change by."""
    rule = (
        "a part of the network has no second derivative, such as a fused attention, or gradients "
        "jump, as with ReLU. Take plain operations; or --kinks to have the Hessian without jumps"
    )
    for name, loss in losses.items():
        try:
            error = difference_error(loss, _of(name, module, parameters))
        except RuntimeError as failure:
            if not re.search("derivative|differentiate", str(failure)):
                raise
            raise ValueError(f"{rule}: {failure}") from failure
        if error > 0.1 or math.isnan(error):
            told = f"the Hessian of {name} is {error:.0%} off the difference of gradients"
            if not allowed or math.isnan(error):
                raise ValueError(f"{told}: {rule}.")
            print_error(f"{told}, as gradients jump.")


def _of(name: str, module: Any, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parameters that a loss is minimised by."""
    network = getattr(module, name, None)
    return list(network.parameters()) if isinstance(network, torch.nn.Module) else parameters


def _told_spectrum(name: str, found: Spectrum) -> str:
    top = ", ".join(f"{value:.4g}" for value in found.top[:5])
    return (
        f"{name}: largest {top}; smallest {np.nanmin(found.nodes):.4g}; trace {found.trace:.4g}; "
        f"variance {found.variance:.4g} by quadrature, {found.ritz_variance:.4g} of Ritz values"
    )
