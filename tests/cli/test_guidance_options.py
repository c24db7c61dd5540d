import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.commands import call
from support.small_digits import hyper_parameters, small_digits, write_small_digits

from lit_diffusion.checkpoints.loading import build_module, load
from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.gaussian import FixedSmall
from lit_diffusion.guidance import Autoguidance, ClassifierFree, ClassifierScore, ClassifierShift
from lit_diffusion.solvers import DDPM

LAST = "run/checkpoints/last.ckpt"
pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def strong(folder):
    write_small_digits(Path(LAST))
    return load(LAST)


@pytest.fixture
def weak(strong):
    """The same module with other weights, as "weak.ckpt"."""
    content = torch.load(LAST, weights_only=True)
    shadows = content["callbacks"]["EMA{'prefix': ''}"]["shadows"]
    content["callbacks"]["EMA{'prefix': ''}"]["shadows"] = [
        {name: 0.9 * value for name, value in shadow.items()} for shadow in shadows
    ]
    write_checkpoint(content, "weak.ckpt")
    return load("weak.ckpt")


def classifier(betas="LinearBetas", process=None):
    """An untrained one, as "classifier.ckpt"."""
    model = small_digits(1)["model"]["init_args"]
    betas = {"betas": {"class_path": f"lit_diffusion.processes.{betas}"}}
    discrete = {"class_path": "lit_diffusion.processes.DiscreteVP", "init_args": betas}
    arguments = {
        "network": {
            "class_path": "lit_diffusion.networks.unet.EncoderUNet",
            "init_args": {
                **{"image_size": 8, "in_channels": 1, "out_channels": 10, "model_channels": 32},
                **{"channel_mult": [1], "num_res_blocks": 1, "attention_downsample": []},
                "head_channels": 32,
            },
        },
        **{name: model[name] for name in ("times", "optimizer", "image_shape", "num_classes")},
        "process": process or discrete,
    }
    path = "lit_diffusion.modules.classifier.NoisyClassifier"
    hyper = hyper_parameters({"model": {"class_path": path, "init_args": arguments}}, "model")
    torch.manual_seed(1)
    module = build_module({"hyper_parameters": hyper}, "this")
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    content = {"state_dict": module.state_dict(), "global_step": 5, "hyper_parameters": hyper}
    write_checkpoint(content, "classifier.ckpt")
    return module.eval()


def sampled(options):
    assert call(f"sample --checkpoint run --num 3 --out out {options}") == 0
    files = sorted(Path("out").glob("0*.png"))
    images = torch.stack([torch.from_numpy(np.array(Image.open(file))) for file in files])
    return images[:, None], json.loads(Path("out/samples.json").read_text())


def test_the_options_of_classifier_free_guidance_are_taken(strong):
    images, record = sampled("--guidance 3 --guidance_interval 0.2,5 --guidance_rescale 0.7")
    strong.guidance = ClassifierFree(3.0, (0.2, 5.0), 0.7)
    assert torch.equal(images, strong.generate(range(3)))
    assert record["sampling"]["guidance"] == repr(strong.guidance)
    assert "guided_by" not in record


def test_a_weaker_model_is_named_with_its_step_and_weights(strong, weak):
    images, record = sampled("--weaker weak.ckpt --guidance 1.5")
    strong.guidance = Autoguidance(weak.denoise_for, 1.5)
    assert torch.equal(images, strong.generate(range(3)))
    assert not torch.equal(images, weak.generate(range(3)))
    assert record["guided_by"] == {"weaker": "weak.ckpt", "step": 9, "weights": "ema_0.9"}
    assert record["sampling"]["guidance"] == "Autoguidance(scale=1.5, interval=(0.0, inf))"


def test_a_weaker_model_may_have_other_weights_than_the_model(strong, weak):
    images, record = sampled("--weaker weak.ckpt:raw --guidance 1.5")
    strong.guidance = Autoguidance(load("weak.ckpt", "raw").denoise_for, 1.5)
    assert torch.equal(images, strong.generate(range(3)))
    assert record["guided_by"] == {"weaker": "weak.ckpt", "step": 9, "weights": "raw"}


def test_a_classifier_may_have_other_weights_than_the_model(strong):
    strong.guidance = ClassifierScore(classifier().gradient(2.0))
    images, record = sampled("--classifier classifier.ckpt:raw --guidance 2 --solver DDIM")
    assert torch.equal(images, strong.generate(range(3)))
    assert record["guided_by"]["weights"] == "raw"


@pytest.mark.parametrize("solver", ["DDIM", "DDPM"])
def test_a_classifier_moves_means_of_ddpm_and_scores_of_others(strong, solver):
    gradient = classifier().gradient(2.0)
    options = f"--classifier classifier.ckpt --guidance 2 --weights raw --solver {solver}"
    images, record = sampled(options)
    module = load(LAST, "raw")
    if solver == "DDPM":
        module.solver, module.guidance = DDPM(FixedSmall(), 4), ClassifierShift(gradient)
    else:
        module.guidance = ClassifierScore(gradient)
    assert torch.equal(images, module.generate(range(3)))
    assert record["guided_by"]["classifier"] == "classifier.ckpt"
    assert record["guided_by"]["scale"] == 2.0


def test_models_of_another_process_guide_nobody(strong, capsys):
    classifier("CosineBetas")
    options = "--classifier classifier.ckpt --weights raw"
    assert call(f"sample --checkpoint run --num 1 --out out {options}") == 2
    told = capsys.readouterr().err
    assert "--classifier classifier.ckpt has the process" in told
    assert "CosineBetas" in told


@pytest.fixture
def flow(strong):
    """A model whose images begin without any signal, and a classifier of its process."""
    flow = {"class_path": "lit_diffusion.processes.LinearFlow"}
    content = torch.load(LAST, weights_only=True)
    solver = {"class_path": "lit_diffusion.solvers.Euler", "init_args": {"steps": 4}}
    content["hyper_parameters"] |= {"process": flow, "solver": solver}
    torch.save(content, LAST)
    classifier(process=flow)


def test_a_classifier_guides_every_solver_that_is_compared(flow, capsys):
    options = "--classifier classifier.ckpt --weights raw --compare solvers --compare_steps 3"
    assert call(f"sample --checkpoint run --num 4 --out out {options}") == 0
    cells = json.loads(Path("out/comparison.json").read_text())["cells"]
    assert not any(cell["left_out"] for cell in cells)
    assert {cell["grid"] for cell in cells if cell["solver"] in ("DDIM", "Euler")} == {
        "LogSNR(noisiest=-10.0)"
    }


def test_a_classifier_guides_what_begins_at_an_image_where_noise_would_have_no_signal(flow, capsys):
    options = "--classifier classifier.ckpt --weights raw"
    assert call(f"sample --checkpoint run --num 1 --out out {options}") == 2
    assert "needs signal in x_t" in capsys.readouterr().err
    Image.new("L", (8, 8)).save("black.png")
    begun = f"{options} --init black.png --strength 0.5"
    assert call(f"sample --checkpoint run --num 1 --out begun {begun}") == 0


def test_a_scale_that_is_not_finite_is_refused(strong, capsys):
    classifier()
    options = "--classifier classifier.ckpt --guidance nan --weights raw"
    assert call(f"sample --checkpoint run --num 1 --out out {options}") == 2
    assert "--guidance must be finite, got nan" in capsys.readouterr().err
