import pytest

from lit_diffusion.cli.options import Parser


def test_a_parser_raises_instead_of_printing_usage(capsys):
    parser = Parser("x", "Do x.")
    parser.add_argument("--colour", required=True)
    with pytest.raises(ValueError, match="colour must be given"):
        parser.parse_args([])
    with pytest.raises(ValueError, match="Did you mean 'colour'"):
        parser.parse_args(["--colour", "red", "--color", "blue"])
    assert capsys.readouterr() == ("", "")
