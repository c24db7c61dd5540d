import warnings
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision
from support.plain_module import make_trainer
from support.spawn import spawn
from support.tiny_diffusion import NUM_CLASSES, images, tiny_diffusion
from support.toy import EndsInNoise
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.callbacks import FIDEvaluation
from lit_diffusion.cli.loggers import AppendingCSVLogger, read_rows
from lit_diffusion.data.digits import Digits
from lit_diffusion.gaussian import FixedSmall, LearnedRange
from lit_diffusion.grids import Even, LogSNR, Sections
from lit_diffusion.guidance import Autoguidance, ClassifierFree, ClassifierScore, ClassifierShift
from lit_diffusion.losses import DenoisingLoss, FDMWarmup, HybridLoss, Simple
from lit_diffusion.lr_schedules import WarmupLinear
from lit_diffusion.networks.unet import UNet
from lit_diffusion.parameterizations import FDM, Epsilon, Velocity
from lit_diffusion.processes import CosineBetas, DiscreteVP, LinearFlow
from lit_diffusion.protocols import NonFiniteSamples
from lit_diffusion.solvers import DDIM, DDPM, DPMSolverPP, Heun
from lit_diffusion.timesteps import Antithetic, Independent, Stratified, bin_of

SMALL = {"model_channels": 8, "channel_mult": (1,), "num_res_blocks": 1}
SMALL |= {"attention_downsample": (), "num_heads": 1, "norm_groups": 4}


def unet(out_channels=1, dropout=0.0):
    torch.manual_seed(0)
    network = UNet(1, out_channels, **SMALL, num_classes=NUM_CLASSES, dropout=dropout)
    for parameter in network.parameters():  # zero-initialised layers would hide everything
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return network


def module(network=None, **changes):
    return tiny_diffusion(**{"network": network or unet(), **changes})


def loader(batch_size=6, n=24):
    return images(n, batch_size)


trainer = partial(
    Trainer,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)


