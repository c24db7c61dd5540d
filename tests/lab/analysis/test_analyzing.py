import copy
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.commands import SCRIPT, call
from support.small_digits import write_small_digits
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_diffusion.checkpoints.loading import load
from lit_diffusion.data.digits import Digits
from lit_diffusion.lab.analysis.analyzing import _fingerprint
from lit_diffusion.lab.analysis.fixed_losses import fixed_batch
from lit_diffusion.lab.analysis.landscape import directions, filter_normalised
from lit_diffusion.lab.analysis.weights import between, exact_spectral_norms_, put_, state_of
from lit_diffusion.metrics.image_distances import psnr
from lit_diffusion.networks.unet import UNet
from lit_diffusion.seeding import PerSampleNoise

A, B = "a/checkpoints/last.ckpt", "b/checkpoints/last.ckpt"


@pytest.fixture(autouse=True)
def runs(folder):
    """Two of the same architecture, b with other weights."""
    for path in (A, B):
        write_small_digits(Path(path))
        Path(path).parents[1].joinpath("evaluations.jsonl").write_text(
            json.dumps({"protocol": "digits-cnn", "step": 9}) + "\n"
        )
    content = torch.load(B, weights_only=True)
    content["state_dict"] = {n: v * 1.2 for n, v in content["state_dict"].items()}
    torch.save(content, B)


def analyze(command, out="out"):
    return call(f"analyze {command} --out {out}")


def kept(name, out="out"):
    return json.loads(Path(out, f"{name}.json").read_text())


def loss_at(module, u, num):
    """As the command fixes it: images evenly over the training set, noise by their places."""
    data = Digits().dataset("train")
    index = [i * len(data) // num for i in range(num)]
    images, labels, _ = data.fetch([0] * num, index)
    x0 = module.codec.encode(images)
    noise = PerSampleNoise(index, stream="validation").randn_like(x0)
    t = module.process.from_unit(torch.full((num,), u).double())
    return module.per_sample_loss(x0, labels, t, noise).mean()


def test_images_of_the_same_seeds_are_compared(capsys):
    assert analyze("consistency a b a --num 6 --weights raw") == 0
    told = capsys.readouterr().out
    images = torch.stack([load(path, "raw").generate(range(6)) for path in (A, B, A)])
    beside = [psnr(images[0], images[i]).mean().item() for i in (1, 2)]
    found = kept("consistency")
    assert found["paper"] == pytest.approx(np.mean(beside))
    assert beside[1] == 100.0
    assert found["names"] == ["a", "b", "a"]
    assert f"consistency (Eq. 1)    {found['paper']:.2f} dB" in told
    assert 0 <= found["same_nearest"] <= 1
    assert Path("out/consistency.png").is_file()


def test_losses_on_a_line_are_those_of_the_weights_there(capsys):
    assert analyze("interpolate a b --images 4 --levels 0.5 --points 3 --align") == 0
    with np.load("out/interpolation.npz") as arrays:
        values = arrays["values"]
    module = load(A, "raw")
    a, b = state_of(module), state_of(load(B, "raw"))
    for k, alpha in enumerate((0.0, 0.5, 1.0)):
        put_(module, between(a, b, alpha))
        assert values[0, k] == pytest.approx(loss_at(module, 0.5, 4).item(), rel=1e-5)
    assert "u = 0.5, aligned" in capsys.readouterr().out
    assert Path("out/interpolation-aligned.npz").is_file()


def test_a_plane_has_the_checkpoint_in_its_middle_and_goes_on_by_rows(capsys):
    command = "landscape a --images 4 --levels 0.5 --points 3 --span 0.5"
    assert analyze(command) == 0
    with np.load("out/landscape.npz") as arrays:
        values = arrays["values"]
    assert values[0, 1, 1] == pytest.approx(loss_at(load(A, "raw"), 0.5, 4).item(), rel=1e-5)
    Path("out/pieces/1.npz").unlink()
    before = Path("out/landscape.npz").read_bytes()
    assert analyze(command) == 0
    assert Path("out/landscape.npz").read_bytes() == before


def rewritten(source, target, change):
    """A copy of a checkpoint, changed by a function of its content."""
    content = torch.load(source, weights_only=True)
    change(content)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, target)


