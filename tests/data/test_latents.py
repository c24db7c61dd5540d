import json

import pytest
import torch
from lightning.pytorch import seed_everything
from support.plain_module import assert_same_bits, make_trainer
from support.resuming import Death, DieAfter
from support.tiny_diffusion import TinyNetwork, tiny_diffusion

from lit_diffusion.callbacks import EMA
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.data.latents import LatentIndex, Latents
from lit_diffusion.solvers import DDIM


class MeanCodec(PixelCodec):
    """As far as Latents know, the VAE that wrote them; it encodes as `VAECodec` does."""

    bounded, sha256 = False, "a" * 64

    def encoded_shape(self, image_shape):
        return 4, image_shape[1] // 2, image_shape[2] // 2

    def encode(self, images):
        return images.float().chunk(2, dim=1)[0]

    def encode_for_training(self, images):
        mean, logvar = images.float().chunk(2, dim=1)
        return mean + (0.5 * logvar).exp() * torch.randn_like(mean)


def write(folder, num=23, shard_size=5, flips=True, **changes):
    """Latents of which the first number is the image's, negative where it is mirrored."""
    folder.mkdir()
    values = {"num": num, "shard_size": shard_size, "flips": flips, "images": "f" * 16}
    values |= {"image_shape": (3, 8, 8), "classes": ("cat", "dog")}
    index = LatentIndex(**(values | {"vae": "small", "vae_sha256": "a" * 64} | changes))
    index.write(folder)
    generator = torch.Generator().manual_seed(0)
    for name, part, flip in index.shards():
        moments = torch.randn(len(part), 8, 4, 4, generator=generator)
        moments[:, 0, 0, 0] = torch.tensor(part) * (-1 if flip else 1)
        index.write_shard(folder / name, moments, torch.tensor(part) % 2)
    return str(folder)


def firsts(batch):
    return batch[0][:, 0, 0, 0].tolist()


def test_each_image_is_in_one_split_with_its_label(tmp_path):
    data = Latents(write(tmp_path / "a"), val=7, batch_size=4, num_workers=0)
    images = []
    for split, count in (("train", 16), ("val", 7)):
        batches = list(data.in_order(split))
        part = [n for batch in batches for n in firsts(batch)]
        labels = torch.cat([labels for _, labels, _ in batches])
        assert labels.tolist() == [n % 2 for n in part]
        assert torch.equal(torch.cat([index for *_, index in batches]), torch.arange(count))
        images += part
    assert sorted(images) == list(range(23))
    assert batches[0][0].dtype == torch.float16
    assert batches[0][0].shape == (4, 8, 4, 4)


def test_half_of_the_training_images_are_mirrored_anew_in_each_epoch(tmp_path):
    data = Latents(write(tmp_path / "a"), val=1, batch_size=1, num_workers=0, seed=0)
    loader = data.train_dataloader()
    epochs = []
    for epoch in range(12):
        loader.sampler.set_epoch(epoch)
        epochs.append({abs(n): n for batch in loader for n in firsts(batch) if n})
    mirrored = [n < 0 for epoch in epochs for n in epoch.values()]
    assert 0.4 < sum(mirrored) / len(mirrored) < 0.6
    assert len({tuple(sorted(epoch.values())) for epoch in epochs}) > 6


@pytest.mark.parametrize(
    ("name", "value"),
    [("image_shape", (3, 16, 16)), ("vae_sha256", "b" * 64), ("classes", ("cat",))],
)
def test_folders_that_do_not_fit_together_are_refused(tmp_path, name, value):
    train, val = write(tmp_path / "a"), write(tmp_path / "b", **{name: value})
    with pytest.raises(ValueError, match=f"^{name} is .*; encode both alike"):
        Latents(train, val).check()


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="write latents there with `lit-diffusion encode"):
        Latents(str(tmp_path / "none"), val=2).check()
    folder = write(tmp_path / "a")
    (tmp_path / "a" / "flipped-00003.safetensors").unlink()
    cut = tmp_path / "a" / "latents-00002.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(ValueError, match="lacks 2 of 10 shards, such as latents-00002"):
        Latents(folder, val=2).check()
    with pytest.raises(ValueError, match="val=23 images cannot be held out of the 23"):
        Latents(write(tmp_path / "b"), val=23).dataset("val")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("num", odd) for odd in ("x", -1, True, 10**18)],
        *[("shard_size", 0), ("image_shape", [3]), ("image_shape", [3, 16, 1e9])],
        *[("classes", [1]), ("vae_sha256", 5), ("flips", "yes"), ("wings", 2)],
    ],
)
def test_an_index_with_odd_values_is_damaged(tmp_path, name, value):
    folder = write(tmp_path / "a")
    index = json.loads((tmp_path / "a" / "index.json").read_text())
    (tmp_path / "a" / "index.json").write_text(json.dumps(index | {name: value}))
    with pytest.raises(ValueError, match="is damaged or no index of latents"):
        Latents(folder, val=2).check()


def test_an_index_of_another_number_of_latents_is_refused(tmp_path):
    folder = write(tmp_path / "a")
    index = json.loads((tmp_path / "a" / "index.json").read_text())
    (tmp_path / "a" / "index.json").write_text(json.dumps(index | {"num": 22}))
    with pytest.raises(ValueError, match=r"holds 23 latents, but index\.json there says 22"):
        Latents(folder, val=2).dataset("val")


def test_the_fingerprint_follows_the_held_out_latents(tmp_path):
    folder, other = write(tmp_path / "a"), write(tmp_path / "b", images="e" * 16)
    prints = [Latents(folder, val=n).fingerprint(s) for n in (2, 3) for s in ("train", "val")]
    assert len(set(prints)) == 4
    train = Latents(folder, val=other).fingerprint("train")
    assert train == Latents(folder, val=folder).fingerprint("val")  # all latents of one folder


def module():
    latents = {"network": TinyNetwork(4), "image_shape": (4, 4, 4), "codec": MeanCodec()}
    return tiny_diffusion(**latents, num_classes=2, solver=DDIM(2, clip=False))


def test_a_codec_that_did_not_encode_them_is_refused(tmp_path):
    data = Latents(write(tmp_path / "a", vae_sha256="b" * 64), val=3, batch_size=4, num_workers=0)
    with pytest.raises(ValueError, match=f"SHA-256 {'b' * 64}.* with {'a' * 64}"):
        make_trainer(tmp_path, max_steps=1).fit(module(), data)


def fit(folder, latents, *extra, workers=0, **options):
    seed_everything(3)
    data = Latents(latents, val=3, batch_size=4, num_workers=workers)
    trainer = make_trainer(
        folder, *extra, EMA((0.9,)), max_steps=8, max_epochs=-1, enable_checkpointing=bool(extra)
    )
    trainer.fit(module(), data, **options)
    trainer.save_checkpoint(folder / "end.ckpt")
    return torch.load(folder / "end.ckpt", weights_only=True)


def test_a_run_that_died_in_its_second_epoch_ends_as_one_that_did_not(tmp_path):
    latents, died = write(tmp_path / "a"), tmp_path / "died"
    whole = fit(tmp_path / "whole", latents)
    with pytest.raises(Death):
        fit(died, latents, DieAfter(died, 6))
    again = fit(died, latents, workers=1, ckpt_path=died / "last.ckpt")
    for key in ("state_dict", "optimizer_states", "callbacks"):
        assert_same_bits(again[key], whole[key])
