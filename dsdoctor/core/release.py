"""dsdoctor's release: its version, and where the pages of its rules are published. setup.py reads and writes this file as text."""

__version__ = "0.2.0"
ADDRESS = ""
"""Where the pages are published, with a slash at its end: a release is built with it (DSDOCTOR_PAGES, which setup.py reads). ""
in a checkout and in a build that names none: then an address is the part of it that is the same wherever the pages are."""


def page_address(rule: str) -> str:
    """The address of a rule's page, relative to the pages where it is not known where they are.

    >>> page_address("cuda-home-wrong").removeprefix(ADDRESS)
    'rules/cuda-home-wrong/'
    """
    return f"{ADDRESS}rules/{rule}/"