def test_the_way_of_a_run_lies_in_its_plane(capsys):
    def move(content):
        generator = torch.Generator().manual_seed(0)
        content["state_dict"] = {
            n: v + 0.1 * torch.randn(v.shape, generator=generator)
            for n, v in content["state_dict"].items()
        }
        content["global_step"] = 5

    rewritten(B, "early.ckpt", move)
    assert analyze("landscape a --images 4 --levels 0.5 --points 3 --path early.ckpt b a") == 0
    assert "The plane holds 100.0%" in capsys.readouterr().out
    with np.load("out/way.npz") as arrays:
        points = arrays["points"]
    np.testing.assert_allclose(points[2], 0, atol=1e-6)
    assert kept("way")["steps"] == [5, 9, 9]
    assert np.linalg.matrix_rank(points) == 2


def test_lines_between_other_kinds_of_models_are_refused(capsys):
    def predict_noise(content):
        kind = {"class_path": "lit_diffusion.parameterizations.Epsilon"}
        content["hyper_parameters"]["parameterization"] = kind

    rewritten(B, "c/checkpoints/last.ckpt", predict_noise)
    for command in ("interpolate a c", "landscape a --path c b"):
        assert analyze(f"{command} --images 4") == 2
        assert "the parameterization of c" in capsys.readouterr().err


def test_pieces_of_other_weights_are_not_gone_on_from(capsys):
    command = "landscape a --images 4 --levels 0.5 --points 3"
    assert analyze(command) == 0
    rewritten(A, A, lambda content: next(iter(content["state_dict"].values())).add_(0.1))
    assert analyze(command) == 2
    assert "choose another folder" in capsys.readouterr().err


def test_weights_have_a_fingerprint_whatever_their_order_in_memory():
    torch.manual_seed(0)
    usual = torch.nn.Conv2d(1, 4, 3)
    other = copy.deepcopy(usual).to(memory_format=torch.channels_last)
    assert _fingerprint(usual) == _fingerprint(other)
    with torch.no_grad():
        other.weight[0, 0, 0, 0] += 1e-6
    assert _fingerprint(usual) != _fingerprint(other)


def test_nearest_images_are_of_all_sets_that_models_were_trained_on():
    for name, part in (("half-0", [0, 2]), ("half-1", [1, 2])):
        write_small_digits(Path(f"{name}/checkpoints/last.ckpt"))
        config = Path(name, "config.yaml")
        settings = yaml.safe_load(config.read_text())
        settings["data"]["init_args"]["part"] = part
        config.write_text(yaml.safe_dump(settings))
        Path(name, "evaluations.jsonl").write_text(Path("a/evaluations.jsonl").read_text())
    for models in ("half-0 half-1", "half-1 half-0", "a a"):
        assert analyze(f"consistency {models} --num 8", out=models.replace(" ", "-")) == 0
    first, second, whole = (
        kept("consistency", out) for out in ("half-0-half-1", "half-1-half-0", "a-a")
    )
    assert first["nearest"] == second["nearest"] == whole["nearest"]


def test_what_is_damaged_is_named(capsys):
    command = "landscape a --images 4 --levels 0.5 --points 3"
    assert analyze(command) == 0
    Path("out/pieces/1.npz").write_bytes(b"no")
    assert analyze(command) == 2
    assert "1.npz is damaged" in capsys.readouterr().err
    Path("out/plan.json").write_text("[]")
    assert analyze(command) == 2
    assert "plan.json is damaged" in capsys.readouterr().err


