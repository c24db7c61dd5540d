import os

import pytest

from lit_diffusion.commands.yaml_file import read_yaml


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text):
    with open("a.yaml", "w") as file:
        file.write(text)


def test_a_config_is_read():
    write("a: {b: [1, .inf]}\n")
    assert read_yaml("a.yaml") == {"a": {"b": [1, float("inf")]}}


ALIASES = "\n".join(
    ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9))]
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ALIASES, "hold too many values"),
        ("a: &a [*a]", "nested too deep|too many values"),
        ("a: " + "[" * 3000, "nested too deep"),
        ("a: " + "9" * 5000, "a number of 5,000 characters"),
        ("a: [1", "line 1"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("#" * 10**7 + "\n", "has more than 10,000,000 bytes"),
    ],
)
def test_what_is_no_config_is_refused_by_name(text, reason):
    write(text)
    with pytest.raises(ValueError, match=f"^a.yaml .*({reason})"):
        read_yaml("a.yaml")


def test_what_is_no_file_is_refused_and_not_waited_for():
    os.mkfifo("a.yaml")
    os.symlink("/dev/zero", "b.yaml")
    for name in ("a.yaml", "b.yaml", "."):
        with pytest.raises(ValueError, match="is no regular file"):
            read_yaml(name)
