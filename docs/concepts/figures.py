"""Draw the figures of docs/concepts/.

    pip install -e '.[lab]'
    python docs/concepts/figures.py            # all; about half a minute on one CPU core
    python docs/concepts/figures.py times ema  # some

The figures use public functions of this library. The data are distributions with an exact denoiser,
or a photograph that ships with scikit-learn. No network is trained.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

from lit_diffusion.callbacks.curriculum import clts_density
from lit_diffusion.callbacks.ema import ema_update_, warmup_decay
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.ema_profiles import exponent, power_decay
from lit_diffusion.gaussian import FixedSmall, expand_as
from lit_diffusion.grids import Even, Karras, LogSNR, Sections, ShiftedGrid
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.losses import P2, AsFlow, MinSNR, Simple, SoftMinSNR, TruncSNR
from lit_diffusion.parameterizations import (
    FDM,
    EDMPreconditioning,
    Epsilon,
    FlowVelocity,
    Sample,
    Velocity,
)
from lit_diffusion.processes import (
    ContinuousVP,
    CosineBetas,
    DiscreteVP,
    EDMProcess,
    LinearBetas,
    LinearFlow,
    SigmoidBetas,
    ZeroTerminalSNR,
)
from lit_diffusion.protocols import Denoised, Process, Solver
from lit_diffusion.solvers import DDIM, DDPM, DPMSolverPP, Euler, Heun, UniPC
from lit_diffusion.solvers.steps import solver_times
from lit_diffusion.timesteps import LogitNormal, LogNormal, Shifted, Uniform, draw_uniforms

FOLDER = Path(__file__).parent
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLE = {
    "axes.prop_cycle": plt.cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.facecolor": "white",  # readable on a dark page too
}


def photo(size: int, gray: bool = True) -> Tensor:
    """Return the head of the flower in scikit-learn's photograph, uint8 (1, 1 or 3, size, size)."""
    flower = Image.fromarray(load_sample_images().images[1])
    flower = flower.crop((170, 50, 470, 350)).resize((size, size), Image.Resampling.LANCZOS)
    pixels = torch.frombuffer(bytearray(flower.tobytes()), dtype=torch.uint8)
    pixels = pixels.view(1, size, size, 3).permute(0, 3, 1, 2)
    return pixels.float().mean(1, keepdim=True).round().to(torch.uint8) if gray else pixels


class Mixture:
    """A mixture of Gaussians, for which the optimal estimate of x0 has a closed form.

    Args:
        means: (K, D) means of the Gaussians.
        std: standard deviation of each Gaussian, in every direction.
        labels: (K,) class of each Gaussian.
    """

    def __init__(self, means: Tensor, std: float, labels: Tensor | None = None) -> None:
        self.means, self.std = means, std
        self.labels = torch.zeros(len(means), dtype=torch.long) if labels is None else labels

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample points (n, D) and their labels (n,)."""
        k = torch.randint(len(self.means), (n,), generator=generator)
        noise = torch.randn(n, self.means.shape[1], generator=generator)
        return self.means[k] + self.std * noise, self.labels[k]

    def denoise_for(self, process: Process) -> Callable:
        """Return a function from labels (B,), where -1 means no label, to a denoiser."""

        def for_labels(labels: Tensor) -> Callable[[Tensor, Tensor], Denoised]:
            allowed = (labels[:, None] == self.labels) | (labels[:, None] < 0)

            def denoise(x_t: Tensor, t: Tensor) -> Denoised:
                x, means = x_t.flatten(1)[:, None].double(), self.means.double()
                alpha, sigma = (v.view(-1, 1, 1) for v in process.alpha_sigma(t))
                variance = alpha**2 * self.std**2 + sigma**2
                logits = -((x - alpha * means) ** 2 / (2 * variance)).sum(2)
                share = logits.masked_fill(~allowed, -torch.inf).softmax(1)[..., None]
                given_k = (alpha * self.std**2 * x + sigma**2 * means) / variance
                x0 = (share * given_k).sum(1).view_as(x_t).to(x_t.dtype)
                a, s = (expand_as(v, x_t) for v in process.alpha_sigma(t))
                return Denoised(x0, (x_t - a * x0) / s)

            return denoise

        return for_labels

    def denoise(self, process: Process, n: int) -> Callable[[Tensor, Tensor], Denoised]:
        """Return the denoiser for n points without labels."""
        return self.denoise_for(process)(torch.full((n,), -1))


def levels(low: float = -4, high: float = 4, num: int = 400) -> Tensor:
    """Return noise levels sigma / alpha, (num,) float64, from 10^low to 10^high."""
    return torch.logspace(low, high, num, dtype=torch.float64)


def on_vp(level: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha and sigma of a variance-preserving process at noise levels."""
    return 1 / (1 + level**2).sqrt(), level / (1 + level**2).sqrt()


