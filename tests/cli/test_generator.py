"""Solver, guidance, labels and edits of the images that a checkpoint generates."""

import re
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.commands import call, sampling
from support.small_digits import hyper_parameters, small_digits, write_digits, write_small_digits
from support.tiny_run import spec

from lit_diffusion.checkpoints.loading import build_module, load, load_module
from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.cli.generator import build_solver, load_generator
from lit_diffusion.data.digits import Digits
from lit_diffusion.gaussian import FixedSmall
from lit_diffusion.guidance import Autoguidance, ClassifierScore, ClassifierShift
from lit_diffusion.solvers import DDPM

LAST = "run/checkpoints/last.ckpt"


@pytest.fixture(autouse=True)
def module(folder):
    write_digits("begin", "val", 3)
    return deepcopy(write_small_digits(Path(LAST)))


def generate(options, num=3):
    """Images uint8 (N, 1, H, W), and the content of samples.json."""
    generator = load_generator(sampling(options))
    return generator.generate(range(num)), generator.record(num, num)


def test_labels_are_those_asked_for_or_follow_the_seeds():
    assert load_generator(sampling("--labels 3,-1 --seed 8")).image_labels(3) == [3, -1, 3]
    assert load_generator(sampling("--seed 8")).image_labels(3) == [8, 9, 0]


