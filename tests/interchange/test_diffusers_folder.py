"""Pipelines of diffusers, loaded from our folders, make our images."""

import json
import os
import re

import pytest
import torch
from support.golden import fill_
from support.tiny_diffusion import tiny_diffusion
from torch.testing import assert_close

from lit_diffusion.codecs import PixelCodec
from lit_diffusion.gaussian import FixedLarge, FixedSmall, LearnedRange
from lit_diffusion.grids import Sections, Stride
from lit_diffusion.interchange.diffusers_dit import FIX_FREQUENCIES
from lit_diffusion.interchange.diffusers_folder import (
    compare_with_pipeline,
    read_model,
    scheduler_config,
    write_diffusers,
    write_model,
)
from lit_diffusion.interchange.published import convert
from lit_diffusion.losses import HybridLoss, Simple
from lit_diffusion.modules.vae import VAECodec
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.unet import UNet
from lit_diffusion.parameterizations import EDMPreconditioning, Epsilon, Sample, Velocity
from lit_diffusion.processes import ContinuousVP, CosineBetas, DiscreteVP, LinearBetas
from lit_diffusion.seeding import PerSampleNoise
from lit_diffusion.solvers import DDIM, DDPM, DPMSolverPP

SEEDS = [3, 5]
ARGUMENTS = {"in_channels": 1, "out_channels": 1, "model_channels": 16, "norm_groups": 4}
ARGUMENTS |= {"channel_mult": [1, 2], "num_res_blocks": 1, "num_heads": 2}
DIT = {"image_size": 8, "in_channels": 4, "out_channels": 4, "patch_size": 2, "width": 32}
DIT |= {"depth": 2, "num_heads": 2, "num_classes": 3}


def unet(**changes):
    """Whose output follows its input gently: a hundred steps amplify no rounding."""
    network = fill_(UNet(**(ARGUMENTS | changes)))
    with torch.no_grad():
        network.out[2].weight.mul_(0.3)
    return network


def module(network=None, **changes):
    plain = {"num_classes": None, "label_dropout": 0.0}
    network = unet() if network is None else network
    return tiny_diffusion(network=network, **(plain | changes)).eval()


def dit(**changes):
    """With its table of positions as it is, which is not trained."""
    network = DiT(**(DIT | changes))
    positions = network.pos_embed.clone()
    fill_(network).pos_embed.copy_(positions)
    return network


class Latents(PixelCodec):
    """Whose x0 are not clamped, as those of a VAECodec."""

    bounded = False

    def __init__(self, **numbers):
        vars(self).update(numbers)


def latent_module(**changes):
    return module(dit(), image_shape=(4, 8, 8), num_classes=3, **changes)


def write(folder, module, arguments=ARGUMENTS, vae=None):
    kind = type(module.network)
    record = {
        "network": {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": arguments},
        "image_shape": list(module.image_shape),
    }
    return write_diffusers(folder, module, record, module.network.state_dict(), vae)


def test_files_of_a_compiled_network_are_those_of_the_network(tmp_path):
    sizes = {"channel_mult": [1], "attention_downsample": []}
    eager, compiled = (module(unet(**sizes)) for _ in range(2))
    compiled.compile_network()
    compiled.network.compile(backend="eager")  # in place of inductor, which takes a minute
    compiled.network(torch.zeros(2, 1, 8, 8), torch.zeros(2))
    for ours in (eager, compiled):
        write(tmp_path / str(ours is compiled), ours, ARGUMENTS | sizes)
    files = [p.relative_to(tmp_path / "True") for p in (tmp_path / "True").rglob("*.*")]
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "True" / file).read_bytes() == (tmp_path / "False" / file).read_bytes()


def pipeline_of(folder, kind="DDPMPipeline"):
    diffusers = pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")
    pipeline = getattr(diffusers, kind).from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def our_images(module):
    """In [0, 1], as diffusers has them, before they are rounded."""
    noise = PerSampleNoise(SEEDS)
    with torch.no_grad():
        start = noise.draw(module.image_shape)
        denoise = module.denoise_for(None)
        x0 = module.solver.sample(denoise, module.process, start, noise.randn_like)
    return (x0 / 2 + 0.5).clamp(0, 1)