def test_the_largest_eigenvalue_is_that_of_products(capsys):
    """A few steps of power iteration with autograd's own products come to the same."""
    assert analyze("hessian a --images 4 --levels 0.5 --steps 30 --vectors 1") == 0
    with np.load("out/hessian-0.npz") as arrays:
        largest = np.nanmax(np.abs(arrays["nodes"]))
    module = load(A, "raw")
    names = [n for n, p in module.named_parameters() if p.requires_grad]
    weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    chosen = [module.get_parameter(n) for n in names]
    with sdpa_kernel(SDPBackend.MATH):
        first = torch.autograd.grad(loss_at(module, 0.5, 4), chosen, create_graph=True)
    torch.manual_seed(0)
    v = [torch.randn_like(p) for p in chosen]
    for _ in range(60):
        size = torch.stack([x.norm() for x in v]).norm()
        v = [x / size for x in v]
        inner = sum((g * x).sum() for g, x in zip(first, v, strict=True))
        product = torch.autograd.grad(inner, chosen, retain_graph=True)
        rayleigh = sum((x * y).sum() for x, y in zip(v, product, strict=True)).item()
        v = list(product)
    assert abs(rayleigh) == pytest.approx(largest, rel=1e-2)
    assert all(torch.equal(p, weights[n]) for n, p in module.named_parameters())


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("consistency a", "two models and two seeds are the least, got 1 and 32"),
        ("consistency a nowhere", "nowhere"),
        ("consistency a b --num 1", "two models and two seeds are the least"),
        ("landscape a --images 1", "--images must be 2 to 1437, got 1"),
        ("landscape a --points 1", "points must be >= 2, got 1"),
        ("landscape a --span nan", "--span must be above 0 and finite, got nan"),
        ("landscape a --path a a", "a way needs two places or more that differ"),
        ("interpolate a b --points 1", "points must be >= 2, got 1"),
        ("interpolate a b --levels 0.5,2", "--levels must be different numbers in [0, 1]"),
        ("hessian a --levels 0.5,0.5", "--levels must be different numbers in [0, 1]"),
        ("hessian a --steps 0", "steps must be >= 1, got 0"),
        ("hessian a --vectors -1", "vectors must be >= 1, got -1"),
        ("consistency a b --batch-size 0", "batch_size must be >= 1, got 0"),
        ("consistency a b --extractor unknown", "unknown"),
        ("hessian a --weights ema_0.5", "ema_0.5"),
        ("interpolate a", "B must be given"),
    ],
)
def test_a_mistake_is_told_before_work_starts(command, told, capsys):
    assert analyze(command) == 2
    assert told in capsys.readouterr().err


def test_models_that_make_other_images_are_told_apart(capsys):
    content = torch.load(B, weights_only=True)
    content["hyper_parameters"]["image_shape"] = [1, 16, 16]
    torch.save(content, B)
    assert analyze("consistency a b") == 2
    assert "all models must make images of one shape" in capsys.readouterr().err


def test_other_numbers_of_classes_are_told_apart(capsys):
    content = torch.load(B, weights_only=True)
    content["hyper_parameters"]["num_classes"] = 5
    content["hyper_parameters"]["network"]["init_args"]["num_classes"] = 5
    for weights in (content["state_dict"], content["callbacks"]["EMA{'prefix': ''}"]["shadows"][0]):
        for name in [name for name in weights if "label_emb" in name]:
            weights[name] = weights[name][:5]
    torch.save(content, B)
    assert analyze("consistency a b") == 2
    told = capsys.readouterr().err
    assert "of one shape and number of classes" in told
    assert "1x8x8, 5" in told


TOLD_OF_NAN = {
    "hessian a": "the Hessian of u = 0.1 is nan% off",
    "landscape a": "losses must be finite",
    "interpolate a b": "losses must be finite",
}


def test_weights_whose_loss_is_not_finite_are_told_before_work_starts(capsys):
    content = torch.load(A, weights_only=True)
    next(iter(content["state_dict"].values())).fill_(float("nan"))
    torch.save(content, A)
    for command, told in TOLD_OF_NAN.items():
        assert analyze(f"{command} --images 4", out=command[0]) == 2
        assert told in capsys.readouterr().err


