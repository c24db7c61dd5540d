import math

import pytest
import torch
from support.golden import PIX, U, Z, close, load, tensor
from support.tiny_diffusion import losses_of
from support.toy import EndsInNoise

from lit_diffusion.gaussian import (
    FixedLarge,
    FixedSmall,
    LearnedRange,
    expand_as,
    step_posterior,
    variational_term,
)
from lit_diffusion.losses import (
    P2,
    AsFlow,
    DenoisingLoss,
    FDMWarmup,
    HybridLoss,
    InvSNR,
    MinSNR,
    Simple,
    SoftMinSNR,
    TruncSNR,
    UncertaintyLoss,
)
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
)
from lit_diffusion.timesteps import LogNormal, Uniform

PLAIN = [Epsilon(), Sample(), Velocity(), FlowVelocity()]
SHAPE = (4, 3, 8, 8)
X0, NOISE = PIX(SHAPE, 1), Z(SHAPE, 2)
PROCESSES = {
    "linear1000": DiscreteVP(LinearBetas(1000)),
    "cosine4000": DiscreteVP(CosineBetas(4000)),
    "linear50": DiscreteVP(LinearBetas(50)),
}


def outputs(kind: str, learned: bool):
    mean = 0.9 * NOISE + U(SHAPE, 3, 0.2) if kind == "eps" else 0.9 * X0 + U(SHAPE, 4, 0.2)
    return torch.cat([mean, U(SHAPE, 5, 1.3)], 1) if learned else mean


def losses(tag, output, parameterization, loss):
    t = tensor("case02_losses", f"{tag}/t").double()
    parts = {"parameterization": parameterization, "loss": loss}
    return losses_of(output, X0, t, NOISE, process=PROCESSES[tag], **parts)


def golden(tag, case, name):
    start, end = f"{tag}/{case}_", f"/{name}_f64"
    (key,) = [k for k in load("case02_losses") if k.startswith(start) and k.endswith(end)]
    return tensor("case02_losses", key)


@pytest.mark.parametrize("tag", PROCESSES)
@pytest.mark.parametrize(("case", "kind"), [("a", "eps"), ("a2", "eps"), ("e", "x0")])
def test_denoising_loss_equals_the_reference(tag, case, kind):
    parameterization = Epsilon() if kind == "eps" else Sample()
    loss = losses(tag, outputs(kind, False), parameterization, DenoisingLoss(Simple()))
    close(loss, golden(tag, case, "mse"))
    close(loss, golden(tag, case, "loss"))


@pytest.mark.parametrize("tag", PROCESSES)
@pytest.mark.parametrize(
    ("case", "kind", "rescaled"), [("b", "eps", True), ("c", "eps", False), ("e2", "x0", True)]
)
def test_hybrid_loss_equals_the_reference(tag, case, kind, rescaled):
    vb_weight = 0.001 if rescaled else 1 / PROCESSES[tag].num_steps
    output, parameterization = outputs(kind, True), Epsilon() if kind == "eps" else Sample()
    hybrid = losses(tag, output, parameterization, HybridLoss(Simple(), vb_weight))
    denoising = losses(tag, output[:, :3], parameterization, DenoisingLoss(Simple()))
    close(hybrid, golden(tag, case, "loss"))
    close(denoising, golden(tag, case, "mse"))
    close(hybrid - denoising, golden(tag, case, "vb"))


@pytest.mark.parametrize("tag", PROCESSES)
def test_the_bound_trains_the_variance_and_never_the_mean(tag):
    output = outputs("eps", True).requires_grad_()
    loss = losses(tag, output, Epsilon(), HybridLoss(Simple()))
    (gradient,) = torch.autograd.grad(loss.sum(), output)
    close(gradient, golden(tag, "b", "grad"))
    denoising = losses(tag, output[:, :3], Epsilon(), DenoisingLoss(Simple()))
    (of_mean,) = torch.autograd.grad(denoising.sum(), output)
    close(gradient[:, :3], of_mean[:, :3])