def close(images, expected):
    assert expected.std() > 0.05
    assert ((expected > 0) & (expected < 1)).float().mean() > 0.2  # not all of it clamped
    assert_close(images, expected.float(), rtol=0, atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("parameterization", "betas", "variance", "steps"),
    [
        (Epsilon(), LinearBetas(40), FixedSmall(), 40),
        (Sample(), CosineBetas(40), FixedSmall(), 7),
        (Velocity(), CosineBetas(40), FixedSmall(), 7),
        (Epsilon(), CosineBetas(40), FixedLarge(), 7),
        (Epsilon(), LinearBetas(40), LearnedRange(), 7),
    ],
)
def test_ddpm_pipeline_makes_our_image_of_a_seed(
    parameterization, betas, variance, steps, tmp_path
):
    factor = 1 + variance.learned
    ours = module(
        unet(out_channels=factor),
        process=DiscreteVP(betas),
        parameterization=parameterization,
        solver=DDPM(variance, steps=steps),
        **({"loss": HybridLoss(Simple())} if variance.learned else {}),
    )
    assert write(tmp_path, ours, ARGUMENTS | {"out_channels": factor}) == []
    generators = PerSampleNoise(SEEDS).generators
    pipeline = pipeline_of(tmp_path)
    close(pipeline(2, generators, steps, output_type="pt").images, our_images(ours))


STRIDES = DDIM(10, times=Stride(), clip=False)
LEARNED = {"loss": HybridLoss(Simple())}


@pytest.mark.parametrize(
    ("make", "arguments", "solver", "changes", "expected"),
    [
        (unet, {}, DDPM(FixedSmall(), steps=7), {}, "DDPMScheduler, .* same: .* most [0-9.]+e-0"),
        (unet, {"out_channels": 2}, DDPM(LearnedRange(), steps=7), LEARNED, "images are the same"),
        (unet, {}, DPMSolverPP(7), {}, r"run by DPMSolverPP\(.*In 7 steps .* are not the same"),
        (dit, {}, STRIDES, {}, "DDIMScheduler, .* images are the same"),
        (dit, {"out_channels": 8}, STRIDES, LEARNED, "images are the same"),
        (dit, {}, DDPM(FixedSmall(), steps=7, clip=False), {}, "DDIMScheduler, .* not the same"),
    ],
)
def test_an_export_says_whether_images_are_the_same(
    make, arguments, solver, changes, expected, tmp_path
):
    pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")
    network, shape = make(**arguments), (4, 8, 8) if make is dit else (1, 8, 8)
    changes = changes | {"image_shape": shape, "num_classes": network.num_classes}
    ours = module(network, solver=solver, **changes)
    write(tmp_path, ours, (DIT if make is dit else ARGUMENTS) | arguments)
    assert re.search(expected, compare_with_pipeline(tmp_path, ours))


def test_latents_are_not_the_same_if_they_differ_by_half_of_their_spread(tmp_path):
    pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")
    sentences = []
    for i, times in enumerate((Stride(), Sections())):
        ours = latent_module(solver=DDIM(10, times=times, clip=False))
        write(tmp_path / str(i), ours, DIT)
        ours.codec = Latents()
        sentences.append(compare_with_pipeline(tmp_path / str(i), ours))
    assert "their latents are the same" in sentences[0]
    assert re.search(r"their latents are not the same: they differ by at most 0\.", sentences[1])


@pytest.mark.quick
@pytest.mark.parametrize("solver", [STRIDES, DDIM(10, times=Stride())])
def test_ddim_pipeline_makes_our_image_of_a_seed(solver, tmp_path):
    ours = module(solver=solver)
    write(tmp_path, ours)
    options = {"num_inference_steps": 10, "use_clipped_model_output": True, "output_type": "pt"}
    pipeline = pipeline_of(tmp_path, "DDIMPipeline")
    images = pipeline(2, PerSampleNoise(SEEDS).generators, **options).images
    close(images, our_images(ours))


