import pickle
from io import BytesIO

import pytest
import torch

from lit_diffusion.pickle_extent import check_pickle, check_pickles


def nested(levels):
    """A tuple of the tuple below it, twice."""
    value = ()
    for _ in range(levels):
        value = (value, value)
    return value


def walk(value, most=1000, protocol=2):
    check_pickle(BytesIO(pickle.dumps(value, protocol)), most)


def test_what_holds_itself_too_often_is_refused():
    walk({nested(5): 1})
    for value in (nested(60), [nested(60)], {"a": {"b": nested(60)}}):
        with pytest.raises(ValueError, match="hold each other too often"):
            walk(value)


def test_a_list_that_is_used_again_counts_with_all_that_was_put_into_it():
    numbers = list(range(100))
    walk([numbers] * 5)
    with pytest.raises(ValueError, match="too often"):
        walk([numbers] * 50)
    with pytest.raises(ValueError, match="too often"):
        walk([dict.fromkeys(range(100))] * 50)
    with pytest.raises(ValueError, match="too often"):
        walk(["x" * 10**5] * 50)


def test_what_is_large_but_not_repeated_passes():
    walk({"numbers": tuple(range(10**5)), "text": "x" * 10**6}, most=100)


@pytest.mark.parametrize("data", [b"", b"text", b"\x80\x02h\x00.", b"\x80\x02(\x85.", b"0."])
def test_nonsense_is_refused(data):
    with pytest.raises(pickle.UnpicklingError):
        check_pickle(BytesIO(data), 10)


@pytest.mark.parametrize("archive", [True, False])
def test_files_of_torch_are_read_old_and_new(tmp_path, archive):
    path = tmp_path / "x.ckpt"
    for levels in (2, 40):
        content = {"a": torch.ones(2), "b": nested(levels)}
        torch.save(content, path, _use_new_zipfile_serialization=archive)
        if levels == 2:
            check_pickles(path, 1000)
        else:
            with pytest.raises(ValueError, match="too often"):
                check_pickles(path, 1000)
