import torch
from sklearn.datasets import load_sample_images

from lit_diffusion.data.photo_patches import TRAIN_ROWS, PhotoPatches

PHOTOS = [torch.tensor(photo).permute(2, 0, 1) for photo in load_sample_images().images]


def epoch(data, number):
    """Images, labels and places of one training epoch, by place."""
    loader = data.train_dataloader()
    loader.sampler.set_epoch(number)
    images, labels, index = (torch.cat(parts) for parts in zip(*loader, strict=True))
    order = index.argsort()
    return images[order], labels[order], index[order]


def row_of(crop, label):
    """The row of the photograph that a crop starts at."""
    photo = PHOTOS[label]
    starts = photo[:, :-31].unfold(2, 32, 1)[..., :4] == crop[:, None, None, 0, :4]
    places = starts.all(-1).all(0).nonzero().tolist()
    (place,) = [y for y, x in places if torch.equal(photo[:, y : y + 32, x : x + 32], crop)]
    return place


def test_crops_are_pieces_of_the_photograph_of_their_label_and_share_no_pixel_with_held_out_ones():
    data, rows = PhotoPatches(epoch_size=8, num_val=8, batch_size=8), []
    for images, labels, _ in (epoch(data, 0), next(iter(data.val_dataloader()))):
        assert images.shape == (8, 3, 32, 32)
        assert set(labels.tolist()) == {0, 1}
        rows.append([row_of(*crop) for crop in zip(images, labels.tolist(), strict=True)])
    assert max(rows[0]) + 32 <= TRAIN_ROWS <= min(rows[1])


def test_every_epoch_has_new_crops_and_each_run_of_a_seed_the_same():
    a, b = (PhotoPatches(epoch_size=32, batch_size=8, seed=1) for _ in range(2))
    assert torch.equal(epoch(a, 3)[0], epoch(b, 3)[0])
    assert not torch.equal(epoch(a, 3)[0], epoch(a, 4)[0])
    assert not torch.equal(epoch(a, 3)[0], epoch(PhotoPatches(32, batch_size=8, seed=2), 3)[0])


def test_held_out_crops_are_the_same_whatever_the_seed():
    assert torch.equal(*(PhotoPatches(num_val=16, seed=s).images("val") for s in (1, 2)))
