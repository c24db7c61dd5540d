"""What noise levels have to do with training, for docs/results/stability.md.

    stability_levels.py levels OUT        of the checkpoints that `stability.py train` left in OUT
    stability_levels.py early OUT         of the recipes of docs/results/recipes.csv, trained here
    stability_levels.py rank FILE.csv     whether early measures tell which recipe was fast

`levels` writes levels.csv: the loss and the distance |eps - x_t| / |x_t| by noise level and step,
and decided.csv: how alike two ways from one x_t end. `early` writes early.csv, a row for a recipe
and seed, and goes on with the same command when it was stopped. `levels` begins anew.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from csv_tables import Row, read_rows, write_rows
from scipy.stats import spearmanr
from stability import JOBS, ROOT, lit_diffusion
from stability_tables import rounded
from torch import Tensor, nn

from lit_diffusion.callbacks.gradient_diagnostics import random_halves, signal_and_noise
from lit_diffusion.checkpoints.loading import LoadedModule, load_module
from lit_diffusion.cli.run_data import data_of_run, protocol_of_run
from lit_diffusion.gaussian import FixedSmall
from lit_diffusion.grids import Even
from lit_diffusion.lab.analysis.consistency import measure_consistency
from lit_diffusion.lab.analysis.fixed_losses import fixed_batch, fixed_losses
from lit_diffusion.lab.analysis.hessian import estimate_spectrum, hessian_product
from lit_diffusion.lab.compare.comparison import compare
from lit_diffusion.lab.compare.curves import read_arms
from lit_diffusion.metrics.extractors import protocol_by_name
from lit_diffusion.metrics.image_distances import psnr
from lit_diffusion.seeding import PerSampleNoise
from lit_diffusion.solvers import DDPM
from lit_diffusion.solvers.editing import NoisedImagePrior, truncate_solver

LEVELS = [(i + 0.5) / 10 for i in range(10)]
SEEDS = range(3)
ARMS = ("decayed", "textbook", "edm-tuned", "static", "fast", "balanced")
EARLY, LATER = 100, 200
"""Steps at which recipes are measured, and with which their samples are compared."""


def fixed(loaded: LoadedModule, num: int) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Training set; encoded images of it, their labels, and noise by their place in the set."""
    dataset = data_of_run(loaded.path.parents[1], None, []).dataset("train")
    x0, labels, index = fixed_batch(loaded.module, dataset, num)
    return dataset, x0, labels, PerSampleNoise(index.tolist(), stream="validation").randn_like(x0)


@torch.no_grad()
def by_level(loaded: LoadedModule, num: int) -> Iterator[Row]:
    """Loss, and the distance of the predicted noise from x_t, which "the identity" has at 0."""
    module: Any = loaded.module
    dataset, x0, labels, noise = fixed(loaded, num)
    losses = fixed_losses(module, dataset, num, LEVELS)
    denoise = module.denoise_for(labels)
    for u in LEVELS:
        t = module.process.from_unit(torch.full((num,), u).double())
        alpha, sigma = (v.view(-1, 1, 1, 1).to(x0) for v in module.process.alpha_sigma(t))
        x_t = alpha * x0 + sigma * noise
        lengths = x_t.flatten(1).norm(dim=1)
        apart = [
            ((each - x_t).flatten(1).norm(dim=1) / lengths).mean().item()
            for each in (denoise(x_t, t).noise, noise)
        ]
        loss = losses[f"u = {u:g}"]().item()
        distances = {"from_x_t": apart[0], "noise_from_x_t": apart[1]}
        yield {"step": loaded.step, "u": u, "loss": loss, **distances}


