"""Print the oldest versions that setup.cfg admits, as constraints for pip.

Arguments: setup.cfg, then the names of extras, whose packages are added to those of the core.
"""

import configparser
import re
import sys


def oldest_versions(setup: configparser.ConfigParser, extras: list[str]) -> dict[str, str]:
    """Package -> oldest version, of the core and of extras and the extras that these name."""
    lists = [setup["options"]["install_requires"]]
    for extra in extras:
        lists.append(setup["options.extras_require"][extra])
        inner = re.findall(r"^lit-diffusion\[(\S+)\]", lists[-1], re.MULTILINE)
        extras.extend(name for name in inner if name not in extras)
    lines = re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", "\n".join(lists), re.MULTILINE)
    return dict(lines)


if __name__ == "__main__":
    config = configparser.ConfigParser()
    config.read(sys.argv[1])
    for package, version in oldest_versions(config, sys.argv[2:]).items():
        print(f"{package}=={version}")
