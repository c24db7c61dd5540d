"""`lit-diffusion completion`: completion of commands, options and settings in a shell.

The shell calls `lit-diffusion completion --line TEXT` when the user presses TAB. The command
imports neither torch nor jsonargparse, so it is as fast as `--help`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from lit_diffusion.cli.fit import OPTIONS, trainer_arguments
from lit_diffusion.cli.main import COMMANDS, import_command
from lit_diffusion.cli.options import Parser
from lit_diffusion.config.shipped import find_shipped_config
from lit_diffusion.config.yaml_file import read_yaml

SUBCOMMANDS = {
    "analyze": ("consistency", "hessian", "interpolate", "landscape"),
    "convert": ("export", "import"),
}
WITH_SETTINGS = ("fit", "validate", "test", "predict", "doctor", "sweep", "train-extractor")
"""Commands that take settings of a config as options."""

SCRIPTS = {
    "bash": r"""_lit_diffusion() {
    local IFS=$'\n'
    COMPREPLY=($(lit-diffusion completion --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *[.=] ]] && compopt -o nospace
}
complete -o default -F _lit_diffusion lit-diffusion""",
    "zsh": r"""_lit_diffusion() {
    local -a candidates
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    candidates=(${(f)"$(lit-diffusion completion --line "$line" 2>/dev/null)"})
    compset -P '*='
    (( $#candidates )) || { _files; return }
    compadd -S '' -- ${(M)candidates:#*[.=]}
    compadd -- ${candidates:#*[.=]}
}
compdef _lit_diffusion lit-diffusion""",
    "fish": r"""function __lit_diffusion
    set -l option (string match -r -- '^-.*=' (commandline -ct))
    for candidate in (lit-diffusion completion --line (commandline -cp) 2>/dev/null)
        echo "$option$candidate"
    end
end
complete -c lit-diffusion -a '(__lit_diffusion)'""",
}
"""Shell -> completion script. If there are no candidates, the shell completes file names."""


def build_parser() -> Parser:
    """Build the argument parser of the command."""
    parser = Parser(
        "completion",
        """Print a script that completes commands, options and settings of configs at TAB.

    eval "$(lit-diffusion completion bash)"              # in ~/.bashrc
    eval "$(lit-diffusion completion zsh)"               # in ~/.zshrc, after compinit
    lit-diffusion completion fish | source               # in ~/.config/fish/config.fish""",
    )
    parser.add_argument("shell", nargs="?", choices=[*SCRIPTS], metavar="bash|zsh|fish")
    text = "print the candidates for the last word of this command line, as the scripts do"
    parser.add_rare("--line", metavar="TEXT", help=text)
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command: "completion", then options."""
    args = build_parser().parse_args(argv[1:])
    if args.line is not None:
        print("\n".join(complete(args.line)))
    elif args.shell is None:
        raise ValueError(f"needs a shell: {', '.join(SCRIPTS)}.")
    else:
        print(SCRIPTS[args.shell])


def complete(line: str) -> list[str]:
    """Return candidates for the last word of a command line; [] where a file is expected.

    The name of a setting is completed up to the next dot. A complete name ends with "=".

    Example:
        >>> complete("lit-diffusion fet")
        ['fetch-weights']
        >>> complete("lit-diffusion fit --trainer.max_st")
        ['--trainer.max_steps=']
    """
    words = line.split()[1:] + [""] * line.endswith(" ")
    if not words:
        return []
    *before, word = words
    if not before:
        candidates = [*COMMANDS, "--help", "--version"]
    elif before[0] not in COMMANDS:
        return []
    elif len(before) == 1 and before[0] in SUBCOMMANDS:
        candidates = [*SUBCOMMANDS[before[0]], "--help"]
    elif word.startswith("-") and "=" not in word:
        # A name is completed up to its next dot.
        candidates = [name[: name.find(".", len(word)) + 1] or name for name in _options(before)]
    else:
        option, equals, value = word.rpartition("=")
        word = value
        candidates = _choices(before, option if equals else before[-1])
    return sorted({name for name in candidates if name.startswith(word)})


def _options(words: Sequence[str]) -> Iterator[str]:
    """Names of the options and settings that may follow the words of a command line."""
    if words[0] in WITH_SETTINGS:
        yield from (f"--{name}" for name in OPTIONS if name not in ("model", "data", "trainer"))
        yield from (f"--trainer.{name}=" for name in trainer_arguments())
        for file in (word.rpartition("=")[2] for word in words if word.endswith(".yaml")):
            with suppress(OSError, ValueError):
                yield from _settings(
                    read_yaml(find_shipped_config(file) or os.path.expanduser(file))
                )
    if (parser := _parser(words)) is not None:
        yield from parser.option_names


def _settings(value: Any, name: str = "") -> Iterator[str]:
    """Options for the settings of a config; callbacks go by the names of their classes."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            if key != "class_path":
                part = "" if key == "init_args" else f".{str(key).rstrip('+')}"
                yield from _settings(item, name + part)
    elif isinstance(value, list) and name == ".trainer.callbacks":
        for callback in value:
            if isinstance(callback, dict) and "class_path" in callback:
                class_name = str(callback["class_path"]).rpartition(".")[2]
                yield from _settings(callback, f"{name}.{class_name}")
    else:
        yield f"--{name[1:]}="


def _choices(words: Sequence[str], option: str) -> list[str]:
    """Return the choices of an option or, if `option` is not one, of positional arguments."""
    parser = _parser(words)
    actions = parser.actions if parser else []
    is_option = option.startswith("-")
    return [
        choice
        for action in actions
        if (option in action.option_strings) or not (is_option or action.option_strings)
        for choice in action.choices or ()
    ]


def _parser(words: Sequence[str]) -> Parser | None:
    """The parser of a command; None for parsers of Lightning, which take seconds to build."""
    module = import_command(words[0])
    build = getattr(module, "build_parser", None) or getattr(module, "parser", None)
    arguments = words[1:2] if words[0] in SUBCOMMANDS else []
    return build(*arguments) if build else None
