"""What setup.cfg cannot say: in the package index the README's links lead to the repository."""

import pathlib
import re

from setuptools import setup

REPOSITORY = "https://github.com/tfparallel/tfparallel/blob/main/"
PICTURES = "https://raw.githubusercontent.com/tfparallel/tfparallel/main/"
# A link to a file: no address, and no place in the page.
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)")


def led_there(link: re.Match) -> str:
    """A link of the README, with its whole address."""
    return f"]({PICTURES if link[1].endswith('.svg') else REPOSITORY}{link[1]}"


readme = pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(
    long_description=LINK.sub(led_there, readme),
    long_description_content_type="text/markdown",
)