def label_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Set the title and the labels of both axes."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def process() -> Figure:
    """Draw one image under three processes, and the SNR of six processes."""
    figure, (images, plot) = plt.subplots(1, 2, figsize=(8.4, 2.9), width_ratios=(1.9, 1))
    x0 = PixelCodec().encode(photo(64))
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
    u = torch.tensor([0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8], dtype=torch.float64)
    rows = []
    named = {
        "linear betas": DiscreteVP(LinearBetas()),
        "cosine betas": DiscreteVP(CosineBetas()),
        "LinearFlow": LinearFlow(),
    }
    for each in named.values():
        alpha, sigma = (expand_as(v, x0) for v in each.alpha_sigma(each.from_unit(u)))
        x_t = (alpha * x0 + sigma * noise) / (alpha**2 + sigma**2).sqrt()
        x_t = torch.nn.functional.pad(x_t[:, 0], (2, 2, 2, 2), value=1.0)
        rows.append(torch.cat([*x_t.clamp(-1, 1)], dim=1))
    images.imshow(torch.cat(rows), cmap="gray", vmin=-1, vmax=1)
    images.set_xticks(68 * torch.arange(7) + 34, [f"{v:g}" for v in u.tolist()])
    images.set_yticks(68 * torch.arange(3) + 34, [*named])
    images.tick_params(length=0)
    images.spines[:].set_visible(False)
    label_axes(
        images, "$x_t$, scaled for display", "u: 0 is the least noisy time, 1 the noisiest", ""
    )
    named["sigmoid betas"] = DiscreteVP(SigmoidBetas())
    named["linear, zero terminal SNR"] = DiscreteVP(ZeroTerminalSNR(LinearBetas()))
    named["EDMProcess"] = EDMProcess()
    u = torch.linspace(0, 1, 1000, dtype=torch.float64)
    for (name, each), dashes in zip(named.items(), ["-", "-", "-", "-", "--", "-"], strict=True):
        alpha, sigma = each.alpha_sigma(each.from_unit(u))
        plot.plot(u, 20 * (alpha / sigma).log10(), dashes, label=name)
    plot.set_ylim(-110, 60)
    plot.legend(loc="lower left")
    label_axes(plot, "how fast the signal goes", "u", "SNR in dB")
    return figure


