"""The versions of gaverify and of what it stands on, in one place that imports nothing heavy."""

__version__ = "0.1.0"
HOME = "https://github.com/gaverify/gaverify"
"""Where the source and the rules' pages can be read."""


def installed(package: str) -> str:
    """Returns the version of a package, or "not installed"; its metadata is read, as importing torch takes long."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
