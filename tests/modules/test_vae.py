import json
import math
import os

import pytest
import torch
from lightning.pytorch import Trainer
from support import small_vae
from support.plain_module import make_trainer
from support.small_vae import SCALE
from support.tiny_diffusion import TinyNetwork, tiny_diffusion

pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")

from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from lit_diffusion import load
from lit_diffusion.callbacks import EMA
from lit_diffusion.checkpoints.saving import AtomicCheckpointIO
from lit_diffusion.data.photo_patches import PhotoPatches
from lit_diffusion.modules import vae as vae_file
from lit_diffusion.modules.vae import WEIGHTS, VAECodec
from lit_diffusion.solvers import DDIM

IMAGES = torch.randint(
    0, 256, (5, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(small_vae.save(tmp_path_factory.mktemp("vae") / "small"))


@pytest.fixture
def codec(folder):
    return VAECodec(folder, SCALE, shift=0.25, batch_size=2)


@torch.no_grad()
def test_the_round_trip_is_that_of_diffusers(codec, folder):
    theirs = AutoencoderKL.from_pretrained(folder).eval()
    posterior = theirs.encode(IMAGES / 127.5 - 1).latent_dist
    x0 = codec.encode(IMAGES)
    torch.testing.assert_close(x0, (posterior.mean - 0.25) * SCALE)
    pixels = (theirs.decode(posterior.mean).sample / 2 + 0.5).clamp(0, 1) * 255
    assert (codec.decode(x0).float() - pixels).abs().max() <= 0.51
    torch.manual_seed(3)
    draw = posterior.mean + posterior.std * torch.randn(posterior.mean.shape)
    torch.manual_seed(3)
    torch.testing.assert_close(codec.encode_for_training(IMAGES), (draw - 0.25) * SCALE)


@pytest.mark.parametrize(
    ("factors", "expected"),
    [({"scaling_factor": 1.5305, "shift_factor": 0.0609}, (1.5305, 0.0609)), ({}, (0.18215, 0.0))],
)
def test_scale_and_shift_are_those_of_the_folder_unless_given(tmp_path, factors, expected):
    file = small_vae.save(tmp_path / "vae") / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if "factor" not in k}
    file.write_text(json.dumps(config | factors))
    codec = VAECodec(str(file.parent))
    assert (codec.scale, codec.shift) == expected
    codec = VAECodec(str(file.parent), 0.5, shift=0.0)
    assert (codec.scale, codec.shift) == (0.5, 0.0)


def test_shapes_are_those_of_what_is_encoded(codec):
    assert codec.encoded_shape((3, 16, 16)) == tuple(codec.encode(IMAGES).shape[1:]) == (4, 8, 8)
    with pytest.raises(ValueError, match="multiples of 2"):
        codec.encoded_shape((3, 15, 16))
    with pytest.raises(ValueError, match="of 3 channels"):
        codec.encoded_shape((1, 16, 16))


def test_moments_stand_for_their_images_from_the_first_draw_on_which_loads_the_weights(codec):
    torch.manual_seed(1)
    first = codec.encode_for_training(IMAGES)
    moments = codec.moments(IMAGES)
    torch.manual_seed(1)
    assert torch.equal(codec.encode_for_training(moments), first)
    assert torch.equal(codec.encode(moments), codec.encode(IMAGES))
    assert not torch.equal(first, codec.encode(moments))
    for wrong in (moments[:, :4], IMAGES.long()):
        with pytest.raises(TypeError, match="moments of 8 channels"):
            codec.encode(wrong)


def test_it_is_in_float32_under_autocast(codec):
    plain = codec.encode(IMAGES)
    decoded = codec.decode(plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(codec.encode(IMAGES), plain)
        assert torch.equal(codec.decode(plain), decoded)


def latent_module(codec, **changes):
    plain = {
        "network": TinyNetwork(4),
        "image_shape": (4, 16, 16),
        "num_classes": None,
        "label_dropout": 0.0,
        "solver": DDIM(2, clip=False),
    }
    return tiny_diffusion(codec=codec, **(plain | changes))


def test_training_draws_and_validation_does_not(codec):
    module = latent_module(codec)
    batch = (IMAGES.repeat(1, 1, 2, 2), torch.full((5,), -1), torch.arange(5))
    encoded, x0s = codec.encode(batch[0]), []
    module.per_sample_loss = lambda x0, *_: x0s.append(x0) or x0.flatten(1).mean(1)
    module.log = module._log_training = lambda *_, **options: None
    module._trainer = Trainer(logger=False)
    module.validation_step(batch, 0)
    module.training_step(batch, 0)
    assert torch.equal(x0s[0], encoded)
    assert not torch.equal(x0s[1], encoded)


def fitted(codec, folder):
    ema = EMA((0.9,))
    options = {"max_steps": 2, "limit_val_batches": 1, "plugins": [AtomicCheckpointIO()]}
    trainer, module = make_trainer(folder, ema, **options), latent_module(codec)
    trainer.fit(module, PhotoPatches(batch_size=4, epoch_size=8, num_val=4))
    trainer.save_checkpoint(folder / "run.ckpt")
    return module, ema


def test_its_weights_are_nowhere_but_in_its_folder(codec, tmp_path):
    module, ema = fitted(codec, tmp_path)
    assert len(module.generate([0, 1])) == 2
    network = {f"network.{name}" for name in module.network.state_dict()}
    assert {name for name, _ in module.named_parameters()} == network
    assert module.state_dict().keys() == network
    assert ema.state_dict()["shadows"][0].keys() <= network
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == network
    assert checkpoint["codec"] == {"name": "small", "sha256": codec.sha256}
    assert not any(parameter.requires_grad for parameter in codec._vae.parameters())
    assert not codec._vae.training


def test_another_vae_of_the_same_name_is_refused(codec, folder, tmp_path):
    fitted(codec, tmp_path)
    small_vae.save(tmp_path / "small")
    state = load_file(tmp_path / "small" / WEIGHTS)
    state["decoder.conv_out.bias"] += 1
    save_file(state, tmp_path / "small" / WEIGHTS, metadata={"format": "pt"})
    wrong = VAECodec(str(tmp_path / "small"), SCALE)
    assert wrong.sha256 != codec.sha256
    message = rf"VAE small with SHA-256 {codec.sha256}.*with {wrong.sha256}"
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "run.ckpt", module=latent_module(wrong))
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, max_steps=3).fit(
            latent_module(wrong),
            PhotoPatches(batch_size=4, epoch_size=8, num_val=4),
            ckpt_path=tmp_path / "run.ckpt",
        )
    moved = latent_module(VAECodec(folder, SCALE))
    load(tmp_path / "run.ckpt", module=moved)