class Function(nn.Module):
    """A function of (images, noise labels, labels) as a network."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


# Sampling


@pytest.mark.parametrize(
    "changes", [{"solver": DDPM(FixedSmall(), 4)}, {"guidance": ClassifierFree(2.0)}], ids=str
)
def test_a_sample_depends_on_its_seed_and_label_alone(changes):
    model = module(**changes)
    together = model.generate(range(5))
    assert together.dtype == torch.uint8
    assert together.shape == (5, 1, 8, 8)
    alone = torch.cat([model.generate([seed]) for seed in reversed(range(5))]).flip(0)
    chunks = torch.cat([model.generate(range(2)), model.generate(range(2, 5))])
    # Convolutions sum in another order for another batch size: at most one grey level of 256.
    assert (together.int() - alone.int()).abs().max() <= 1
    assert (together.int() - chunks.int()).abs().max() <= 1
    assert (together[0] != together[4]).any()


def test_sampling_leaves_modes_and_the_random_state_alone():
    model = module(unet(dropout=0.5), solver=DDIM(3, eta=1.0)).train()
    model.network.input_blocks[0].eval()
    before = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    images = model.generate([1])
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == before
    assert torch.equal(images, model.eval().generate([1]))  # no dropout either way


def test_a_weaker_model_in_training_mode_guides_without_dropout():
    weaker = module(unet(dropout=0.5)).train()
    model = module(guidance=Autoguidance(weaker.denoise_for))
    assert torch.equal(model.generate([1]), model.generate([1]))
    assert all(m.training for m in weaker.modules())


def test_learned_variances_reach_the_solver():
    hybrid = module(unet(2), loss=HybridLoss(Simple()), solver=DDPM(LearnedRange(), 4))
    fixed = module(hybrid.network, loss=HybridLoss(Simple()), solver=DDPM(FixedSmall(), 4))
    assert not torch.equal(hybrid.generate([0]), fixed.generate([0]))


@pytest.mark.parametrize(
    ("solver", "value"),
    [
        (DDIM(5), torch.nan),
        (DDPM(FixedSmall(), 5), torch.inf),
        (DPMSolverPP(5, Sections()), -torch.inf),
    ],
)
def test_samples_that_are_not_finite_are_named_and_never_images(solver, value):
    def poisoned(x, noise_label, labels):
        bad = (labels == 2) & (noise_label < 60)
        return torch.where(bad.view(-1, 1, 1, 1), value, x)

    model = module(Function(poisoned), solver=solver)
    with pytest.raises(NonFiniteSamples, match=r"2 samples are not finite, from t = 50") as error:
        model.generate(range(8))
    assert error.value.seeds == [2, 5]
    assert len(model.generate([0, 1, 3])) == 3


def test_predictions_are_samples_of_the_given_seeds_and_labels():
    model, labels = module(), torch.tensor([1, 2, 0, 1, 2])
    seeds = DataLoader(TensorDataset(torch.arange(5), labels), batch_size=2)
    images = torch.cat(trainer().predict(model, seeds)).int()
    assert (images - model.generate(range(5), labels).int()).abs().max() <= 1
    assert (images - model.generate(range(5)).int()).abs().max() > 1


# Loss


def test_the_loss_is_a_function_of_its_arguments():
    model, (pixels, labels, _) = module(), loader().dataset.tensors
    x0 = model.codec.encode(pixels)
    t, noise = torch.arange(24.0).double() * 4, torch.randn_like(x0)
    losses = model.per_sample_loss(x0, labels, t, noise)
    assert losses.shape == (24,)
    assert torch.equal(losses, model.per_sample_loss(x0, labels, t, noise))
    half = model.per_sample_loss(x0[:12], labels[:12], t[:12], noise[:12])
    torch.testing.assert_close(half, losses[:12])


class CountedVP(DiscreteVP):
    num_calls = 0

    def alpha_sigma(self, t):
        self.num_calls += 1
        return super().alpha_sigma(t)


def test_a_learned_variance_asks_for_alpha_and_sigma_once_in_a_step():
    process = CountedVP(CosineBetas(100))
    model = module(unet(out_channels=2), process=process, loss=HybridLoss(Simple()))
    x0, noise = torch.randn(2, 4, 1, 8, 8)
    num_calls, process.num_calls = [], 0
    for _ in range(3):
        model.per_sample_loss(x0, None, torch.arange(4.0).double(), noise)
        num_calls.append(process.num_calls)
    assert num_calls == [2, 3, 4]  # in the first step also for the table of posteriors


def test_the_value_of_validation_does_not_depend_on_batches_or_the_random_state():
    values = []
    for batch_size, seed in [(8, 0), (3, 1), (1, 2)]:
        torch.manual_seed(seed)
        (result,) = trainer().validate(module(), loader(batch_size, 8), verbose=False)
        values.append(result["val/loss"])
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)


def test_the_value_of_validation_is_summed_in_float64_also_in_bfloat16():
    half, values = module(Function(lambda x, t, labels: x / 2)), []
    for batch_size in (1, 300):  # bfloat16 counts to 256
        run = trainer(precision="bf16-true")
        (result,) = run.validate(half, loader(batch_size, 300), verbose=False)
        values.append(result["val/loss"])
    assert values[0] == pytest.approx(values[1], rel=0.01)  # bfloat16 in the network, not the sum


def test_a_validation_loss_that_is_not_finite_is_not_left_out():
    broken = Function(lambda x, t, labels: x.where((labels != 2).view(-1, 1, 1, 1), torch.nan))
    (result,) = trainer().validate(module(broken), loader(), verbose=False)
    assert np.isnan(result["val/loss"])


def test_validation_shares_no_noise_with_samples():
    sampled, validated = [], []
    recording = Function(lambda x, t, labels: sampled.append(x.clone()) or x)
    model = module(recording, solver=DDIM(1))
    model.generate([0])
    model.per_sample_loss = lambda x0, *rest: validated.append(rest[2]) or torch.zeros(len(x0))
    trainer().validate(model, loader(1, 1), verbose=False)
    assert sampled[0].shape == validated[0].shape
    assert not torch.allclose(validated[0], sampled[0], atol=1e-3)


def test_the_network_is_told_whole_times_in_bfloat16():
    times = []
    recording = Function(lambda x, t, labels: times.append(t.item()) or x)
    model = module(recording, process=DiscreteVP(CosineBetas(1000)), solver=DDIM(2))
    model.bfloat16().generate([0])
    assert times == [999, 0]


def test_validation_is_without_the_curriculum_and_the_warm_up_of_a_weighting():
    model, warming = module(), module(loss=DenoisingLoss(FDMWarmup(Simple(), 1000)))
    plain = trainer().validate(model, loader(), verbose=False)
    model.timestep_density, model.timestep_weight = torch.tensor([0.0, 1.0]), torch.tensor([0, 9.0])
    assert trainer().validate(model, loader(), verbose=False) == plain
    assert trainer().validate(warming, loader(), verbose=False) == plain
    x0, t = torch.ones(1, 1, 8, 8), torch.zeros(1, dtype=torch.float64)
    early = warming.per_sample_loss(x0, None, t, x0, step=0)
    assert early < 0.1 * model.per_sample_loss(x0, None, t, x0, step=0)


def one_step(model):
    model.trainer = trainer()
    model.log = model.log_dict = lambda *_, **__: None
    return model.training_step(loader().dataset.tensors, 0)


def test_training_times_follow_the_density_and_losses_the_weight():
    torch.manual_seed(1)
    model = module()
    model.timestep_density = torch.tensor([0.0, 1.0, 0.0, 3.0])
    out = one_step(model)
    assert np.bincount(bin_of(out["u"], 4), minlength=4).tolist() == [0, 6, 0, 18]
    model.timestep_weight = torch.tensor([0.0, 2.0, 0.0, 0.5])
    out = one_step(model)
    weight = model.timestep_weight[bin_of(out["u"], 4)]
    torch.testing.assert_close(out["loss"].detach(), (out["per_sample_loss"] * weight).mean())
    assert not out["per_sample_loss"].requires_grad


@pytest.mark.parametrize("draws", [None, Stratified(), Independent(), Antithetic()])
def test_times_are_drawn_as_asked_and_stratified_by_default(draws):
    torch.manual_seed(0)
    u = one_step(module(uniforms=draws))["u"]
    strata = len(set((u * len(u)).long().tolist()))
    assert (strata == len(u)) == (draws in (None, Stratified()))
    mirrored = torch.allclose(u[: len(u) // 2] + u[len(u) // 2 :], torch.ones(()).double())
    assert mirrored == (draws == Antithetic())


def test_frozen_parameters_stay_out_of_the_optimizer():
    model = module()
    model.network.label_emb.requires_grad_(False)
    held = {p for group in model.configure_optimizers().param_groups for p in group["params"]}
    assert held == {p for p in model.parameters() if p.requires_grad}
    assert model.network.label_emb.weight not in held


def conditions_of(model, labels):
    """What the network is conditioned on in a training step on these labels."""
    conditions = []
    model.per_sample_loss = lambda x0, condition, *_: conditions.append(condition) or x0.mean()
    model._log_training = lambda *_: None
    model._trainer = trainer()
    model.training_step((torch.zeros(len(labels), 1, 8, 8, dtype=torch.uint8), labels, labels), 0)
    return conditions[0]


def test_the_right_share_of_labels_is_dropped():
    torch.manual_seed(0)
    labels = torch.arange(4).repeat(5000) % NUM_CLASSES
    dropped = conditions_of(module(), labels)
    assert torch.equal(dropped[dropped >= 0], labels[dropped >= 0])
    assert (dropped < 0).double().mean().item() == pytest.approx(0.2, abs=4 * (0.16 / 20000) ** 0.5)
    assert torch.equal(conditions_of(module(label_dropout=0.0), labels), labels)
    unconditional = module(nn.Identity(), num_classes=None, label_dropout=0.0)
    assert conditions_of(unconditional, labels) is None


# Training


def outputs_of(run, model, batches):
    outputs, training_step = [], model.training_step
    model.training_step = lambda *args: outputs.append(training_step(*args)) or outputs[-1]
    run.fit(model, batches)
    return outputs


def losses_of(*args):
    return [output["loss"].item() for output in outputs_of(*args)]


class Norms(Callback):
    def __init__(self):
        self.norms, self.rates = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad.flatten() for p in pl_module.parameters()]
        self.norms.append(torch.cat(gradients).double().norm().item())
        self.rates.append(optimizer.param_groups[0]["lr"])


def test_loggers_get_losses_by_quartile_of_noise_levels_lr_and_norm_before_clipping(tmp_path):
    logger, norms = AppendingCSVLogger(tmp_path), Norms()
    model = module(lr_scheduler=lambda optimizer: WarmupLinear(optimizer, 2))
    options = {"logger": logger, "log_every_n_steps": 2, "gradient_clip_val": 1e-3}
    outputs = outputs_of(trainer(max_steps=4, callbacks=[norms], **options), model, loader(12))
    rows = read_rows(logger.path)
    assert [row["step"] for row in rows] == ["1", "3"]
    for row, out in zip(rows, outputs[1::2], strict=True):
        for i in range(4):
            losses = out["per_sample_loss"][bin_of(out["u"], 4) == i]
            assert float(row[f"train/loss_q{i}"]) == pytest.approx(losses.mean().item(), rel=1e-5)
    assert [float(row["train/grad_norm"]) for row in rows] == pytest.approx(norms.norms[1::2])
    assert [float(row["train/lr"]) for row in rows] == pytest.approx(norms.rates[1::2])
    assert min(norms.norms) > 1e-3


def test_the_norm_of_the_gradient_is_without_the_scale_of_the_loss(tmp_path):
    def norms(folder, fused, **options):
        logger = AppendingCSVLogger(folder)
        model = module(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, fused=fused))
        trainer(max_steps=2, logger=logger, log_every_n_steps=1, **options).fit(model, loader(12))
        return [float(row["train/grad_norm"]) for row in read_rows(logger.path)]

    expected = pytest.approx(norms(tmp_path / "plain", False), rel=0.05)  # of float16
    for fused in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        assert norms(tmp_path / f"{fused}", fused, plugins=plugins) == expected


def test_a_step_draws_the_same_noise_whatever_came_before(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    first = losses_of(trainer(max_steps=3), module(), loader(12))
    torch.rand(5)
    assert losses_of(trainer(max_steps=3), module(), loader(12)) == first
    monkeypatch.setenv("PL_GLOBAL_SEED", "8")
    assert losses_of(trainer(max_steps=3), module(), loader(12)) != first


def test_validation_during_training_does_not_change_training():
    a, b = module(), module()
    trainer(max_steps=4, val_check_interval=1).fit(a, loader(8), loader())
    trainer(max_steps=4, limit_val_batches=0).fit(b, loader(8))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def train_on_rank(folder):
    """(times and noise of each step, sums of the weights at the end) of this rank."""
    model = tiny_diffusion()
    original, steps = model.per_sample_loss, []

    def per_sample_loss(x0, condition, t, noise, step=None):
        steps.append((*t.tolist(), noise.double().sum().item()))
        return original(x0, condition, t, noise, step)

    model.per_sample_loss = per_sample_loss
    make_trainer(folder, devices=2, strategy="ddp", max_epochs=1).fit(model, images(32, 4))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    return steps, [weights.sum().item(), weights.square().sum().item()]


@pytest.mark.system
def test_two_ranks_draw_different_times_and_noise_and_end_with_the_same_weights(tmp_path):
    (steps, weights), (other_steps, other_weights) = spawn(train_on_rank, 2, tmp_path)
    assert len({*steps, *other_steps}) == 8
    assert weights == other_weights


def test_accumulated_batches_of_a_step_draw_different_noise():
    first = losses_of(trainer(max_steps=2, accumulate_grad_batches=2), module(), loader())
    assert len(set(first)) == 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedules_count_optimizer_steps_and_take_their_length_from_the_trainer(accumulate):
    model = module(lr_scheduler=lambda optimizer: WarmupLinear(optimizer, warmup_steps=2))
    norms = Norms()
    trainer(max_steps=6, accumulate_grad_batches=accumulate, callbacks=[norms]).fit(model, loader())
    assert norms.rates == pytest.approx([1e-2 * f for f in (0.5, 1.0, 1.0, 0.75, 0.5, 0.25)])


def test_a_schedule_without_an_end_is_refused():
    model = module(lr_scheduler=lambda optimizer: WarmupLinear(optimizer, warmup_steps=2))
    with pytest.raises(ValueError, match="pass max_steps to the Trainer"):
        trainer(max_steps=-1, max_epochs=-1).fit(model, loader())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_training_works_in_other_precisions(precision):
    model = module()
    losses = losses_of(trainer(max_steps=2, precision=precision), model, loader())
    assert np.isfinite(losses).all()
    assert model.generate([0]).shape == (1, 1, 8, 8)


@pytest.mark.gpu
def test_training_works_with_dynamic_loss_scaling():
    fp16 = trainer(max_steps=8, precision="16-mixed", accelerator="gpu", devices=1)
    assert np.isfinite(losses_of(fp16, module(), loader())).all()


# Bad input


PURE_NOISE = {"process": EndsInNoise()}
CLASSIFIER = PURE_NOISE | {"guidance": ClassifierScore(None)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_dropout": 1.0}, r"label_dropout must be in \[0, 1\), got 1.0"),
        ({"num_classes": None}, "need labels; pass num_classes"),
        ({"solver": DDPM(LearnedRange(), 5)}, "needs a learned variance.*use HybridLoss"),
        ({"solver": DDPM(FixedSmall(), 200)}, "100 times can't be split into 200 steps"),
        ({"guidance": ClassifierShift(None)}, "shifts the mean of DDPM's.*use ClassifierScore"),
        (CLASSIFIER | {"solver": DDIM(5)}, "starts at alpha = 0 .*LogSNR.noisiest=-10"),
        (PURE_NOISE | {"parameterization": Epsilon()}, "SNR = 0.*use Velocity"),
        (PURE_NOISE | {"parameterization": FDM(Velocity(), 0.002, 80.0)}, "SNR = 0.*use Velocity"),
        ({"num_classes": 7}, "num_classes is 7 in the module, but 3 in UNet"),
        ({"image_shape": (3, 8, 8)}, "in the module, but in_channels is 1 in UNet"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        module(**changes)
    module(**CLASSIFIER, solver=DDIM(5, times=LogSNR(noisiest=-10.0)))


@pytest.mark.parametrize("solver", [Heun(times=Even()), DDIM(times=Sections())], ids=repr)
def test_a_solver_that_does_not_fit_the_process_is_named_with_it(solver):
    with pytest.raises(ValueError, match=f"^{type(solver).__name__} does not fit LinearFlow: "):
        module(process=LinearFlow(), solver=solver)


def test_batches_of_another_kind_are_refused():
    images, labels, index = loader().dataset.tensors
    for parts, message in (
        ((images, labels), r"got \(torch.uint8 \(6, 1, 8, 8\), torch.int64 \(6,\)\)"),
        ((images, labels + 1, index), r"labels must be 0..2 or -1, got \[1, 2, 3\]"),
    ):
        run = trainer(max_steps=1)
        with pytest.raises(ValueError, match=message):
            run.fit(module(), DataLoader(TensorDataset(*parts), 6))
        assert run.global_step == 0


def test_data_of_another_kind_are_refused_before_the_first_step():
    with pytest.raises(ValueError, match="num_classes is 3 in the module, but 10 in Digits"):
        trainer(max_steps=1).fit(module(), Digits())


def test_guidance_towards_labels_that_were_never_dropped_is_said():
    with pytest.warns(UserWarning, match="never trained with label_dropout=0"):
        module(label_dropout=0.0, guidance=ClassifierFree(2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(guidance=ClassifierFree(2.0))
        module(label_dropout=0.0, guidance=ClassifierFree(1.0))  # the conditional prediction alone
        module(label_dropout=0.0, guidance=ClassifierScore(None))


def test_a_network_with_the_wrong_number_of_outputs_is_refused():
    with pytest.raises(ValueError, match=r"HybridLoss needs a network output of .* out_channels"):
        trainer(max_steps=1).fit(module(loss=HybridLoss(Simple())), loader())


class WithTest(Digits):
    tests_on = "test"

    def load(self, split):
        return super().load("val" if split == "test" else split)


@pytest.mark.filterwarnings("ignore:16 images cannot fill a covariance")
@pytest.mark.parametrize(("data", "split"), [(Digits, "val"), (WithTest, "test")])
def test_what_is_tested_on_is_in_the_names_of_the_metrics(tmp_path, data, split):
    fid = FIDEvaluation(16, extractor="digits-cnn", batch_size=16, weights="raw")
    run = trainer(callbacks=[fid], default_root_dir=tmp_path, limit_test_batches=1)
    model = module(UNet(1, 1, **SMALL), num_classes=None, label_dropout=0)
    (metrics,) = run.test(model, data(batch_size=6), verbose=False)
    assert metrics.keys() == {f"{split}/loss", f"{split}/fid_16_raw", f"{split}/fid_16_raw_floor"}


# Editing


def test_an_edited_image_depends_on_its_own_seed_and_image_alone_and_on_little_strength_little():
    trained, images = module(solver=DPMSolverPP(10)), loader(n=4).dataset.tensors[0]
    edited = trained.edit(images, range(4), strength=0.5)
    assert torch.equal(edited[2:3], trained.edit(images[2:3], [2], strength=0.5))
    assert not torch.equal(edited[2:3], trained.edit(images[1:2], [2], strength=0.5))
    # a step from where there is hardly any noise
    little = trained.edit(images, range(4), strength=0.1).float() - images
    assert little.abs().mean() < 0.3 * (edited.float() - images).abs().mean()


def test_an_inpainted_image_keeps_what_is_masked_to_the_last_bit():
    trained, images = module(solver=DDIM(4)), loader(n=4).dataset.tensors[0]
    mask = torch.zeros(1, 1, 8, 8)
    mask[..., :3] = 1
    inpainted = trained.inpaint(images, mask, range(4), resamples=2)
    assert torch.equal(inpainted[..., :3], images[..., :3])
    assert (inpainted[..., 3:] != images[..., 3:]).float().mean() > 0.5
    assert torch.equal(inpainted[1:2], trained.inpaint(images[1:2], mask, [1], resamples=2))


def test_a_mask_of_each_image_without_an_axis_of_channels_is_refused():
    color = UNet(3, 3, **SMALL, num_classes=NUM_CLASSES)
    trained, pixels = module(color, image_shape=(3, 8, 8)), torch.zeros(3, 3, 8, 8).byte()
    mask = torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1).expand(3, 8, 8)
    with pytest.raises(ValueError, match=r"got \(3, 8, 8\); pass mask\[:, None\]"):
        trained.inpaint(pixels, mask, range(3), resamples=1)
    inpainted = trained.inpaint(pixels, mask[:, None], range(3), resamples=1)
    assert inpainted.flatten(1).any(1).tolist() == [True, False, True]


def test_inpainting_leaves_out_no_classifier():
    """RePaint has steps of its own, to which a shift would not be added."""
    shifted = module(solver=DDPM(FixedSmall(), 4), guidance=ClassifierShift(None))
    images = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"shifts the mean of DDPM's steps, and RePaint.*Score"):
        shifted.inpaint(images, torch.zeros(1, 1, 8, 8), [0])


# Coupling and auxiliary loss


class Reversed:
    """A coupling that reverses the noise, and an auxiliary loss that keeps its arguments."""

    def couple(self, x0, noise, condition, /):
        self.given = x0, noise, condition
        return noise.flip(0)

    def attach(self, network, /):
        self.network = network

    def compute(self, module, batch, /):
        self.module, self.batch = module, batch
        return 3 * module.network.out[2].bias.sum()


def test_noise_is_coupled_before_labels_are_dropped():
    coupling, calls = Reversed(), []
    model = module(coupling=coupling, label_dropout=0.999)
    model.per_sample_loss = lambda *args: calls.append(args) or args[0].flatten(1).mean(1)
    one_step(model)
    (x0, condition, _, noise, _), (x0_given, noise_given, labels) = calls[0], coupling.given
    assert torch.equal(noise, noise_given.flip(0))
    assert torch.equal(x0, x0_given)
    assert (condition == -1).all()
    assert (labels >= 0).all()


def test_an_auxiliary_loss_is_added_to_the_loss_alone():
    torch.manual_seed(0)
    extra = Reversed()
    model = module(auxiliary_loss=extra)
    nn.init.constant_(model.network.out[2].bias, 0.5)
    out = one_step(model)
    assert extra.network is model.network
    assert extra.module is model
    losses = model.per_sample_loss(*extra.batch[:4]).detach()
    torch.testing.assert_close(out["per_sample_loss"], losses)
    torch.testing.assert_close(out["loss"].detach(), losses.mean() + 1.5)
    with_term, plain = module(model.network, auxiliary_loss=extra), module(model.network)
    validated = trainer().validate(with_term, loader(), verbose=False)
    assert validated == trainer().validate(plain, loader(), verbose=False)


def test_the_weights_of_an_auxiliary_loss_are_trained_and_saved():
    class Scaled(nn.Linear):
        def attach(self, network, /):
            pass

        def compute(self, module, batch, /):
            return self(batch.x0.flatten(1)[:, :2]).square().mean()

    model = module(auxiliary_loss=Scaled(2, 1))
    before = model.auxiliary_loss.weight.detach().clone()
    run = trainer(max_steps=1, log_every_n_steps=1)
    run.fit(model, loader())
    assert not torch.equal(model.auxiliary_loss.weight, before)
    assert "auxiliary_loss.weight" in model.state_dict()
    assert "train/auxiliary_loss" in run.callback_metrics
