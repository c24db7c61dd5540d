import pytest
from support.rising import Rising, loader, trainer

from lit_diffusion.metrics.image_count import ImageCount, images_seen, read_count


@pytest.mark.parametrize("accumulated", [1, 3])
def test_images_are_counted_by_batches_whatever_makes_a_step(tmp_path, accumulated):
    module, run = Rising(), trainer(tmp_path, [], accumulate_grad_batches=accumulated)
    run.fit(module, loader(12, batch_size=2))
    assert images_seen(run) == 12


def test_images_before_a_resume_count(tmp_path):
    first, second = trainer(tmp_path, []), trainer(tmp_path, [], max_epochs=3)
    first.fit(Rising(), loader(12, batch_size=2))
    first.save_checkpoint(tmp_path / "c.ckpt")
    second.fit(Rising(), loader(12, batch_size=2), ckpt_path=tmp_path / "c.ckpt")
    assert images_seen(second) == 36


def test_batches_of_another_size_count_from_where_they_begin():
    first = ImageCount(0, 0, 64)
    assert first.resumed(100, 64) == first
    assert first.resumed(100, 32).resumed(110, 16).at(111) == 6400 + 320 + 16


def test_images_that_are_not_known_once_are_not_known_any_more():
    assert ImageCount(0, 0, None).at(10) is None
    assert ImageCount(0, 0, None).resumed(10, 64).at(20) is None
    assert ImageCount(0, 0, 64).resumed(10, None).at(20) is None


def test_images_of_a_loader_without_a_batch_size_are_not_known(tmp_path):
    run = trainer(tmp_path, [])
    run.fit(Rising(), list(loader(4)))
    assert images_seen(run) is None


def test_a_count_is_read_as_a_checkpoint_holds_it():
    count = ImageCount(100, 7, None)
    assert read_count(list(count)) == count
    assert read_count(None) is None


@pytest.mark.parametrize("state", [[1, 2], [1, 2, "3"], [-1, 0, 4], [True, 0, 4], "123", {}])
def test_what_is_no_count_is_refused(state):
    with pytest.raises(ValueError, match="images_seen must be three counts"):
        read_count(state)
