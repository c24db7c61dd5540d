"""The teacher of REPA: a small DINOv2 with random weights, in the layout of transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support import small_encoder
from support.commands import call
from support.plain_module import assert_same_bits, make_trainer
from support.small_encoder import MEAN, STD
from support.tiny_diffusion import images, tiny_diffusion

from lit_diffusion import load
from lit_diffusion.auxiliary_losses import PretrainedEncoder, RepresentationAlignment
from lit_diffusion.cli.init_weights import start_from
from lit_diffusion.protocols import NoisedBatch

CONFIGS = Path(__file__).parents[2] / "configs"
transformers = pytest.importorskip("transformers", reason="pip install -e '.[diffusers]'")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return small_encoder.save(tmp_path_factory.mktemp("encoders") / "dinov2")


def pixels(n=3, channels=3, size=28):
    generator = torch.Generator().manual_seed(0)
    shape = (n, channels, size, size)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def features(encoder, images, **arguments):
    teacher = PretrainedEncoder(str(encoder), **({"width": 16, "image_size": 28} | arguments))
    return teacher.features(None, NoisedBatch(None, None, None, None, None, images))


def normalized(images):
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images / 255 - mean) / std


@torch.no_grad()
@pytest.mark.parametrize("registers", [0, 3])
def test_features_are_the_patch_tokens_after_the_last_norm(tmp_path, registers):
    encoder = small_encoder.save(tmp_path / "encoder", registers=registers)
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    tokens = model(pixel_values=normalized(pixels())).last_hidden_state
    assert tokens.shape == (3, 1 + registers + 16, 16)
    expected = tokens[:, 1 + registers :].reshape(3, 4, 4, 16)
    torch.testing.assert_close(features(encoder, pixels()), expected)


def test_images_are_resized_and_normalized_as_for_the_encoder(encoder):
    """Against the image processor of transformers, which rounds the images after each axis."""
    teacher, received = PretrainedEncoder(str(encoder), width=16, image_size=28), []
    teacher._encoder[0].register_forward_pre_hook(
        lambda model, args, kwargs: received.append(kwargs["pixel_values"]), with_kwargs=True
    )
    images = pixels(size=44).float()
    images = torch.nn.functional.avg_pool2d(images, 5, 1).to(torch.uint8)  # without black and white
    teacher.features(None, NoisedBatch(None, None, None, None, None, images))
    processor = transformers.AutoImageProcessor.from_pretrained(encoder)
    size = {"height": 28, "width": 28}
    theirs = processor(images, size=size, do_center_crop=False, return_tensors="pt")
    atol = 2 * 0.51 / 255 / min(STD)
    torch.testing.assert_close(received[0], theirs["pixel_values"], rtol=0, atol=atol)


def test_gray_images_are_images_of_three_equal_channels(encoder):
    gray = pixels(channels=1)
    assert torch.equal(features(encoder, gray), features(encoder, gray.expand(-1, 3, -1, -1)))


def test_images_keep_their_precision_where_the_default_is_bfloat16(encoder):
    """As in a training step under bf16-true."""
    expected = features(encoder, pixels())
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(features(encoder, pixels()), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_code_in_the_folder_never_runs_and_nobody_is_asked_whether_it_may(
    encoder, tmp_path, monkeypatch
):
    copy = shutil.copytree(encoder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    auto_map = {"AutoConfig": "code.Dinov2Config", "AutoModel": "code.Dinov2Model"}
    (copy / "config.json").write_text(
        json.dumps(config | {"model_type": "other", "auto_map": auto_map})
    )
    (copy / "code.py").write_text("from transformers import Dinov2Config, Dinov2Model\n")
    monkeypatch.setattr("builtins.input", lambda question: "yes")
    with pytest.raises(ValueError, match="contains custom code"):
        features(copy, pixels())


def test_other_sizes_have_other_grids(encoder):
    assert features(encoder, pixels(size=8)).shape == (3, 4, 4, 16)
    assert features(encoder, pixels(size=8), image_size=42).shape == (3, 6, 6, 16)


def repa_module(encoder, **changes):
    teacher = PretrainedEncoder(str(encoder), width=16, image_size=28)
    loss = RepresentationAlignment("enter", 8, teacher, hidden=(8,))
    return tiny_diffusion(auxiliary_loss=loss, **changes)


def fitted(encoder, path, **options):
    module = repa_module(encoder)
    trainer = make_trainer(path, max_steps=2)
    trainer.fit(module, images(12, 6), **options)
    trainer.save_checkpoint(path / "run.ckpt")
    return module


def test_it_trains_a_projector_and_its_weights_are_nowhere_but_in_its_folder(encoder, tmp_path):
    before = repa_module(encoder).state_dict()
    assert set(before) > {"auxiliary_loss.teacher.sha256"}
    module = fitted(encoder, tmp_path)
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert not torch.equal(
        after["auxiliary_loss.projector.0.weight"], before["auxiliary_loss.projector.0.weight"]
    )
    assert {name.partition(".")[0] for name, _ in module.named_parameters()} == {
        "network",
        "auxiliary_loss",
    }
    assert not any("teacher" in name for name, _ in module.named_parameters())
    assert not any(p.requires_grad for p in module.auxiliary_loss.teacher._encoder[0].parameters())
    assert not module.auxiliary_loss.teacher._encoder[0].training


def test_the_random_state_is_left_alone(encoder):
    state = torch.get_rng_state()
    features(encoder, pixels())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_checkpoint_samples_without_the_folder_and_trains_on_with_the_same_encoder(
    encoder, tmp_path
):
    copy = shutil.copytree(encoder, tmp_path / "copy")
    module = fitted(copy, tmp_path)
    shutil.rmtree(copy)
    loaded = load(tmp_path / "run.ckpt", "raw", module=repa_module(copy))
    assert torch.equal(loaded.generate([0, 1]), module.eval().generate([0, 1]))
    resume = {"ckpt_path": tmp_path / "run.ckpt"}
    trainer = make_trainer(tmp_path, max_steps=3, max_epochs=-1)
    with pytest.raises(FileNotFoundError, match=r"holds no config.json and no model.safetensors"):
        trainer.fit(repa_module(copy), images(12, 6), **resume)
    small_encoder.save(copy, seed=1)
    trainer = make_trainer(tmp_path, max_steps=3, max_epochs=-1)
    with pytest.raises(ValueError, match=r"SHA-256 [0-9a-f]{64}, but .*; put the encoder of the"):
        trainer.fit(repa_module(copy), images(12, 6), **resume)
    small_encoder.save(copy, seed=0)
    make_trainer(tmp_path, max_steps=3, max_epochs=-1).fit(
        repa_module(copy), images(12, 6), **resume
    )


def test_a_run_that_starts_from_the_weights_of_another_may_have_another_teacher(encoder, tmp_path):
    module, source = repa_module(encoder), tmp_path / "source.ckpt"
    trainer = make_trainer(tmp_path, max_steps=1, max_epochs=-1)
    trainer.fit(module, images(6, 6))
    trainer.save_checkpoint(source)
    fresh = repa_module(encoder)
    text = start_from(fresh, str(source), {})
    assert "sha256" not in text
    assert not fresh.auxiliary_loss.teacher.sha256.any()
    projector = fresh.auxiliary_loss.projector.state_dict()
    assert_same_bits(projector, module.auxiliary_loss.projector.state_dict())


def test_a_folder_that_does_not_fit_is_named(encoder, tmp_path):
    with pytest.raises(ValueError, match="width must be 16 and image_size a multiple of 7"):
        features(encoder, pixels(), width=768)
    with pytest.raises(ValueError, match="got 16 and 30; change them"):
        features(encoder, pixels(), image_size=30)
    with pytest.raises(ValueError, match="width must be above 0"):
        PretrainedEncoder("none", width=0)
    copy = shutil.copytree(encoder, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"?")
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        features(copy, pixels())


def test_a_folder_of_another_kind_of_model_is_explained(encoder, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = transformers.BertConfig(**sizes, vocab_size=9, intermediate_size=16)
    copy = shutil.copytree(encoder, tmp_path / "copy")
    transformers.BertModel(text).save_pretrained(copy)
    with pytest.raises(ValueError, match=r"no config of a vision transformer .*patch_size"):
        features(copy, pixels())
    copy = shutil.copytree(encoder, tmp_path / "gray")
    preprocessing = json.loads((copy / "preprocessor_config.json").read_text())
    preprocessing["image_mean"] = [0.5]
    (copy / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    with pytest.raises(ValueError, match="no preprocessing of an image encoder"):
        features(copy, pixels())


def test_latents_have_no_images(encoder):
    with pytest.raises(
        ValueError, match=r"needs uint8 images, but .*float16 \(2, 8, 4, 4\); train"
    ):
        features(encoder, torch.zeros(2, 8, 4, 4, dtype=torch.float16))


@pytest.mark.slow
def test_a_run_of_the_command_line_samples_and_exports_without_the_encoder(encoder, folder):
    """Also a checkpoint alone, outside of its run folder."""
    shutil.copytree(encoder, "dinov2")
    teacher = "teacher: {class_path: lit_diffusion.auxiliary_losses.PretrainedEncoder, init_args: "
    teacher += "{path: dinov2, width: 16, image_size: 28}}"
    Path("repa.yaml").write_text(
        "model: {init_args: {auxiliary_loss: {class_path: "
        "lit_diffusion.auxiliary_losses.RepresentationAlignment, init_args: "
        f"{{block: middle_block, width: 64, hidden: [8], {teacher}}}}}}}}}"
    )
    run = (
        "--trainer.max_steps=2 --trainer.callbacks.FIDEvaluation=null --trainer.limit_val_batches=1"
    )
    run += " --trainer.callbacks.SampleGrid=null --trainer.default_root_dir=run"
    assert call(f"fit --config {CONFIGS}/digits-ablation.yaml --config repa.yaml {run}") == 0
    shutil.rmtree("dinov2")
    shutil.copy("run/checkpoints/last.ckpt", "alone.ckpt")
    assert call("convert export --checkpoint run --out exported --no_comparison") == 0
    images = [load(path).generate([0, 1]) for path in ("run", "alone.ckpt", "exported")]
    assert torch.equal(images[0], images[1])
    assert torch.equal(images[0], images[2])