def test_dit_pipeline_makes_our_latents_of_a_seed(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(3, 3, block_out_channels=(8,), norm_num_groups=4)
    vae.save_pretrained(tmp_path / "vae")
    ours = latent_module(solver=STRIDES, codec=VAECodec(str(tmp_path / "vae"), scale=0.7))
    (remark,) = write(tmp_path / "out", ours, DIT, str(tmp_path / "vae"))
    assert FIX_FREQUENCIES in remark
    with pytest.raises(ValueError, match="the scale and shift of VAECodec"):
        write(tmp_path, ours, DIT, str(tmp_path / "vae"))
    pipeline = pipeline_of(tmp_path / "out", "DiTPipeline")
    exec(FIX_FREQUENCIES, {"pipeline": pipeline})
    generators = PerSampleNoise(SEEDS).generators
    images = pipeline([2, 0], 1.0, generators, 10, output_type="pt").images
    noise = PerSampleNoise(SEEDS)
    with torch.no_grad():
        denoise = ours.denoise_for(torch.tensor([2, 0]))
        start = noise.draw(ours.image_shape)
        latents = ours.solver.sample(denoise, ours.process, start, noise.randn_like)
        expected = vae.decode(latents.float() / 0.7).sample
    close(images, (expected / 2 + 0.5).clamp(0, 1))


def test_what_diffusers_cannot_express_is_refused_by_name(tmp_path):
    for changes, message in (
        ({"process": ContinuousVP(), "solver": DDIM(3)}, "needs betas, but ContinuousVP"),
        ({"process": DiscreteVP(CosineBetas(100), rescale_labels=True)}, "rescale_labels=True"),
        ({"parameterization": EDMPreconditioning()}, "has Epsilon, Sample, Velocity"),
        ({"network": tiny_diffusion().network}, "has no TinyNetwork: export a UNet or DiT"),
    ):
        ours = module()
        for name, value in changes.items():
            setattr(ours, name, value)
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "out", ours)
    assert not (tmp_path / "out").exists()
    ours = module(process=DiscreteVP(CosineBetas(1000), rescale_labels=True))  # whole labels
    assert scheduler_config(ours)["num_train_timesteps"] == 1000


def test_a_network_is_read_from_its_folder_or_its_pipelines(tmp_path):
    write(tmp_path, module())
    config, state = read_model(tmp_path)
    assert read_model(tmp_path / "unet")[0] == config
    (tmp_path / "unet/diffusion_pytorch_model.safetensors").unlink()
    torch.save(state, tmp_path / "unet/diffusion_pytorch_model.bin")
    assert read_model(tmp_path)[1].keys() == state.keys()
    (tmp_path / "unet/config.json").write_text(json.dumps({"_class_name": "UNet1DModel"}))
    with pytest.raises(ValueError, match="holds a UNet1DModel, but must hold a UNet2DModel"):
        read_model(tmp_path)


@pytest.mark.parametrize("lacking", ["down_block_types", "mid_block.attentions.0.to_q.weight"])
def test_what_a_folder_lacks_is_named(lacking, tmp_path):
    write(tmp_path / "whole", module())
    config, state = read_model(tmp_path / "whole")
    for part in (config, state):
        part.pop(lacking, None)
    write_model(tmp_path / "cut", config, state)
    with pytest.raises(ValueError, match=f"not of --kind diffusers-unet: it lacks {lacking}"):
        convert(tmp_path / "cut", "diffusers-unet", tmp_path / "out", {})


@pytest.fixture
def vae(tmp_path):
    folder = tmp_path / "pipe" / "vae"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    (folder / "diffusion_pytorch_model.safetensors").write_bytes(b"weights")
    (folder / "notes.txt").write_text("not needed")
    return folder


@pytest.mark.parametrize("out", ["elsewhere", "pipe"])
def test_the_files_of_a_vae_are_copied_wherever_it_is(vae, tmp_path, out):
    latents = latent_module()
    for _ in range(2):
        write(tmp_path / out, latents, DIT, str(vae))
        copy = tmp_path / out / "vae"
        assert (copy / "diffusion_pytorch_model.safetensors").read_bytes() == b"weights"
        assert json.loads((copy / "config.json").read_text())["_class_name"] == "AutoencoderKL"
        assert {"config.json", "diffusion_pytorch_model.safetensors"} == {
            file.name for file in copy.iterdir() if file.name != "notes.txt"
        }


def test_a_copy_of_a_vae_has_scale_and_shift_of_the_codec(vae, tmp_path):
    latents = latent_module()
    before = (vae / "config.json").read_text()
    latents.codec = Latents(scale=0.18215, shift=0.0)  # as diffusers have them by default
    write(tmp_path / "pipe", latents, DIT, str(vae))
    assert json.loads((vae / "config.json").read_text()) == json.loads(before)
    latents.codec = Latents(scale=0.7, shift=0.1)
    write(tmp_path / "copy", latents, DIT, str(vae))
    config = json.loads((tmp_path / "copy" / "vae" / "config.json").read_text())
    assert (config["scaling_factor"], config["shift_factor"]) == (0.7, 0.1)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_vae_with_a_pipe_or_device_in_place_of_weights_is_refused(vae, tmp_path, kind):
    weights = vae / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    os.mkfifo(weights) if kind == "pipe" else weights.symlink_to("/dev/zero")
    latents = latent_module()
    with pytest.raises(ValueError, match=f"is not a regular file, but a {kind}"):
        write(tmp_path / "out", latents, DIT, str(vae))
    assert not (tmp_path / "out").exists()
