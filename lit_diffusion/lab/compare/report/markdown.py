"""Text in Markdown, as GitHub reads it: names of arms and folders are text and never markup."""

import re

_MARKUP = re.compile(
    r"""[\\`*~|]               # escapes, code, bold, strike-through, cells
    | (?<![A-Za-z0-9])_        # italics; inside of a word an underscore is one
    | _(?![A-Za-z0-9])
    | <(?=[A-Za-z/!?])         # tags and addresses
    | &(?=\#?\w+;)             # entities
    | (?<=\])[(\[]             # links
    | ^(?:\#|>(?!\s\d)|[+-](?=\s))  # titles, quotes (and no bounds), lists
    """,
    re.VERBOSE,
)


def escaped(text: str) -> str:
    r"""Text that shows as it is, in one line.

    Example:
        >>> print(escaped("a|b **bold** <b> num_fake < 5 [1.2, 1.5]"))
        a\|b \*\*bold\*\* \<b> num_fake < 5 [1.2, 1.5]
    """
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def code(text: str) -> str:
    """Text in the type of code, in one line, between more backticks than it holds."""
    runs = re.findall("`+", text)
    fence = "`" * (1 + max((len(run) for run in runs), default=0))
    room = " " * (text.startswith("`") or text.endswith("`"))
    return f"{fence}{room}{' '.join(text.split())}{room}{fence}"