@pytest.mark.parametrize("tag", PROCESSES)
@pytest.mark.parametrize(
    ("case", "variance", "rescaled"),
    [
        ("d", LearnedRange(), False),
        ("d2", LearnedRange(), True),
        ("d3", FixedLarge(), False),
        ("d4", FixedSmall(), True),
    ],
)
def test_terms_of_the_bound_equal_the_reference(tag, case, variance, rescaled):
    process, t = PROCESSES[tag], tensor("case02_losses", f"{tag}/t").double()
    step = step_posterior(process, t)
    output, r = outputs("eps", True).chunk(2, 1)
    alpha, sigma = (expand_as(v, X0) for v in process.alpha_sigma(t))
    x_t = alpha * X0 + sigma * NOISE
    log_variance = variance.log_variance(
        expand_as(step.log_beta, X0),
        expand_as(step.log_variance, X0),
        step.last.reshape(-1, 1, 1, 1),
        (r + 1) / 2,
    )
    x0_hat = Epsilon().to_x0(output, x_t, alpha, sigma)
    term = variational_term(step, X0, x_t, x0_hat, log_variance)
    close(term * (process.num_steps if rescaled else 1), golden(tag, case, "loss"))


@pytest.mark.parametrize(
    ("tag", "betas"), [("linear1000", LinearBetas), ("cosine1000", CosineBetas)]
)
@pytest.mark.parametrize(
    ("key", "weighting", "parameterization"),
    [
        ("min_snr_5_eps", MinSNR(), Epsilon()),
        ("min_snr_5_x0", MinSNR(), Sample()),
        ("vmin_snr_5_v", MinSNR(), Velocity()),
        ("trunc_snr_x0", TruncSNR(), Sample()),
        ("p2_k1_gamma0.5_FORMULA", P2(0.5), Epsilon()),
        ("p2_k1_gamma1.0_FORMULA", P2(1.0), Epsilon()),
    ],
)
def test_weights_equal_the_reference_at_every_time(tag, betas, key, weighting, parameterization):
    assert f"{tag}/{key}" in load("case10_weights")
    alpha, sigma = DiscreteVP(betas(1000)).alpha_sigma(torch.arange(1000.0, dtype=torch.float64))
    weight = weighting.weight(alpha, sigma, parameterization.output_scale(alpha, sigma), None)
    close(weight, tensor("case10_weights", f"{tag}/{key}"), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "parameterization"), [("eps", Epsilon()), ("x0", Sample()), ("v", Velocity())]
)
@pytest.mark.parametrize("betas", [LinearBetas, CosineBetas])
def test_weighted_losses_equal_min_snr_training(kind, parameterization, betas):
    tag = {LinearBetas: "linear1000", CosineBetas: "cosine1000"}[betas]
    parts = {"process": DiscreteVP(betas(1000)), "parameterization": parameterization}
    t = torch.tensor([0, 10, 500, 999], dtype=torch.float64)
    for weighting, name in ((Simple(), "mse_raw"), (MinSNR(), "mse_weighted")):
        loss = losses_of(Z(SHAPE, 902, 0.7), X0, t, NOISE, **parts, loss=DenoisingLoss(weighting))
        close(loss, tensor("case10_weights", f"{tag}/loss_{kind}/{name}"))


@pytest.mark.parametrize(
    "process", [DiscreteVP(CosineBetas(1000)), ContinuousVP(), EDMProcess()], ids=repr
)
@pytest.mark.parametrize(
    "weighting",
    [MinSNR(), SoftMinSNR(), TruncSNR(), InvSNR(), AsFlow(), P2(0.5), FDMWarmup(MinSNR(), 10)],
    ids=repr,
)
def test_matched_outputs_get_the_same_loss_in_every_parameterization(weighting, process):
    """The x0 errors agree, so one x0-space weight must give one loss."""
    t = process.from_unit(torch.arange(0, 1, 0.007, dtype=torch.float64))
    shape = (len(t), 1, 2, 2)
    x0, noise, x0_hat = PIX(shape, 1), Z(shape, 2), PIX(shape, 3)
    alpha, sigma = (expand_as(v, x0) for v in process.alpha_sigma(t))
    x_t = alpha * x0 + sigma * noise
    noise_hat = (x_t - alpha * x0_hat) / sigma
    parts, losses = {"process": process, "loss": DenoisingLoss(weighting), "step": 3}, []
    for p in (*PLAIN, EDMPreconditioning(), FDM(Velocity(), 0.002, 80.0)):
        output = p.target(x0_hat, noise_hat, alpha, sigma)
        losses.append(losses_of(output, x0, t, noise, parameterization=p, **parts))
    for loss in losses[1:]:
        close(loss, losses[0], rtol=1e-9)


