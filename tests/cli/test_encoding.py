import shutil

import pytest
import torch
from support import small_vae
from support.pictures import class_folders, save

pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")

from safetensors.torch import load_file, save_file

from lit_diffusion.cli.encoding import encode_shards, launcher_rank_and_world_size, plan_shards
from lit_diffusion.data.image_folder import ImageFolder
from lit_diffusion.data.latents import LatentIndex, Latents
from lit_diffusion.modules.vae import WEIGHTS, VAECodec

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of seven pictures, and a VAE."""
    folder = tmp_path_factory.mktemp("made")
    class_folders(folder / "pictures", "ab", each=3)
    save(folder / "pictures" / "b" / "9.png", seed=9, size=(16, 30))
    small_vae.save(folder / "vae")
    return folder


def opened(made, size=16):
    cache = str(made / "cache")
    folder = str(made / "pictures")
    images = ImageFolder(folder, folder, size, strict=False, num_workers=0, cache_dir=cache)
    return images, VAECodec(str(made / "vae"), batch_size=2)


def encode(made, out, place=(0, 1), flips=True, shard_size=3):
    images, codec = opened(made)
    index = plan_shards(images, codec, out, shard_size, flips)
    return encode_shards(images, codec, out, index, CPU, *place)


def content(out):
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


@pytest.fixture(scope="module")
def whole(made):
    assert encode(made, made / "whole") == 6
    return made / "whole"


def test_shards_hold_the_moments_of_the_crops_that_training_on_images_sees(made, whole):
    images, codec = opened(made)
    pixels = images.images("train")
    shards = [load_file(whole / f"latents-{i:05d}.safetensors") for i in range(3)]
    assert [len(shard["labels"]) for shard in shards] == [3, 3, 1]
    found = torch.cat([shard["moments"] for shard in shards])
    torch.testing.assert_close(found.float(), codec.moments(pixels), rtol=1e-3, atol=1e-3)
    assert torch.cat([shard["labels"] for shard in shards]).tolist() == [0, 0, 0, 1, 1, 1, 1]
    mirrored = load_file(whole / "flipped-00001.safetensors")["moments"].float()
    expected = codec.moments(pixels[3:6].flip(-1))
    torch.testing.assert_close(mirrored, expected, rtol=1e-3, atol=1e-3)
    data = Latents(str(whole), val=2)
    data.check()
    assert (data.image_shape, data.class_names) == ((3, 16, 16), ("a", "b"))
    assert data.vae_sha256 == codec.sha256


def test_a_call_that_was_stopped_goes_on_and_gives_the_same_files(
    made, whole, tmp_path, monkeypatch
):
    written = []

    def write_shard(self, path, *tensors):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        unpatched(self, path, *tensors)

    unpatched = LatentIndex.write_shard
    monkeypatch.setattr(LatentIndex, "write_shard", write_shard)
    with pytest.raises(KeyboardInterrupt):
        encode(made, tmp_path / "out")
    monkeypatch.setattr(LatentIndex, "write_shard", unpatched)
    (tmp_path / "out" / written[0]).write_bytes(b"cut")
    before = (tmp_path / "out" / written[1]).stat().st_mtime_ns
    assert encode(made, tmp_path / "out") == 4
    assert content(tmp_path / "out") == content(whole)
    assert (tmp_path / "out" / written[1]).stat().st_mtime_ns == before


def test_two_processes_write_what_one_does(made, whole, tmp_path):
    assert [encode(made, tmp_path / "out", (rank, 2)) for rank in (1, 0)] == [3, 3]
    assert content(tmp_path / "out") == content(whole)


def test_flips_can_be_added_and_stay(made, whole, tmp_path):
    assert encode(made, tmp_path / "out", flips=False) == 3
    assert not LatentIndex.read(tmp_path / "out").flips
    assert encode(made, tmp_path / "out") == 3
    assert encode(made, tmp_path / "out", flips=False) == 0
    assert content(tmp_path / "out") == content(whole)


def test_a_folder_of_other_latents_is_left_alone(made, whole, tmp_path):
    before = content(whole)
    with pytest.raises(ValueError, match="whose shard_size is 3, and this call's is 2; choose"):
        encode(made, whole, shard_size=2)
    images, codec = opened(made, size=8)
    with pytest.raises(ValueError, match="choose another --out"):
        plan_shards(images, codec, whole, 3, True)
    small_vae.save(tmp_path / "vae", channels=(8, 16))
    with pytest.raises(ValueError, match="whose vae_sha256 is"):
        plan_shards(opened(made)[0], VAECodec(str(tmp_path / "vae")), whole, 3, True)
    assert content(whole) == before


@pytest.mark.parametrize("stranger", ["others/latents-00001", "out/latents-00000"])
def test_a_shard_of_other_latents_or_another_place_is_written_anew(made, whole, tmp_path, stranger):
    """As where an index is removed, and another VAE encodes into the folder."""
    shutil.copytree(whole, tmp_path / "out")
    small_vae.save(tmp_path / "vae", channels=(8, 32))
    images, codec = opened(made)[0], VAECodec(str(tmp_path / "vae"))
    index = plan_shards(images, codec, tmp_path / "others", 3, True)
    assert encode_shards(images, codec, tmp_path / "others", index, CPU) == 6
    shutil.copy(tmp_path / f"{stranger}.safetensors", tmp_path / "out/latents-00001.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 of 6 shards.* such as latents-00001"):
        Latents(str(tmp_path / "out"), val=2).check()
    assert encode(made, tmp_path / "out") == 1
    assert content(tmp_path / "out") == content(whole)


def test_moments_that_are_not_finite_are_refused(made, tmp_path):
    """Of an encoder that has a weight that is none."""
    small_vae.save(tmp_path / "vae")
    state = load_file(tmp_path / "vae" / WEIGHTS)
    state["encoder.conv_out.bias"][0] = float("nan")
    save_file(state, tmp_path / "vae" / WEIGHTS, metadata={"format": "pt"})
    images, codec = opened(made)[0], VAECodec(str(tmp_path / "vae"))
    index = plan_shards(images, codec, tmp_path / "out", 3, False)
    with pytest.raises(ValueError, match=r"latents-00000.* finite .*the VAE vae gives others"):
        encode_shards(images, codec, tmp_path / "out", index, CPU)
    assert list(content(tmp_path / "out")) == ["index.json"]


def test_a_file_in_the_place_of_the_folder_is_kept(made, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="out is a file; name a folder"):
        encode(made, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_sizes_that_the_vae_cannot_halve_are_refused(made, tmp_path):
    with pytest.raises(ValueError, match="multiples of 2"):
        plan_shards(*opened(made, size=15), tmp_path / "out", 3, False)
    assert not (tmp_path / "out").exists()


def test_launchers_say_which_share_is_ours(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert launcher_rank_and_world_size() == (0, 1)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert launcher_rank_and_world_size() == (
        0,
        1,
    )  # the job's script, which nobody shares shards with
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert launcher_rank_and_world_size() == (1, 4)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert launcher_rank_and_world_size() == (2, 3)
