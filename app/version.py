"""Finds the version of the Reprise that runs."""

from importlib import metadata


def version() -> str:
    try:
        return metadata.version("reprise-llm")
    except metadata.PackageNotFoundError:
        return "0+source"  # run from a checkout that is not installed