def test_weights_are_those_of_their_papers_in_their_own_terms():
    sigma, one = torch.logspace(-3, 3, 50, dtype=torch.float64), torch.ones(50).double()
    edm = EDMPreconditioning(sigma_data=0.5)
    soft = SoftMinSNR(gamma=4.0).weight(one, sigma, edm.output_scale(one, sigma), None)
    close(soft, (0.5 * sigma / (sigma**2 + 0.25)) ** 2)  # k-diffusion's
    close(InvSNR().weight(one, sigma, one, None), sigma**2)
    t = torch.linspace(0.05, 0.95, 50, dtype=torch.float64)
    close(AsFlow().weight(1 - t, t, FlowVelocity().output_scale(1 - t, t), None), one)
    close(AsFlow(0.05).weight(one, t / 50, one, None), (0.05 * one) ** -2)


def build(process, loss):
    x = torch.zeros(1, loss.output_factor, 2, 2)
    parts = {"process": process, "parameterization": Velocity(), "loss": loss}
    return losses_of(x, x[:, :1], torch.zeros(1), x[:, :1], **parts)


INFINITE, NOTHING = "finite at every noise level", r"must be >= 0, and > 0 .*; change its arg"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build(EndsInNoise(), DenoisingLoss(InvSNR())), INFINITE),
        (lambda: build(EndsInNoise(), UncertaintyLoss(InvSNR())), INFINITE),
        (lambda: build(EndsInNoise(), HybridLoss(InvSNR())), INFINITE),
        (lambda: build(EDMProcess(), DenoisingLoss(MinSNR(-5.0))), NOTHING),
        (lambda: build(EDMProcess(), DenoisingLoss(SoftMinSNR(0.0))), NOTHING),
        (lambda: build(EDMProcess(), DenoisingLoss(P2(1.0, k=-0.5))), NOTHING),
        (lambda: build(ContinuousVP(), HybridLoss(Simple())), "discrete steps, .*; use DiscreteVP"),
        (lambda: HybridLoss(Simple(), 0.0), "vb_weight must be > 0, got 0.0"),
        (lambda: HybridLoss(Simple(), math.nan), "vb_weight must be > 0, got nan"),
        (lambda: UncertaintyLoss(Simple(), 0), "num_features must be at least 1, got 0"),
        (lambda: FDMWarmup(Simple(), 0), "warmup_steps must be at least 1, got 0"),
    ],
)
def test_losses_without_meaning_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_min_snr_in_pure_noise_is_zero_or_what_is_asked():
    alpha, sigma = torch.zeros(1), torch.ones(1)
    scale = Velocity().output_scale(alpha, sigma)
    assert MinSNR().weight(alpha, sigma, scale, None) == 0
    assert MinSNR(zero_snr_weight=1.0).weight(alpha, sigma, scale, None) == 1


# process, training times, parameterization, sign of the golden network's output, stream of ranks:
# the reference's VP counts from the noisiest time.
EDM_FAMILY = {
    "edm": (EDMProcess(), LogNormal(), EDMPreconditioning(), 1, torch.special.ndtr),
    "vp": (ContinuousVP(), Uniform(), Epsilon(), 1, lambda uniform: 1 - uniform),
    "ve": (EDMProcess(0.02, 100.0), Uniform(), Epsilon(), -1, lambda uniform: uniform),
}


def edm_times(kind, random):
    process, times, _, _, ranks = EDM_FAMILY[kind]
    return times.quantile(ranks(random), process)


