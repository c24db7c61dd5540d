import os

import pytest

from lit_diffusion.config.yaml_file import read_yaml

pytestmark = pytest.mark.usefixtures("folder")


def write(text):
    with open("a.yaml", "w") as file:
        file.write(text)


def test_a_config_is_read():
    write("a: {b: [1, .inf]}\n")
    assert read_yaml("a.yaml") == {"a": {"b": [1, float("inf")]}}


ALIASES = "\n".join(
    ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9))]
)
MERGES = "\n".join(
    ["a0: &a0 {k: v}"]
    + [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12)]
)


def test_a_few_aliases_and_keys_of_any_kind_are_read():
    write("base: &b {lr: 0.1}\n7: {<<: *b, steps: 2001-01-01}\n")
    assert read_yaml("a.yaml")[7]["lr"] == 0.1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ALIASES, "more than 10 aliases"),
        (MERGES, "more than 10 aliases"),
        ("a: &a [*a]", "Circular reference"),
        ("a: &a {b: *a}", "Circular reference"),
        ("a: " + "[" * 500 + "]" * 500, "nested too deep"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("a: [1", "line 1"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("#" * 10**5 + "\n", "has more than 100,000 bytes"),
        ("a: 1" + ":1" * 10**5, "has more than 100,000 bytes"),
    ],
)
def test_what_is_no_config_is_refused_by_name(text, reason):
    write(text)
    with pytest.raises(ValueError, match=f"^a.yaml.* .*({reason})"):
        read_yaml("a.yaml")


def test_what_is_no_file_is_refused_and_not_waited_for():
    os.mkfifo("a.yaml")
    os.symlink("/dev/zero", "b.yaml")
    for name in ("a.yaml", "b.yaml", "."):
        with pytest.raises(ValueError, match="is no regular file"):
            read_yaml(name)