def test_another_solver_inherits_steps_and_clipping_and_mistakes_are_named():
    loaded = load_module(LAST)
    for options, solver in {
        "--steps 3": "DDIM(steps=3, eta=0.0, times=None, clip=True)",
        "--solver ddpm": "DDPM(variance=FixedSmall(), steps=4, times=None, clip=True)",
        "--solver '{class_path: lit_diffusion.solvers.DDIM, init_args: {steps: 2, eta: 1}}'": (
            "DDIM(steps=2, eta=1.0, times=None, clip=True)"
        ),
        "--solver DPMSolverPP --solver.times=lit_diffusion.grids.LogSNR": (
            "DPMSolverPP(steps=4, times=LogSNR(noisiest=-inf), clip=True, order=2, eta=0.0)"
        ),
        "--solver DDPM --solver.variance FixedLarge --solver.clip=false": (
            "DDPM(variance=FixedLarge(), steps=4, times=None, clip=False)"
        ),
    }.items():
        assert repr(build_solver(loaded, sampling(options))) == solver
    for options, message in {
        "--solver heunn": "--solver must be one of DDIM, DDPM, DPMSolverPP, DPMSolverPP2S, Euler, "
        "EulerAncestral, Heun, UniPC, or a class path",
        "--solver Heun --solver.stepz 3": "no argument 'stepz'. Did you mean 'steps'?",
        f"--solver '{{steps: {'9' * 5000}}}'": "--solver must be one of DDIM",
        "--solver '{class_path: DDPM, init_args: null}'": "init_args of --solver must be NAME:",
        "--solver.steps=0": "--solver: steps must be at least 1, got 0",
        "--solver lit_diffusion.grids.Karras": "does not implement protocol Solver",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            build_solver(loaded, sampling(options))


# Guidance


def classifier(betas="LinearBetas"):
    """An untrained one, as "classifier.ckpt"."""
    model = small_digits(1)["model"]["init_args"]
    unet = {"image_size": 8, "in_channels": 1, "out_channels": 10, "model_channels": 32}
    unet |= {"channel_mult": [1], "num_res_blocks": 1, "attention_downsample": []}
    betas = spec(f"lit_diffusion.processes.{betas}")
    classifier = spec(
        "lit_diffusion.modules.classifier.NoisyClassifier",
        network=spec("lit_diffusion.networks.unet.EncoderUNet", head_channels=32, **unet),
        process=spec("lit_diffusion.processes.DiscreteVP", betas=betas),
        **{name: model[name] for name in ("times", "optimizer", "image_shape", "num_classes")},
    )
    hyper = hyper_parameters({"model": classifier}, "model")
    torch.manual_seed(1)
    module = build_module({"hyper_parameters": hyper}, "this")
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    content = {"state_dict": module.state_dict(), "global_step": 5, "hyper_parameters": hyper}
    write_checkpoint(content, "classifier.ckpt")
    return module.eval()


def test_a_weaker_model_is_recorded_with_its_step_and_its_weights(module):
    content = torch.load(LAST, weights_only=True)
    (shadow,) = content["callbacks"]["EMA{'prefix': ''}"]["shadows"]
    shadow |= {name: 0.9 * value for name, value in shadow.items()}
    write_checkpoint(content, "weak.ckpt")
    for suffix, weights in (("", "ema_0.9"), (":raw", "raw")):
        images, record = generate(f"--weaker weak.ckpt{suffix} --guidance 1.5")
        weak = load("weak.ckpt", weights)
        module.guidance = Autoguidance(weak.denoise_for, 1.5)
        assert torch.equal(images, module.generate(range(3)))
        assert not torch.equal(images, weak.generate(range(3)))
        assert record["guided_by"] == {"weaker": "weak.ckpt", "step": 9, "weights": weights}
    assert record["sampling"]["guidance"] == "Autoguidance(scale=1.5, interval=(0.0, inf))"


def test_a_classifier_moves_means_of_ddpm_and_scores_of_others(module):
    """Its weights may be others than the model's."""
    gradient = classifier().gradient(2.0)
    module.guidance = ClassifierScore(gradient)
    for solver in ("DDIM", "DDPM"):
        options = f"--classifier classifier.ckpt:raw --guidance 2 --solver {solver}"
        images, record = generate(options)
        assert torch.equal(images, module.generate(range(3)))
        second = {"classifier": "classifier.ckpt", "step": 5, "weights": "raw", "scale": 2.0}
        assert record["guided_by"] == second
        module.solver, module.guidance = DDPM(FixedSmall(), 4), ClassifierShift(gradient)


def test_a_classifier_of_another_process_is_refused():
    classifier("CosineBetas")
    with pytest.raises(ValueError, match="must have the process of the model"):
        load_generator(sampling("--classifier classifier.ckpt:raw"))


def test_a_classifier_is_no_weaker_model():
    classifier()
    message = "--weaker classifier.ckpt:raw must be a DiffusionModule, got a NoisyClassifier."
    with pytest.raises(ValueError, match=re.escape(message)):
        load_generator(sampling("--weaker classifier.ckpt:raw"))


# Images to start from


def test_samples_start_from_the_pictures_of_a_folder_in_turn(module):
    images, record = generate("--init begin --strength 0.5", num=5)
    init = Digits().images("val")[torch.tensor([0, 1, 2, 0, 1])]
    assert torch.equal(images, module.edit(init, range(5), strength=0.5))
    assert (record["init"], record["strength"]) == ("begin", 0.5)
    assert record["sampling"]["steps"] == 2


def test_what_is_white_in_the_mask_is_kept_of_one_picture():
    mask = np.zeros((8, 8), dtype=np.uint8)
    mask[:, 4:] = 255
    Image.fromarray(mask).save("mask.png")
    images, record = generate("--init begin/0001.png --mask mask.png", num=5)
    picture = Digits().images("val")[1]
    assert (images[..., 4:] == picture[..., 4:]).all()
    assert (images[..., :4] != picture[..., :4]).any()
    assert record["mask"] == "mask.png"
    assert record["sampling"]["solver"].startswith("RePaint(steps=4, resamples=10, ")


def test_a_picture_that_does_not_fit_is_named():
    Image.new("L", (9, 8)).save("wide.png")
    Image.new("RGB", (8, 8)).save("colour.png")
    Image.new("I;16", (8, 8)).save("deep.png")
    for options, message in {
        "--init colour.png": "colour.png must have the shape (1, 8, 8) (channels",
        "--init deep.png": "deep.png has mode I;16; images must be of mode L, LA, RGB or RGBA",
        "--init nowhere.png": "nowhere.png must be an image or a folder of PNG files",
        "--init begin --mask m.png --solver Heun": "--mask uses RePaint with the steps",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            load_generator(sampling(options))
    assert call("sample --checkpoint run --num 1 --out out --init wide.png") == 2