class Silent(nn.Module):
    """Says 0, as a U-Net does before its first step."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return torch.zeros_like(x)


def levels(out: Path) -> None:
    rows: list[Row] = []
    is_small = load_module(out / "unet/0", "raw").module.image_shape[-1] == 8
    num, every, *ways = (512, 1, 200, 100) if is_small else (128, 2, 50, 50)  # MNIST is slow
    for seed in SEEDS:
        paths = sorted((out / f"unet/{seed}/steps").glob("*.ckpt"))
        first = load_module(paths[0], "raw")
        first.module.network = Silent()
        rows += [{"seed": seed, **row, "step": 0} for row in by_level(first, num)]
        for path in paths[every - 1 :: every]:
            loaded = load_module(path, "raw")
            rows += [{"seed": seed, **row} for row in by_level(loaded, num)]
        print(f"looked at unet/{seed}", flush=True)
    write_rows(out / "levels.csv", rounded(rows))
    runs = [out / f"unet/{seed}" for seed in SEEDS]
    write_rows(out / "decided.csv", rounded(row for run in runs for row in decided(run, *ways)))


@torch.no_grad()
def decided(run: Path, num: int, steps: int) -> Iterator[Row]:
    """How alike two samples are that leave one x_t by ancestral steps of other noise."""
    loaded = load_module(run, "ema")
    module: Any = loaded.module
    _, x0, labels, noise = fixed(loaded, num)
    denoise = module.denoise_for(labels)
    whole = DDPM(FixedSmall(), steps, times=Even())

    def ended(u: float, seed: int) -> Tensor:
        drawn = PerSampleNoise([seed * num + i for i in range(num)])
        solver = truncate_solver(whole, u, module.process)
        prior = NoisedImagePrior(module.process, x0)
        sample = solver.sample(denoise, prior, noise, drawn.randn_like)
        return module.codec.decode(sample)

    protocol = protocol_by_name(protocol_of_run(run))
    features = protocol.build()
    for u in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        ends = torch.stack([ended(u, seed) for seed in (1, 2)])
        result = measure_consistency(ends, ["1", "2"], features_of=features, labels=labels)
        yield {
            "run": str(run.relative_to(run.parents[1])),
            "u": u,
            "psnr": result.all_pairs,
            "psnr_of_others": result.same_class,
            "psnr_to_image": psnr(ends[0], module.codec.decode(x0)).mean().item(),
            "features": result.features,
        }


def train(out: Path, arm: str, seed: int, steps: int) -> None:
    """The first steps of a recipe, whose lr falls as in the whole of it."""
    folder = out / "early" / arm / str(seed)
    if (folder / "done").exists():
        return
    recipe = [] if arm == "baseline" else [f"--config={ROOT}/configs/arms/digits/{arm}.yaml"]
    schedule = [] if arm == "baseline" else [f"--model.lr_scheduler.init_args.total_steps={steps}"]
    keeps = ["--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"]
    keeps += [f"--trainer.callbacks.dirpath={folder}/steps", "--trainer.callbacks.save_top_k=-1"]
    keeps += ["--trainer.callbacks.filename={step:05d}"]
    keeps += [f"--trainer.callbacks.every_n_train_steps={EARLY}"]
    words = [f"--config={ROOT}/configs/digits-ablation.yaml", *recipe, *schedule, *keeps]
    words += [f"--trainer.max_steps={LATER}", f"--trainer.val_check_interval={EARLY}"]
    words += [f"--seed_everything={seed}", f"--trainer.default_root_dir={folder}"]
    words += ["--ckpt_path=last-or-none", "--trainer.callbacks.FIDEvaluation.repeats_at_end=0"]
    if lit_diffusion(out / "early" / f"{arm}-{seed}.log", "fit", *words):
        (folder / "done").touch()
        print(f"trained {arm} from seed {seed}", flush=True)


def gradient_noise(module: Any, x0: Tensor, labels: Tensor, noise: Tensor, u: float) -> float:
    """tr(Sigma) / |G|^2 of the loss at a level, by two halves of the images."""
    t = module.process.from_unit(torch.full((len(x0),), u).double())
    halves = []
    for i in random_halves(len(x0)):
        loss = module.per_sample_loss(x0[i], labels[i], t[i], noise[i]).mean()
        gradients = torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True)
        halves.append(torch.cat([g.flatten() for g in gradients]))
    signal, spread = signal_and_noise(halves[0], halves[1], len(x0) // 2)
    return spread / signal if signal > 0 else float("inf")


def measured(folder: Path) -> Row:
    """Of a recipe after `EARLY` steps: what might tell how fast it is."""
    first, later = (
        load_module(folder / f"steps/step={step:05d}.ckpt", "ema") for step in (EARLY, LATER)
    )
    images = [each.module.generate(range(100)) for each in (first, later)]  # type: ignore[operator]
    lines = (folder / "evaluations.jsonl").read_text().splitlines()
    scores = {record["step"]: record["value"] for record in map(json.loads, lines)}
    row: Row = {"fid": scores[EARLY], "self_consistency": psnr(*images).mean().item()}
    raw = load_module(folder / f"steps/step={EARLY:05d}.ckpt", "raw")
    module: Any = raw.module
    noise_levels = [0.1, 0.5, 0.9]
    dataset, x0, labels, noise = fixed(raw, 1024)
    for name, loss in fixed_losses(module, dataset, 64, noise_levels).items():
        product, like = hessian_product(loss, list(module.parameters()))
        estimate = estimate_spectrum(product, like, steps=20, seeds=[0])
        short = name.replace("u = ", "u")
        row |= {f"top_{short}": float(estimate.top[0]), f"trace_{short}": estimate.trace}
    row |= {
        f"noise_scale_u{u:g}": gradient_noise(module, x0, labels, noise, u) for u in noise_levels
    }
    return row


def early(out: Path) -> None:
    arms = {arm.name: arm for arm in read_arms([str(ROOT / "docs/results/recipes.csv")])}
    names = ("baseline", *ARMS)
    steps = {name: int(max(arms[name].curves[0].steps)) for name in names}
    with ThreadPoolExecutor(JOBS) as pool:
        runs = [(name, seed) for seed in SEEDS for name in names]
        list(pool.map(lambda run: train(out, *run, steps[run[0]]), runs))
    rows: list[Row] = []
    for arm in names:
        folders = {seed: out / "early" / arm / str(seed) for seed in SEEDS}
        rows += [{"arm": arm, "seed": i, **measured(each)} for i, each in folders.items()]
        print(f"measured {arm}", flush=True)
    write_rows(out / "early.csv", rounded(rows))


def rank(table: Path) -> None:
    """Spearman's correlation of each measure, mean over seeds, with how fast the recipe was."""
    comparison = compare(read_arms([str(ROOT / "docs/results/recipes.csv")]), "baseline")
    speed = {each.arm.name: each.speedup.ratio for each in comparison.results} | {"baseline": 1.0}
    rows = read_rows(table) or sys.exit(f"{table}: no such table; name that of `early`.")
    names = [name for name in rows[0] if name not in ("data", "arm", "seed")]
    print("| after 100 steps | rho | p |\n|---|---|---|")
    for name in names:
        by_arm = {arm: mean(float(row[name]) for row in rows if row["arm"] == arm) for arm in speed}
        rho, p = spearmanr([by_arm[arm] for arm in speed], list(speed.values()))
        print(f"| {name} | {rho:.2f} | {p:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("levels", "early", "rank"))
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    {"levels": levels, "early": early, "rank": rank}[args.what](args.out)
