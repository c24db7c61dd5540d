import pytest

from lit_diffusion.extent import DEEPEST, check_extent


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_what_is_allowed_is_allowed_to_the_last_value_and_level():
    check_extent(list(range(100)), most=100)
    check_extent(nested(DEEPEST), most=1000)
    check_extent({1: 2**1000, "a": "x" * 10**6}, most=4)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (list(range(101)), "too many values"),
        ({"a": [0] * 99}, "too many values"),
        (nested(DEEPEST + 1), "nested too deep"),
        ([2**1024], "a number of 1,025 bits"),
        ({"x" * (10**6 + 1): 1}, "a text of 1,000,001 characters"),
    ],
)
def test_one_more_is_refused(content, reason):
    with pytest.raises(ValueError, match=reason):
        check_extent(content, most=100 if reason != "nested too deep" else 1000)