def test_a_network_without_second_derivatives_is_told(capsys, monkeypatch):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):
            return gradient.clone()

    forward = UNet.forward
    monkeypatch.setattr(UNet, "forward", lambda *args: Once.apply(forward(*args)))
    assert analyze("hessian a --images 4") == 2
    assert "off the difference of gradients" in capsys.readouterr().err


GAN_TELLS = {
    "interpolate gan gan --points 3": "generator, as they are",
    "landscape gan --points 3": "discriminator: ",
    "hessian gan --steps 5 --vectors 1 --kinks": "generator: largest",
}


@pytest.fixture
def gan(folder):
    """The digits' DCGAN after two steps, as `fit` writes it."""
    config = Path(__file__).parents[2] / "configs/digits-dcgan.yaml"
    said = "--trainer.max_steps=2 --trainer.callbacks=null --trainer.default_root_dir=gan"
    assert call(f"fit --config {config} {said}") == 0


@pytest.mark.usefixtures("gan")
def test_gans_are_analysed_by_both_of_their_losses(capsys):
    assert analyze("hessian gan --images 8") == 2
    assert "gradients jump, as with ReLU" in capsys.readouterr().err
    for number, (command, tells) in enumerate(GAN_TELLS.items()):
        assert analyze(f"{command} --images 8", out=f"out-{number}") == 0
        assert tells in capsys.readouterr().out
    assert analyze("consistency gan a --num 4 --weights raw --extractor digits-cnn") == 0
    assert kept("consistency")["same_class"] is None  # a DCGAN has no classes


@pytest.mark.usefixtures("gan")
def test_losses_of_a_gan_are_seen_along_the_weights_of_their_own_network():
    assert analyze("landscape gan --points 3 --images 8") == 0
    module = load("gan", "raw")
    with np.load("out/landscape.npz") as found:
        values = found["values"]
    drawn = [filter_normalised(each, module) for each in directions(module, 0)]
    exact_spectral_norms_(module)
    x0, _, index = fixed_batch(module, Digits().dataset("train"), 8)
    z = module.latents(index.tolist(), "validation")
    for i, name in enumerate(("discriminator", "generator")):
        with torch.no_grad():
            center = state_of(module)
            corner = {n: center[n] - drawn[0][n] - drawn[1][n] for n in drawn[0] if name in n}
            put_(module, corner)
            losses = module.discriminator_losses(x0, None, z), module.generator_losses(None, z)
            put_(module, center)
        assert values[i, 0, 0] == pytest.approx(losses[i].mean().item(), rel=1e-4)


LONG = ("analyze", "landscape", "a", "--images=256", "--points=61", "--out=out")


@pytest.mark.system
def test_processes_of_torchrun_make_one_result():
    command = ["analyze", "hessian", "a", "--images=8", "--steps=5", "--vectors=3"]
    launch = [f"{Path(SCRIPT).parent}/torchrun", "--standalone", "--nproc-per-node=2"]
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*launch, SCRIPT, *command, "--out=two"], env=one, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "largest" in ended.stdout
    assert call(" ".join([*command, "--out=one"])) == 0
    for file in sorted(Path("one").glob("hessian-*.npz")):
        with np.load(file) as first, np.load(Path("two", file.name)) as second:
            np.testing.assert_allclose(first["nodes"], second["nodes"], rtol=1e-3, atol=1e-5)


@pytest.mark.system
@pytest.mark.usefixtures("terminal_signals")
def test_a_survey_that_is_stopped_keeps_its_rows_and_goes_on():
    process = subprocess.Popen(
        [SCRIPT, *LONG], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not list(Path("out/pieces").glob("*.npz")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in said
    there = len(list(Path("out/pieces").glob("*.npz")))
    assert f"Stopped with {there} of 61 rows in out; the same command goes on." in said
    assert not Path("out/landscape.npz").exists()
