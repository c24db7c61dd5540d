import pytest
import yaml
from jsonargparse import ArgumentError, ArgumentParser

from lit_diffusion.yaml_extent import check_text, guard_options

MERGED = "\n".join(
    ["a0: &a0 {k: v}"]
    + [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12)]
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (MERGED, "too many values"),
        ("a: &a {b: *a}", "nested too deep"),
        ("[" * 3000, "nested too deep"),
        ("model: 1" + ":1" * 10**5, "a number of 200,001 characters"),
        ("model: " + "9" * 10**6, "a number of 1,000,000 characters"),
        ("model: 1." + "9" * 10**6, "a number of 1,000,002 characters"),
        ('model: !!int "' + "9" * 2000 + '"', "a number of 2,000 characters"),
    ],
)
def test_what_would_take_all_time_or_memory_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        check_text(text)


def test_what_is_long_and_no_number_passes():
    check_text("a: " + "x" * 10**5)
    check_text("a: '" + "x: 1, " * 10**4 + "'")
    check_text("base: &b {lr: 0.1}\nnext: {<<: *b, steps: 10}\n")
    check_text("")
    with pytest.raises(yaml.YAMLError):
        check_text("a: [1")


@pytest.mark.parametrize("text", ["1" + ":1" * 10**5, MERGED, "9" * 10**6])
def test_texts_in_which_yaml_is_read_again_are_looked_at(text):
    check_text(yaml.safe_dump({"steps": "{a: 1}"}))
    once = yaml.safe_dump({"steps": text})
    for inside in (once, yaml.safe_dump({"a": [once]})):
        with pytest.raises(ValueError, match=r"too many values|a number of"):
            check_text(inside)


def test_a_config_file_in_a_config_is_looked_at_too(tmp_path, monkeypatch):
    guard_options()
    monkeypatch.chdir(tmp_path)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--steps", type=dict)
    (tmp_path / "good.yaml").write_text("steps: {a: 1}")
    assert parser.parse_args(["--config", "good.yaml"]).steps == {"a": 1}
    (tmp_path / "evil.yaml").write_text(MERGED)
    with pytest.raises(ArgumentError, match="too many values"):
        parser.parse_args(["--config", "evil.yaml"])
