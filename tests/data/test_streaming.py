import json
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.bucket import bucket
from support.pictures import class_folders, picture
from support.resuming import Recipe, assert_undisturbed, resume_on_two_ranks
from support.spawn import spawn
from support.streamed import digits, from_files, open_digits, png, write
from torchvision.transforms.functional import pil_to_tensor

from lit_diffusion.data.image_folder import ImageFolder
from lit_diffusion.data.streaming import StreamedImages, open_set

litdata = pytest.importorskip("litdata", reason="pip install -e '.[streaming]'")


@pytest.fixture(autouse=True)
def temporary_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    open_set.cache_clear()


@pytest.fixture
def root(tmp_path):
    return class_folders(tmp_path / "pictures", each=4)


@pytest.fixture(params=["folder", "bucket"])
def url(request, root, tmp_path, monkeypatch):
    """The same pictures as a set."""
    folder = from_files(tmp_path / "buckets" / "ours" / "set", root)
    if request.param == "folder":
        yield folder
    else:
        with bucket(tmp_path / "buckets", monkeypatch):
            yield "s3://ours/set"


def solid(numbers):
    """Pictures of 2x2 pixels, all of this value."""
    return [{"image": png(Image.new("L", (2, 2), n))} for n in numbers]


@pytest.mark.quick("folder-0")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_files_in_a_folder(root, url, workers):
    options = {"image_size": 16, "flip": True, "random_crop": True, "batch_size": 3, "seed": 4}
    streamed = StreamedImages(url, url, num_classes=2, num_workers=workers, **options)
    files = ImageFolder(str(root), str(root), num_workers=0, **options)
    streamed.prepare_data()
    for loaders in ("train_dataloader", "val_dataloader"):
        ours, theirs = (getattr(data, loaders)() for data in (streamed, files))
        for _ in range(2):  # persistent workers go on in another epoch
            for a, b in zip(ours, theirs, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
            if loaders == "train_dataloader":
                ours.sampler.set_epoch(1)
                theirs.sampler.set_epoch(1)
    assert streamed.num_classes == 2
    assert streamed.image_shape == files.image_shape


def test_of_a_bucket_only_the_index_comes_to_the_disk(tmp_path, monkeypatch):
    folder = tmp_path / "buckets" / "ours" / "set"
    write(folder, solid(range(8)), chunk_size=4)
    with bucket(tmp_path / "buckets", monkeypatch) as requests:
        data = StreamedImages("s3://ours/set", 2, image_size=2, channels=1, num_workers=0)
        assert len(data.images("train")) == 6
    sizes = [size for path, size in requests if path.endswith(".bin")]
    assert len(sizes) == 2 * (6 + 1)  # one more when it is opened
    assert max(sizes) < 200 < (folder / "chunk-0-0.bin").stat().st_size
    on_disk = {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert on_disk <= {".json", ".lock"}


def test_pictures_may_be_files_pillow_images_or_tensors(tmp_path):
    def image(kind, number):
        image = picture(number, size=(16, 16))
        return {"file": png(image), "pillow": image, "tensor": pil_to_tensor(image)}[kind]

    splits = [
        write(tmp_path / kind, [{"image": image(kind, n)} for n in range(7)])
        for kind in ("file", "pillow", "tensor")
    ]
    first, *others = [
        StreamedImages(each, 2, image_size=16, num_workers=0).images("train") for each in splits
    ]
    assert len(first) == 5
    assert all(torch.equal(first, other) for other in others)


def test_the_fingerprint_follows_the_set_and_the_crop_but_not_its_place(root, tmp_path):
    def fingerprint(folder, size=16):
        return StreamedImages(str(folder), 2, size).fingerprint("train")

    first = Path(from_files(tmp_path / "a", root))
    before = fingerprint(first)
    moved = first.rename(tmp_path / "b")
    assert fingerprint(moved) == before
    assert fingerprint(moved, size=8) != before
    assert fingerprint(from_files(tmp_path / "c", root)) != before  # written at another time


@pytest.mark.slow
def test_a_run_that_died_in_its_second_epoch_ends_as_one_that_did_not(tmp_path):
    recipe = Recipe(("EMA", "NoiseLevelLoss"), (2, 0), data=digits(tmp_path / "set"))
    assert_undisturbed(tmp_path, recipe, 8)


@pytest.mark.slow
def test_a_run_that_died_on_two_ranks_ends_as_one_that_did_not(tmp_path):
    digits(tmp_path / "set")
    spawn(resume_on_two_ranks, 2, tmp_path, 8, 1, open_digits(str(tmp_path / "set")))


def test_what_holds_no_set_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"none holds no index.json: write a set there"):
        StreamedImages(str(tmp_path / "none"), 2, 16).prepare_data()
    (tmp_path / "index.json").write_text(json.dumps({"chunks": []}))
    with pytest.raises(ValueError, match="cannot be opened as a set of litdata"):
        StreamedImages(str(tmp_path), 2, 16).prepare_data()
    missing = pytest.raises(ValueError, match=r"s3://ours/none cannot be opened.*404")
    with bucket(tmp_path, monkeypatch), missing:
        StreamedImages("s3://ours/none", 2, 16).prepare_data()


SOLID = solid(range(9))


def edit_index(folder, edit):
    index = json.loads((folder / "index.json").read_text())
    edit(index)
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        (SOLID, {"num_classes": 2}, r"Sample \d of .*set has no 'label', but \['image'\]"),
        ([1] * 9, {}, "has no 'image', but int: samples must be dictionaries"),
        ([{**s, "label": 2} for s in SOLID], {"num_classes": 2}, r"has the label 2, .* \[0, 2\)"),
        (SOLID, {"image_size": 3}, "is only 2 pixels .* less than 3"),
        (SOLID, {"channels": 3}, "has mode L, not RGB: .*strict=false"),
        ([{"image": {1, 2}}] * 9, {}, "samples of the format 'pickle'"),
        ([{"image": torch.zeros(1, 2, 2)}] * 9, {}, r"a tensor must be uint8, got torch.float32"),
        ([{"image": b"no picture"}] * 9, {}, r"Sample \d of .*set cannot be read \(cannot"),
    ],
)
def test_sets_that_do_not_fit_are_named_before_training(tmp_path, samples, options, message):
    folder = write(tmp_path / "set", samples)
    options = {"val": 2, "image_size": 2, "channels": 1} | options
    with pytest.raises((ValueError, OSError), match=message):
        StreamedImages(folder, **options).prepare_data()


