"""`lit-diffusion analyze`: what it writes, prints and refuses."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.commands import call
from support.small_digits import small_digits, write_small_digits

from lit_diffusion.checkpoints import loading
from lit_diffusion.checkpoints.loading import build_module, load
from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.data.digits import Digits
from lit_diffusion.lab.analysis import common
from lit_diffusion.lab.analysis.fixed_losses import (
    copy_weights,
    fixed_batch,
    use_exact_spectral_norm_,
)
from lit_diffusion.lab.analysis.hessian import hessian_product
from lit_diffusion.lab.analysis.landscape import normalize_filters, random_directions
from lit_diffusion.metrics.image_distances import psnr
from lit_diffusion.seeding import PerSampleNoise

A, B = "a/checkpoints/last.ckpt", "b/checkpoints/last.ckpt"
BUILT = {}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two runs of the same architecture, b with other weights."""
    root = tmp_path_factory.mktemp("models")
    write_scored_run(root / "a")
    write_scored_run(root / "b")
    rewrite(root / B, root / B, lambda content: scale_weights(content, 1.2))
    return root


@pytest.fixture(autouse=True)
def runs(models, folder, monkeypatch):
    """Copies of them; equal modules are built once, and figures are not rendered."""
    shutil.copytree(models, folder, dirs_exist_ok=True)
    monkeypatch.setattr(loading, "build_module", build_once)
    monkeypatch.setattr(common, "save_figure", lambda figure, path, note="": path.write_text(note))


def write_scored_run(folder):
    write_small_digits(folder / "checkpoints/last.ckpt")
    scored = json.dumps({"protocol": "digits-cnn", "step": 9}) + "\n"
    (folder / "evaluations.jsonl").write_text(scored)


def build_once(checkpoint, *arguments):
    key = json.dumps(checkpoint["hyper_parameters"])
    if key not in BUILT:
        BUILT[key] = build_module(checkpoint, *arguments)
    return copy.deepcopy(BUILT[key])


def rewrite(source, target, change):
    """Write a copy of a checkpoint, changed by a function of its content."""
    content = torch.load(source, weights_only=True)
    change(content)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, target)


def scale_weights(content, factor):
    content["state_dict"] = {n: v * factor for n, v in content["state_dict"].items()}


def analyze(command, out="out"):
    return call(f"analyze {command} --out {out}")


def numbers(name, out="out"):
    return json.loads(Path(out, f"{name}.json").read_text())


def arrays(name, out="out"):
    with np.load(Path(out, f"{name}.npz")) as file:
        return dict(file)


def loss_at(module, u, num):
    """As the command fixes it: images evenly over the training set, noise by their places."""
    x0, labels, index = fixed_batch(module, Digits().dataset("train"), num)
    noise = PerSampleNoise(index.tolist(), stream="validation").randn_like(x0)
    t = module.process.from_unit(torch.full((num,), u).double())
    return module.per_sample_loss(x0, labels, t, noise).mean()


@pytest.mark.slow
def test_images_of_the_same_seeds_are_compared(capsys):
    assert analyze("consistency a b a --num 3 --weights raw") == 0
    images = torch.stack([load(path, "raw").generate(range(3)) for path in (A, B, A)])
    beside_first = [psnr(images[0], images[i]).mean().item() for i in (1, 2)]
    result = numbers("consistency")
    assert result["paper"] == pytest.approx(np.mean(beside_first))
    assert result["names"] == ["a", "b", "a"]
    assert f"consistency (Eq. 1)    {result['paper']:.2f} dB" in capsys.readouterr().out
    assert Path("out/consistency.png").is_file()


