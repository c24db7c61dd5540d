import argparse

import pytest

from lit_diffusion.cli.options import Parser, add_sampling, integers


@pytest.mark.parametrize(
    ("text", "expected"), [("0", [0]), ("0,1,2", [0, 1, 2]), ("-1,3", [-1, 3])]
)
def test_labels_are_comma_separated_integers(text, expected):
    assert integers(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1.5", "1 2"])
def test_other_labels_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be integers such as 0,1,2"):
        integers(text)


@pytest.mark.parametrize("labels", ["-1", "-1,2", "2,-1"])
def test_labels_may_begin_with_none(labels):
    parser = Parser("x")
    add_sampling(parser)
    assert parser.parse_args(["--labels", labels]).labels == labels
    assert parser.parse_args([f"--labels={labels}"]).labels == labels
