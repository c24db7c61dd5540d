import pytest

from lit_diffusion.config.yaml_file import read_yaml


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a 1\nb: [" + "*a, " * 11 + "]", "more than 10 aliases"),
        ("a: &a [*a]", "Circular reference"),
        ("a: " + "[" * 99_000, "nested too deep"),  # which PyYAML itself reads very slowly
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("a: 1" + ":1" * 10**5, "has more than 100,000 bytes"),
    ],
)
def test_what_is_no_config_is_refused_by_name(tmp_path, text, reason):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.yaml.* .*({reason})"):
        read_yaml(tmp_path / "a.yaml")