def test_losses_on_a_line_are_those_of_the_weights_there(capsys):
    assert analyze("interpolate a b --images 4 --levels 0.5 --points 3 --align") == 0
    values = arrays("interpolation")["values"]
    module = load(A, "raw")
    a, b = copy_weights(module), copy_weights(load(B, "raw"))
    for k, alpha in enumerate((0.0, 0.5, 1.0)):
        point = {name: alpha * a[name] + (1 - alpha) * b[name] for name in a}
        module.load_state_dict(point, strict=False)
        assert values[0, k] == pytest.approx(loss_at(module, 0.5, 4).item(), rel=1e-5)
    assert "u = 0.5, aligned" in capsys.readouterr().out
    assert Path("out/interpolation-aligned.npz").is_file()


def test_a_plane_has_the_checkpoint_in_its_middle():
    assert analyze("landscape a --images 4 --levels 0.5 --points 3 --span 0.5") == 0
    result = arrays("landscape")
    assert result["x"].tolist() == result["y"].tolist() == [-0.5, 0, 0.5]
    center = loss_at(load(A, "raw"), 0.5, 4).item()
    assert result["values"][0, 1, 1] == pytest.approx(center, rel=1e-5)


@pytest.mark.slow
def test_the_trajectory_of_a_run_lies_in_its_plane(capsys):
    def move(content):
        torch.manual_seed(0)
        weights = content["state_dict"]
        content["state_dict"] = {n: v + 0.1 * torch.randn(v.shape) for n, v in weights.items()}
        content["global_step"] = 5

    rewrite(B, "early.ckpt", move)
    assert analyze("landscape a --images 4 --levels 0.5 --points 2 --path early.ckpt b a") == 0
    assert "The plane explains 100.0%" in capsys.readouterr().out
    points = arrays("way")["points"]
    np.testing.assert_allclose(points[2], 0, atol=1e-6)
    assert np.linalg.matrix_rank(points) == 2
    assert numbers("way")["steps"] == [5, 9, 9]
    # a fifth beyond the farthest checkpoint
    assert arrays("landscape")["x"][-1] == pytest.approx(1.2 * np.abs(points).max())


@pytest.mark.parametrize(("command", "changed"), [("interpolate a b", B), ("landscape a", A)])
def test_a_folder_is_of_the_weights_that_were_analyzed(command, changed, capsys):
    command += " --images 2 --levels 0.5 --points 2"
    assert analyze(command) == 0
    rewrite(changed, changed, lambda content: scale_weights(content, 1.1))
    assert analyze(command) == 2
    assert "choose another folder" in capsys.readouterr().err


def test_lines_between_other_kinds_of_models_are_refused(capsys):
    def predict_noise(content):
        kind = {"class_path": "lit_diffusion.parameterizations.Epsilon"}
        content["hyper_parameters"]["parameterization"] = kind

    rewrite(B, "c/checkpoints/last.ckpt", predict_noise)
    for command in ("interpolate a c", "landscape a --path c b"):
        assert analyze(f"{command} --images 4") == 2
        assert "the same parameterization, but in c" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_of_lanczos_gives_the_curvature_along_a_vector():
    assert analyze("hessian a --images 4 --levels 0.5 --steps 1 --vectors 2") == 0
    module = load(A, "raw")
    product, like = hessian_product(lambda: loss_at(module, 0.5, 4), module.parameters())
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        v = torch.randn(len(like), generator=generator, dtype=torch.float64).float()
        curvature = v @ product(v) / (v @ v)
        assert arrays("hessian-0")["nodes"][seed, 0] == pytest.approx(curvature.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        ("spectrum runs/a", "pass one of consistency, interpolate, landscape, hessian first"),
        ("consistency a", "pass at least two models and two seeds, got 1 and 32"),
        ("consistency a nowhere", "nowhere"),
        ("landscape a --span nan", "--span: must be a finite number, got nan"),
        ("landscape a --path a a", "--path needs two or more checkpoints"),
        ("hessian a --vectors -1", "vectors must be >= 1, got -1"),
        ("hessian a --weights ema_0.5", "ema_0.5"),
    ],
)
def test_a_mistake_is_refused_before_work_starts(command, rule, capsys):
    assert analyze(command) == 2
    assert rule in capsys.readouterr().err


