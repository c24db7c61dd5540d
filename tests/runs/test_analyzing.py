import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import call
from support.small_digits import write_small_digits
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_diffusion.analysis.consistency import psnr
from lit_diffusion.analysis.weights import between, put_, state_of
from lit_diffusion.checkpoints.loading import load
from lit_diffusion.data.digits import Digits
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


def test_the_way_of_a_run_lies_in_its_plane(capsys):
    assert analyze("landscape a --images 4 --levels 0.5 --points 3 --path b a") == 0
    assert "The plane holds 100.0%" in capsys.readouterr().out


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
        ("consistency a", "give two checkpoints or more, got 1"),
        ("consistency a nowhere", "nowhere"),
        ("consistency a b --num 1", "two models and two seeds are the least"),
        ("landscape a --images 1", "--images must be 2 to 1437, got 1"),
        ("landscape a --points 1", "--span > 0 and --points >= 2"),
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
