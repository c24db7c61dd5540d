"""U-ViT: network, its SDE and loss, and the DPM-Solver++ that it samples with."""

from random import Random

import torch
from dpm_solver_pp import DPM_Solver, NoiseScheduleVP
from libs.uvit import UViT
from sde import VPSDE, LSimple, ScoreModel
from support.schedulers import FixedTimes
from torch import Tensor

from lit_diffusion.grids import LogSNR, Sections
from lit_diffusion.parameterizations import Epsilon, Sample
from lit_diffusion.processes import ContinuousVP, CosineBetas, DiscreteVP
from lit_diffusion.solvers import DPMSolverPP, DPMSolverPP2S
from reference_adapters.common import SHAPE, Net, fill_, images, module, noise, outputs, worst
from reference_adapters.openai_diffusion import imported


def network(draw: Random) -> float:
    heads, classes = draw.choice([1, 2, 4]), draw.choice([-1, 5])
    sizes = {"patch_size": draw.choice([1, 2, 4]), "depth": 2 * draw.randint(1, 3)}
    sizes |= {"num_heads": heads, "mlp_ratio": draw.choice([2, 4])}
    flags = {name: draw.random() < 0.5 for name in ("qkv_bias", "mlp_time_embed", "conv")}
    theirs = UViT(8, in_chans=3, embed_dim=32, num_classes=classes, **sizes, **flags)
    theirs.pos_embed.data.normal_()
    arguments = {"num_heads": heads} | ({} if classes < 0 else {"null_class": draw.random() < 0.5})
    ours = imported(fill_(theirs), "uvit", **arguments)
    labels = () if classes < 0 else (torch.tensor([0, draw.randrange(4)]),)
    t = torch.tensor([draw.uniform(0, 999), 999.0])
    return outputs(ours, theirs, torch.randn(SHAPE), t, *labels)


def loss(draw: Random) -> float:
    """LSimple at times and noise of one seed, and the SDE's scales there."""
    low, high, seed = draw.uniform(0.05, 0.2), draw.uniform(10, 25), draw.randrange(1000)
    kind = draw.choice(["noise_pred", "x0_pred"])
    parameterization = {"noise_pred": Epsilon(), "x0_pred": Sample()}[kind]
    process, sde, net = ContinuousVP(low, high - low), VPSDE(low, high), fill_(Net())
    x0 = images(draw)
    torch.manual_seed(seed)
    theirs = LSimple(ScoreModel(net, kind, sde), x0, kind)
    torch.manual_seed(seed)
    t, eps = torch.rand(len(x0)), torch.randn_like(x0)
    ours = module(net, process, parameterization).per_sample_loss(x0, None, t, eps)
    alpha, sigma = process.alpha_sigma(t)
    return worst((ours, theirs), (alpha**2, sde.cum_alpha(t)), (sigma**2, sde.cum_beta(t)))


class Case:
    """A continuous or discrete process, a grid of their `time_steps`, and a network on both."""

    def __init__(self, draw: Random) -> None:
        self.eps, self.steps = draw.choice([1e-3, 1e-4]), draw.randint(4, 20)
        kind = draw.choice(["logSNR", "time_uniform", "discrete"])
        if kind == "discrete":
            num = draw.randint(30, 200)
            self.process = DiscreteVP(CosineBetas(num), rescale_labels=True)
            self.schedule = NoiseScheduleVP("discrete", betas=CosineBetas(num).betas())
            grid = Sections().grid(self.process, self.steps + 1)[:-1]
            self.theirs, self.ours = (grid + 1) / num, FixedTimes(tuple(grid.tolist()))
        else:
            self.process, self.schedule = ContinuousVP(t_min=self.eps), NoiseScheduleVP("linear")
            solver = DPM_Solver(None, self.schedule)
            self.theirs = solver.get_time_steps(kind, 1.0, self.eps, self.steps, "cpu")
            self.ours = LogSNR() if kind == "logSNR" else FixedTimes(tuple(self.theirs.tolist()))
        self.net = fill_(Net())
        scale = 1000 / num if kind == "discrete" else 999

        def model(x: Tensor, t: Tensor) -> Tensor:
            return self.net(x, (t * num - 1) * scale if kind == "discrete" else t * scale)

        self.solver = DPM_Solver(model, self.schedule, predict_x0=True)

    def sampled(self, kind: type, start: Tensor, **options: object) -> Tensor:
        """Ours ends where it asks at the last time, theirs is there on its way to it."""
        solver = kind(self.steps + 1, self.ours, clip=False, **options)
        with torch.no_grad():
            denoise = module(self.net, self.process, Epsilon()).denoise_for(None)
            return solver.sample(denoise, self.process, start, None)


@torch.no_grad()
def multistep(draw: Random) -> float:
    """By its updates: the loop in `sample` stops at a variable that is not there."""
    case, start, order = Case(draw), noise(draw), draw.choice([1, 2, 3])
    x, times, outputs_before = start, [], []
    for t, after in zip(case.theirs[:-1], case.theirs[1:], strict=True):
        times = [*times, t.expand(2)][-order:]
        outputs_before = [*outputs_before, case.solver.model_fn(x, t.expand(2))][-order:]
        past = (outputs_before, times, after.expand(2), len(times))
        x = case.solver.dpm_multistep_update(x, *past, solver_type="dpm_solver")
    end = case.solver.model_fn(x, case.theirs[-1].expand(2))
    return worst((case.sampled(DPMSolverPP, start, order=order), end))


@torch.no_grad()
def singlestep(draw: Random) -> float:
    case, start = Case(draw), noise(draw)
    while isinstance(case.process, DiscreteVP):  # between whole steps the two interpolate otherwise
        case = Case(draw)
    x = start
    for t, after in zip(case.theirs[:-1], case.theirs[1:], strict=True):
        x = case.solver.dpm_solver_second_update(x, t.expand(2), after.expand(2))
    end = case.solver.model_fn(x, case.theirs[-1].expand(2))
    return worst((case.sampled(DPMSolverPP2S, start), end))


COMPARISONS = {
    "network": network,
    "loss and VP SDE": loss,
    "DPM-Solver++ multistep, orders 1 to 3": multistep,
    "DPM-Solver++ singlestep, order 2": singlestep,
}