def test_what_is_missing_is_named(folder, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"empty holds no config.json and no {WEIGHTS}"):
        VAECodec(str(tmp_path / "empty"))
    for arguments in ({"scale": 0.0}, {"scale": math.inf}, {"shift": math.nan}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="batch_size >= 1 must hold"):
            VAECodec(folder, **arguments)
    monkeypatch.setattr(vae_file, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[diffusers\]'"):
        VAECodec(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layers_per_block", 10**30, "no config of an Autoenc"),  # would take for ever to build
        ("shift_factor", 10**400, "no config of an Autoenc"),
        ("scaling_factor", "x", "no config of an Autoenc"),
        ("_class_name", "VQModel", "contains a VQModel, not an AutoencoderKL"),
    ],
)
def test_a_config_with_odd_values_or_of_something_else_is_refused(tmp_path, name, value, message):
    file = small_vae.save(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=message):
        VAECodec(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, name: state.pop(name), "decoder.conv_out.bias and 0 more are missing"),
        (lambda state, name: state[name].fill_(math.nan), "decoder.conv_out.bias is not"),
    ],
)
def test_weights_that_are_not_all_there_or_not_finite_are_refused(tmp_path, change, message):
    state = load_file(small_vae.save(tmp_path) / WEIGHTS)
    change(state, "decoder.conv_out.bias")
    save_file(state, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        VAECodec(str(tmp_path)).encode(IMAGES)


def test_weights_of_several_files_are_refused(tmp_path):
    """diffusers prefers files that an index names, whose hash no checkpoint would have."""
    state = load_file(small_vae.save(tmp_path) / WEIGHTS)
    part = {"metadata": {}, "weight_map": dict.fromkeys(state, "part.safetensors")}
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps(part))
    os.mkfifo(tmp_path / "part.safetensors")
    with pytest.raises(ValueError, match=r"index\.json lists weight files other than .* delete it"):
        VAECodec(str(tmp_path))