@pytest.mark.parametrize(
    "data_format",
    ["pickle", "graph", "graph:pickle", "bytes:pickle", "image:pickle", "file:graph"],
)
def test_code_in_a_set_is_not_run(tmp_path, data_format):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    folder = Path(write(tmp_path / "set", [{"image": pickle.dumps(Trap()), "label": 0}] * 3))
    edit_index(folder, lambda index: index["config"]["data_format"].__setitem__(0, data_format))
    with pytest.raises(ValueError, match=f"format '{data_format}'.* write images as bytes"):
        StreamedImages(str(folder), 1, 2).prepare_data()
    assert not (tmp_path / "sprung").exists()
    reader = litdata.StreamingDataset(str(folder), str(tmp_path / "theirs"))
    with suppress(Exception):
        reader[0]
    assert (tmp_path / "sprung").exists()  # the trap works


def test_modules_that_an_index_names_are_not_imported(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nfactory = dict\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = Path(write(tmp_path / "set", solid(range(3))))

    def set_trap(index):
        version, spec = json.loads(index["config"]["data_spec"])
        trap = {"default_factory_module": "trap", "default_factory_name": "factory"}
        trap["dict_context"] = json.loads(spec["context"])
        spec |= {"type": "collections.defaultdict", "context": trap}
        index["config"]["data_spec"] = json.dumps([version, spec])

    edit_index(folder, set_trap)
    with pytest.raises(ValueError, match=r"type 'collections\.defaultdict'"):
        StreamedImages(str(folder), 1, 2, channels=1).prepare_data()
    assert not (tmp_path / "sprung").exists()
    litdata.StreamingDataset(str(folder), str(tmp_path / "theirs"))[0]
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["../other/chunk-0-0.bin", "/etc/passwd"])
def test_files_elsewhere_are_not_read(tmp_path, name):
    folder = Path(write(tmp_path / "set", solid(range(3))))
    write(tmp_path / "other", solid(range(3)))
    edit_index(folder, lambda index: index["chunks"][0].update(filename=name))
    with pytest.raises(ValueError, match=r"a chunk called .* outside its folder"):
        StreamedImages(str(folder), 1, 2, channels=1).prepare_data()


def test_missing_and_cut_chunks_are_named(tmp_path):
    folder = Path(write(tmp_path / "set", SOLID, chunk_size=3))
    (folder / "chunk-0-1.bin").unlink()
    last = folder / "chunk-0-2.bin"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(FileNotFoundError, match=r"lacks 2 of 3 chunks.* such as chunk-0-1.bin"):
        StreamedImages(str(folder), 2, 2, channels=1).prepare_data()


def test_an_index_of_more_samples_than_fit_in_a_chunk_is_refused(tmp_path):
    """It would make a list of all of them, whatever memory that takes."""
    folder = Path(write(tmp_path / "set", SOLID, chunk_size=3))
    edit_index(folder, lambda index: index["chunks"][2].update(chunk_size=10**6))
    with pytest.raises(ValueError, match=r"chunk-0-2\.bin is too small for its samples"):
        StreamedImages(str(folder), str(folder), 2, channels=1).prepare_data()


PAGE = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text()


def file_of_page(name):
    """A file that the page writes."""
    return PAGE.split(f"cat > {name} <<'END'\n")[1].split("END\n")[0]


@pytest.mark.slow
def test_the_script_shown_writes_a_set_of_a_folder(folder):
    class_folders(folder / "faces", each=3)
    (folder / "chunks.py").write_text(file_of_page("chunks.py"))
    subprocess.run([sys.executable, "chunks.py"], check=True, timeout=300)
    files = ImageFolder("faces", "faces", 16, num_workers=0)
    data = StreamedImages("chunks", "chunks", 16, num_classes=2, num_workers=0)
    data.prepare_data()

    for ours, theirs in zip(data.in_order("val"), files.in_order("val"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