@pytest.mark.parametrize("kind", EDM_FAMILY)
def test_plain_denoising_is_the_weighted_loss_of_edm(kind):
    process, _, parameterization, sign, _ = EDM_FAMILY[kind]
    t = edm_times(
        kind, tensor("case07_edm", f"loss/rnd_{'normal' if kind == 'edm' else 'uniform'}")
    )
    x0, noise = PIX((4, 3, 4, 4), 801), Z((4, 3, 4, 4), 802)
    alpha, sigma = (expand_as(v, x0) for v in process.alpha_sigma(t))
    x_t = alpha * x0 + sigma * noise
    network_input = parameterization.network_input(x_t, alpha, sigma)
    label = expand_as(process.noise_label(t), x0)
    label = 4 * label - torch.log(torch.tensor(2.0).double()) if kind == "ve" else label
    output = sign * (
        0.5 * network_input + 0.2 * torch.sin(label) + 0.1 * torch.tanh(2 * network_input)
    )
    parts = {"process": process, "parameterization": parameterization}
    loss = losses_of(output, x0, t, noise, **parts, loss=DenoisingLoss(Simple()))
    close(loss, tensor("case07_edm", f"loss/{kind}_f64").flatten(1).mean(1))


@pytest.mark.parametrize("kind", EDM_FAMILY)
@pytest.mark.parametrize("warmup_steps", [10, 200, 400, 800])
def test_warm_up_equals_fdm_by_its_count_of_calls(kind, warmup_steps):
    """But for call K = 200: the reference's bound is a rounding error short of its end there."""
    case, key = "case08_fdm", f"clamp/{kind}_K{warmup_steps}"
    process, _, parameterization, _, _ = EDM_FAMILY[kind]
    weighting = FDMWarmup(Simple(), warmup_steps)
    bounds = torch.tensor([weighting.bound(k) for k in range(warmup_steps)])
    close(bounds, tensor(case, f"{key}/clamp_value")[:warmup_steps])
    assert int(load(case)[f"{key}/n_clamped_calls"]) - warmup_steps in (0, 1)
    assert weighting.bound(warmup_steps) == weighting.bound(None) == torch.inf
    if warmup_steps > 200:
        return  # weights are not stored
    alpha, sigma = process.alpha_sigma(edm_times(kind, tensor(case, f"{key}/rnd")))
    scale = parameterization.output_scale(alpha, sigma)
    for k, expected in enumerate(tensor(case, f"{key}/weights_f64")):
        if k != 200:
            close(weighting.weight(alpha, sigma, scale, k), expected * scale**2)


def two_levels(n, generator, loss):
    """Losses of a network whose errors have a variance of 4 at one noise level, 0.01 at another."""
    t = torch.tensor([100.0, 900.0]).double().repeat(n)
    scale = torch.tensor([2.0, 0.1]).double().repeat(n).reshape(-1, 1, 1, 1)
    noise = torch.randn(2 * n, 1, 4, 4, generator=generator, dtype=torch.float64)
    output = noise + scale * torch.randn(noise.shape, generator=generator, dtype=torch.float64)
    parts = {"process": DiscreteVP(CosineBetas(1000)), "parameterization": Epsilon()}
    return losses_of(output, torch.zeros_like(noise), t, noise, **parts, loss=loss)


@pytest.mark.slow
def test_learned_uncertainty_begins_as_the_plain_loss_and_ends_at_the_log_of_the_error():
    loss = UncertaintyLoss(Simple())
    first, plain = (
        two_levels(64, torch.Generator().manual_seed(0), each)
        for each in (loss, DenoisingLoss(Simple()))
    )
    close(first, plain)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        two_levels(64, generator, loss).mean().backward()
        optimizer.step()
    alpha, sigma = DiscreteVP(CosineBetas(1000)).alpha_sigma(torch.tensor([100.0, 900.0]))
    close(loss.uncertainty(alpha, sigma), torch.tensor([4.0, 0.01]).log(), rtol=0, atol=0.1)


def test_uncertainty_is_finite_in_pure_noise_and_its_features_are_those_of_every_run():
    first, second = UncertaintyLoss(Simple()), UncertaintyLoss(Simple())
    assert torch.equal(first.frequencies, second.frequencies)
    torch.nn.init.ones_(first.log_variance)
    alpha, sigma = LinearFlow().alpha_sigma(torch.tensor([0.5, 1.0]))
    assert first.uncertainty(alpha, sigma).isfinite().all()