def parameterization() -> Figure:
    """Draw the error of x0 per error of the output, and the scale of the network's input."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.1))
    level = levels(-3, 3)
    alpha, sigma = on_vp(level)
    kinds = {
        "Epsilon": Epsilon(),
        "Sample": Sample(),
        "Velocity": Velocity(),
        "FlowVelocity": FlowVelocity(),
        "EDMPreconditioning(0.5)": EDMPreconditioning(),
    }
    for name, kind in kinds.items():
        left.loglog(level, kind.output_scale(alpha, sigma), label=name)
    left.legend()
    label_axes(
        left,
        "error of x0 per error of the output",
        r"noise level $\sigma / \alpha$",
        "output_scale",
    )
    edm = EDMProcess()
    level = torch.logspace(-2.7, 1.9, 400, dtype=torch.float64)
    alpha, sigma = edm.alpha_sigma(level)
    std = (alpha**2 * 0.5**2 + sigma**2).sqrt()
    inputs = {
        "Epsilon: x_t itself": Epsilon(),
        "EDMPreconditioning": EDMPreconditioning(),
        "FDM(EDMPreconditioning, multiplier=1)": FDM(EDMPreconditioning(), 0.002, 80.0, 1.0),
        "FDM(EDMPreconditioning, multiplier=2)": FDM(EDMPreconditioning(), 0.002, 80.0, 2.0),
    }
    for name, kind in inputs.items():
        right.loglog(level, kind.network_input(std, alpha, sigma), label=name)
    right.set_ylim(1e-2, 1e2)
    right.legend()
    label_axes(
        right,
        "standard deviation of the network's input",
        r"noise level $\sigma$ of EDMProcess",
        "",
    )
    return figure


def loss() -> Figure:
    """Draw weights on the error of x0, and the share of each noise level in the loss."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.3))
    level = levels(-2, 2)
    alpha, sigma = on_vp(level)
    log_snr = 2 * (alpha / sigma).log()
    kinds = {
        "Simple with Epsilon": (Simple(), Epsilon()),
        "Simple with Velocity": (Simple(), Velocity()),
        "MinSNR(5)": (MinSNR(), Sample()),
        "SoftMinSNR(4)": (SoftMinSNR(), Sample()),
        "TruncSNR": (TruncSNR(), Sample()),
        "P2(1)": (P2(), Sample()),
        "AsFlow": (AsFlow(), Sample()),
    }
    dashes = ["-", "-", "-", "--", "--", "-", "-"]
    cosine = DiscreteVP(CosineBetas())
    t = torch.arange(1000, dtype=torch.float64)
    steps = 2 * (cosine.alpha_sigma(t)[0] / cosine.alpha_sigma(t)[1]).log()
    density = 1 / -torch.gradient(steps)[0]  # of log SNR, under uniform times
    a, s = cosine.alpha_sigma(t)
    best = 1 / (1 / 0.5**2 + (a / s) ** 2)  # least squared error of x0 ~ N(0, 0.5^2)
    for (name, (weighting, output)), dash in zip(kinds.items(), dashes, strict=True):
        scale = output.output_scale(alpha, sigma)
        weight = weighting.weight(alpha, sigma, scale, None) / scale**2
        left.semilogy(log_snr, weight, dash, label=name)
        scale = output.output_scale(a, s)
        share = weighting.weight(a, s, scale, None) / scale**2 * best * density
        right.plot(steps, share / torch.trapezoid(share, -steps), dash, label=name)
    left.set_ylim(1e-4, 1e4)
    left.legend(ncols=2, loc="lower left", fontsize=7)
    left.set_xlim(10, -10)
    label_axes(left, "weight W on the error of x0", "log SNR (noisier to the right)", "W")
    right.set_xlim(10, -10)
    label_axes(
        right,
        "where the loss of the best model comes from,\nif x0 is Gaussian with std 0.5",
        "log SNR (noisier to the right)",
        "density",
    )
    return figure


