"""A rule's id -> the address of its page. Where the pages are stands here and nowhere else."""

ADDRESS = ""
"""Where the pages are published, with a slash at its end: a release is built with it (DSDOCTOR_PAGES, which setup.py reads). ""
in a checkout and in a build that names none: then an address is the part of it that is the same wherever the pages are."""


def page_address(rule: str) -> str:
    """The address of a rule's page, relative to the pages where it is not known where they are.

    >>> page_address("cuda-home-wrong").removeprefix(ADDRESS)
    'rules/cuda-home-wrong/'
    """
    return f"{ADDRESS}rules/{rule}/"