def test_training_images_of_another_shape_are_refused_before_work_starts(capsys):
    data = {"class_path": "lit_diffusion.data.photo_patches.PhotoPatches", "init_args": {}}
    Path("b/config.yaml").write_text(yaml.safe_dump({"data": data}))
    rule = "make images of 1x8x8, but training images are 3x32x32; name data of the models"
    for options in ("", "--data b/config.yaml "):
        assert analyze(f"consistency a b {options}--num 2 --weights raw") == 2
        assert rule in capsys.readouterr().err


def test_losses_that_are_not_finite_are_refused_before_work_starts(capsys):
    rewrite(A, A, lambda content: scale_weights(content, float("nan")))
    assert analyze("landscape a --images 4 --levels 0.5") == 2
    assert "nan" in capsys.readouterr().err


def test_data_that_a_config_does_not_name_are_asked_for(capsys):
    Path("a/config.yaml").write_text("data: null")
    assert analyze("hessian a") == 2
    assert "a/checkpoints/last.ckpt names no data with splits" in capsys.readouterr().err


def write_small_gan(kind):
    """A checkpoint of a new GAN with spectral norm (BigGAN) or without (DCGAN)."""
    config = yaml.safe_load((Path(__file__).parents[3] / f"configs/digits-{kind}.yaml").read_text())
    spec = config["model"]
    hyper = {"_class_path": spec["class_path"], **spec["init_args"]}
    torch.manual_seed(0)
    module = build_module({"hyper_parameters": hyper}, "this")
    content = {"state_dict": module.state_dict(), "global_step": 2, "hyper_parameters": hyper}
    write_checkpoint(content, Path(kind, "checkpoints/last.ckpt"))
    Path(kind, "config.yaml").write_text(yaml.safe_dump({"data": small_digits(1)["data"]}))
    return module


def test_the_hessian_of_relus_is_refused_or_goes_on_without_jumps(capsys):
    write_small_gan("dcgan")
    assert analyze("hessian dcgan --images 8") == 2
    assert "gradients jump, as with ReLU" in capsys.readouterr().err
    assert analyze("hessian dcgan --images 8 --steps 2 --vectors 1 --kinks") == 0
    out = capsys.readouterr().out
    note = (
        "GAN losses, mean over 8 training images, without R1, "
        "batch norm with unchanged running statistics"
    )
    assert "generator: largest" in out
    assert out.endswith(f"{note}\n")
    assert numbers("hessian-0")["note"] == Path("out/hessian.png").read_text() == note
    assert analyze("interpolate dcgan dcgan --points 2 --images 8", out="line") == 0
    note = note.replace("unchanged", "interpolated")
    drawn = Path("line/interpolation.png").read_text()
    assert numbers("interpolation", out="line")["note"] == drawn == note


@pytest.mark.slow
def test_each_loss_of_a_gan_is_on_a_plane_of_its_own_network():
    module = write_small_gan("biggan").eval()
    assert analyze("landscape biggan --points 2 --images 8") == 0
    values, drawn = arrays("landscape")["values"], Path("out/landscape.png").read_text()
    assert "batch norm with unchanged running" in numbers("landscape")["note"] == drawn
    use_exact_spectral_norm_(module)
    directions = [normalize_filters(each, module) for each in random_directions(module, 0)]
    x0, labels, index = fixed_batch(module, Digits().dataset("train"), 8)
    z = module.latents(index.tolist(), "validation")
    for i, name in enumerate(("discriminator", "generator")):
        center = copy_weights(module)
        for k, x in enumerate((-1, 1)):
            corner = {n: center[n] + x * d - directions[1][n] for n, d in directions[0].items()}
            part = {n: v for n, v in corner.items() if n.startswith(name)}
            module.load_state_dict(part, strict=False)
            losses = module.discriminator_losses(x0, labels, z), module.generator_losses(labels, z)
            assert values[i, 0, k] == pytest.approx(losses[i].mean().item(), rel=1e-4)
        module.load_state_dict(center, strict=False)