def times() -> Figure:
    """Draw the densities of the trained noise levels, and how the curriculum changes them."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.2))
    u = draw_uniforms(2_000_000, generator=torch.Generator().manual_seed(0))
    kinds = {
        "Uniform, DiscreteVP(CosineBetas(4000))": (Uniform(), DiscreteVP(CosineBetas(4000))),
        "Uniform, DiscreteVP(LinearBetas(4000))": (Uniform(), DiscreteVP(LinearBetas(4000))),
        "Uniform, LinearFlow": (Uniform(), LinearFlow()),
        "LogNormal(-1.2, 1.2), EDMProcess": (LogNormal(), EDMProcess()),
        "LogitNormal(0, 1), LinearFlow": (LogitNormal(), LinearFlow()),
        "Shifted(LogitNormal(), 3), LinearFlow": (Shifted(LogitNormal(), 3.0), LinearFlow()),
    }
    edges = torch.linspace(-3, 3, 81, dtype=torch.float64)
    for name, (kind, on) in kinds.items():
        alpha, sigma = on.alpha_sigma(kind.quantile(u, on))
        level = (sigma / alpha).log10().float()
        counts = torch.histc(level, bins=80, min=-3.0, max=3.0).double() / len(u) / (6 / 80)
        left.plot((edges[1:] + edges[:-1]) / 2, counts, label=name)
    left.set_ylim(0, 1.5)
    left.legend(fontsize=7, loc="upper left")
    ticks = [-3, -2, -1, 0, 1, 2, 3]
    left.set_xticks(ticks, [f"$10^{{{v}}}$" for v in ticks])
    label_axes(
        left,
        "noise levels that training draws",
        r"$\sigma / \alpha$",
        r"density of its $\log_{10}$",
    )
    axis = torch.arange(1, 1001) / 1000
    for name, std, step, dash in (
        ("uniform, the start", 1.0, 0, "-"),
        (r"CLTS, $\sigma = T$", 1.0, 100, "-"),
        (r"CLTS, $\sigma = T$, half way", 1.0, 50, "--"),
        (r"CLTS, $\sigma = T / 4$", 0.25, 100, "-"),
        (r"CLTS, $\sigma = T / 4$, half way", 0.25, 50, "--"),
    ):
        density = 1000 * clts_density(step, num_steps=100, std=std)
        moved = (density / 1000 - 1e-3).clamp(min=0).sum()
        right.plot(axis, density, dash, label=f"{name}: moves {100 * moved:.1f}%")
    right.set_ylim(0, 3)
    right.legend()
    label_axes(right, "the curriculum over u", "u: 1 is the noisiest level", "density")
    return figure


def solver() -> Figure:
    """Draw trajectories, grids, and the error of solvers over network evaluations."""
    figure, axes = plt.subplots(1, 3, figsize=(9.2, 3.2))
    on, data = ContinuousVP(), Mixture(torch.tensor([[-0.6], [0.6]]), 0.1)
    noise = torch.linspace(-1.6, 1.6, 6, dtype=torch.float64).view(-1, 1, 1, 1)
    for each, color in (
        (DDPM(FixedSmall(), steps=100, clip=False), COLORS[1]),
        (DDIM(100, clip=False), COLORS[0]),
    ):
        generator = torch.Generator().manual_seed(1)
        path: list[tuple[float, Tensor]] = []

        def watch(step: int, t: Tensor, x_t: Tensor, x0: Tensor, path: list = path) -> None:
            alpha, sigma = on.alpha_sigma(t)
            path.append((float(sigma / alpha), x_t.flatten()))

        def randn(x: Tensor, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(x.shape, generator=generator, dtype=x.dtype)

        each.sample(data.denoise(on, len(noise)), on, noise, randn, watch)
        lines = axes[0].semilogx(
            [level for level, _ in path],
            torch.stack([x for _, x in path]),
            color=color,
            linewidth=1.2 if color == COLORS[0] else 0.7,
        )
        lines[0].set_label(f"{type(each).__name__}, 100 steps")
    axes[0].invert_xaxis()
    axes[0].legend(loc="upper left")
    axes[0].set_ylim(-2.2, 2.6)
    label_axes(
        axes[0], "paths to data near -0.6 and 0.6", r"noise level $\sigma / \alpha$", "$x_t$"
    )

    cosine = DiscreteVP(CosineBetas())
    for grid in (
        Sections(),
        Even(),
        ShiftedGrid(Even(), 3.0),
        LogSNR(-10.0),
        Karras(noisiest=-10.0),
    ):
        alpha, sigma = cosine.alpha_sigma(grid.grid(cosine, 20)[:-1])
        name = repr(grid).replace("counts=None", "").replace("rho=7.0, ", "").replace(".0", "")
        axes[1].semilogy(sigma / alpha, ".-", label=name, markersize=4)
    axes[1].set_ylim(3e-4, 1e7)
    axes[1].legend(fontsize=7)
    label_axes(axes[1], "20 steps, cosine betas", "step", r"$\sigma / \alpha$")

    noise = torch.randn(
        512, 1, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    denoise, grid = data.denoise(on, len(noise)), LogSNR(noisiest=-10.0)

    def run(each: Solver) -> Tensor:
        return each.sample(denoise, on, noise, torch.zeros_like)

    exact = run(Heun(2000, grid, clip=False))
    kinds: dict[str, Callable[[int], Solver]] = {
        "Euler = DDIM": lambda n: Euler(n, times=grid, clip=False),
        "Heun": lambda n: Heun(n, grid, clip=False),
        "DPMSolverPP (2M)": lambda n: DPMSolverPP(n, grid, clip=False),
        "UniPC": lambda n: UniPC(n, grid, clip=False),
    }
    for name, make in kinds.items():
        points = []
        for steps in (6, 10, 16, 25, 40, 64, 100):
            error = (run(make(steps)) - exact).abs().mean()
            points.append((len(solver_times(make(steps), on)), float(error)))
        axes[2].loglog(*zip(*points, strict=True), "o-", label=name, markersize=3)
    axes[2].legend()
    axes[2].set_xticks([10, 20, 50, 100, 200], ["10", "20", "50", "100", "200"])
    axes[2].minorticks_off()
    label_axes(
        axes[2],
        "error of x0",
        "evaluations of the network (NFE)",
        "mean |error|",
    )
    return figure


def guidance() -> Figure:
    """Draw samples of three classes in the plane at several guidance scales."""
    figure, axes = plt.subplots(1, 4, figsize=(8, 2.1), sharex=True, sharey=True)
    angle = torch.tensor([90.0, 210.0, 330.0]).deg2rad()
    arms = torch.stack([angle.cos(), angle.sin()], 1)
    radius = torch.tensor([0.15, 0.45, 0.75])
    means = (radius[None, :, None] * arms[:, None]).flatten(0, 1)
    data = Mixture(means, 0.14, torch.arange(3).repeat_interleave(3))
    on, generator = ContinuousVP(), torch.Generator().manual_seed(0)
    real, _ = data.draw(1500, generator)
    noise = torch.randn(450, 2, 1, 1, generator=generator)
    labels = torch.arange(450) % 3
    kinds = {
        "scale 1": ClassifierFree(1.0),
        "scale 2": ClassifierFree(2.0),
        "scale 4": ClassifierFree(4.0),
        "scale 4 in (0.3, 1)": ClassifierFree(4.0, interval=(0.3, 1.0)),
    }
    for axis, (name, kind) in zip(axes, kinds.items(), strict=True):
        denoise = kind.guide(data.denoise_for(on), labels, on, torch.full_like(labels, -1))
        points = DDIM(100, clip=False).sample(denoise, on, noise, torch.randn_like).flatten(1)
        axis.scatter(*real.T, s=4, color="0.85", linewidths=0)
        for k in range(3):
            axis.scatter(*points[labels == k].T, s=5, color=COLORS[k], linewidths=0)
        axis.set_title(name)
        axis.set_aspect("equal")
        axis.set_xlim(-1.35, 1.35)
        axis.set_ylim(-0.8, 1.3)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_visible(False)
    return figure


def condition() -> Figure:
    """Draw how a row of a data set reaches the network, in training and in sampling."""
    figure, axes = plt.subplots(figsize=(7.8, 2.4))
    axes.set_xlim(0, 90)
    axes.set_ylim(0, 26)
    axes.axis("off")

    def box(x: float, y: float, width: float, text: str, color: str, height: float = 9.0) -> None:
        style = "round,pad=0.1,rounding_size=0.8"
        fill = {"facecolor": color + "22", "edgecolor": color, "linewidth": 1.2}
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, **fill))
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8)

    def arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "0.3"})

    rows = {
        "training": (
            "one row per image\nof the data set",
            'drop\n"none" in label_dropout\nof the rows',
        ),
        "generate()": (
            "labels=, or\nfor_seeds(seeds)",
            'null\n"none" in every row,\nfor guidance alone',
        ),
    }
    for y, (title, (source, without)) in zip((14, 2), rows.items(), strict=True):
        axes.text(0, y + 4.5, title, fontsize=10, fontweight="bold", va="center")
        box(11, y, 17, source, COLORS[0])
        box(32.5, y, 14, "check\nshape, dtype\nand range", COLORS[2])
        box(51, y, 17, without, COLORS[2])
        arrow((28.4, y + 4.5), (32.2, y + 4.5))
        arrow((46.9, y + 4.5), (50.7, y + 4.5))
        arrow((68.4, y + 4.5), (72.2, 12.5))
    box(72.5, 7.5, 17, "the network\nembeds it as a vector\nor as tokens", COLORS[1], 10)
    axes.text(50, 24.5, "methods of Conditioning", color=COLORS[2], ha="center", fontsize=8)
    return figure


def codec() -> Figure:
    """Draw x0 and its values under two codecs."""
    page = (FOLDER / "codec.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Haar" in c]
    names: dict = {}
    exec(code, names)  # noqa: S102  # the class of the page itself
    image = photo(128)
    pixels, bands = PixelCodec().encode(image), names["HaarCodec"]().encode(image)
    figure, axes = plt.subplots(1, 3, figsize=(8, 2.8), width_ratios=(1, 1, 1.35))
    axes[0].imshow(pixels[0, 0], cmap="gray", vmin=-1, vmax=1)
    axes[0].set_title("PixelCodec: (1, 128, 128)")
    tiles = torch.cat([torch.cat([*bands[0, :2]], 1), torch.cat([*bands[0, 2:]], 1)], 0)
    axes[1].imshow(tiles, cmap="gray", vmin=-3, vmax=3)
    axes[1].axhline(63.5, color="white", linewidth=1)
    axes[1].axvline(63.5, color="white", linewidth=1)
    axes[1].set_title("HaarCodec: (4, 64, 64)")
    for axis in axes[:2]:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_visible(False)
    axes[2].axvspan(-1, 1, color="0.92", linewidth=0, label="[-1, 1]")
    for name, x0 in (("PixelCodec", pixels), ("HaarCodec", bands)):
        counts = torch.histc(x0, bins=80, min=-4, max=4) / x0.numel() * 10
        axes[2].step(torch.linspace(-3.95, 3.95, 80), counts, where="mid", label=name)
    axes[2].legend()
    label_axes(axes[2], "values of x0", "value", "density")
    return figure


def ema() -> Figure:
    """Draw how much each step contributes to an average, and averages of a noisy weight."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.2))
    steps = 1000
    schedules: dict[str, list[float]] = {
        "EMA(decays=0.99), with warm-up": [warmup_decay(0.99, n) for n in range(steps)],
        "EMA(decays=0.999, warmup=False)": [0.999] * steps,
    }
    for width in (0.05, 0.1):
        gamma = exponent(width)
        decays = [power_decay(gamma, n + 1) for n in range(steps)]
        schedules[f"PowerEMA(widths={width})"] = decays
    generator = torch.Generator().manual_seed(0)
    weight, weights = torch.tensor([3.0]), []
    for step in range(steps):
        goal = -1.0 * step / steps
        gradient = weight - goal + torch.randn(1, generator=generator)
        weight = weight - 0.05 * gradient
        weights.append(weight)
    right.plot(torch.cat(weights), color="0.8", linewidth=0.7, label="raw weight")
    for name, decays in schedules.items():
        factor, profile = 1.0, []
        for decay in reversed(decays):
            profile.append(factor * (1 - decay))
            factor *= decay
        left.plot(torch.arange(steps), profile[::-1], label=name)
        shadow, averages = [torch.tensor([3.0])], []
        for weight, decay in zip(weights, decays, strict=True):
            ema_update_(shadow, [weight], decay)
            averages.append(shadow[0].clone())
        right.plot(torch.cat(averages), label=name)
    left.legend()
    label_axes(
        left, "weight of each step in the average", "optimizer step", "weight after step 1,000"
    )
    right.plot([0, steps], [0, -1], color="black", linewidth=0.8, linestyle=":", label="optimum")
    right.set_ylim(-2, 3.2)
    right.legend([right.lines[0], right.lines[-1]], ["raw weight", "optimum"], loc="lower left")
    label_axes(right, "one noisy weight and its averages", "optimizer step", "value")
    return figure


FIGURES = (process, parameterization, loss, times, solver, guidance, condition, codec, ema)


def main() -> None:
    """Draw the figures that the command line names, or all figures."""
    plt.switch_backend("agg")
    for draw in FIGURES:
        if sys.argv[1:] and draw.__name__ not in sys.argv[1:]:
            continue
        path = FOLDER / f"{draw.__name__}.png"
        with plt.rc_context(STYLE):
            figure = draw()
            figure.savefig(path, dpi=150, metadata={"Software": None})
            plt.close(figure)
        image = Image.open(path).convert("RGB")
        image.quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)  # a third


if __name__ == "__main__":
    main()
